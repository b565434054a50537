"""From files to batches.

How a data set becomes batches, one file per step::

    reading.corpus_files  sources, the files a path names, and their decompressed bytes
    reading.hub_datasets  splits of a directory, records of the datasets library
    reading.text_records  lines, pieces of text, JSON records
    reading.formats       what a record means
    reading.documents     records of every kind of file, and the stream of documents
    chat                  conversations and their mask
    encode                token ids and masks
    token_cache           tokens on disk, written once
    tokens                reading them, and those made elsewhere
    survey                what a data set holds, and how much of it is trained
    packed_dataset, batch the order, the sequences, the batch
    layouts               mixtures, packed documents, windows
    prefetch              batches made ahead of the step, and one rank's part of each
    opening               all of the above, in order

Nothing holds the corpus in memory: a chunk of a file, a batch of the tokenizer and the sequences of a step
are what is live at any time.
"""

from outsize.data.batch import IGNORED, Batch
from outsize.data.opening import ModelLimits, Progress, open_data
from outsize.data.packed_dataset import PackedDataset
from outsize.data.prefetch import Prefetcher, SharedData
from outsize.data.reading.corpus_files import Corpus
from outsize.data.reading.formats import FORMATS
from outsize.data.survey import Detected

__all__ = [
    "FORMATS",
    "IGNORED",
    "Batch",
    "Corpus",
    "Detected",
    "ModelLimits",
    "PackedDataset",
    "Prefetcher",
    "Progress",
    "SharedData",
    "open_data",
]
