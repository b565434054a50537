"""From files to batches.

How a data set becomes batches, one file per step::

    files       which files a path names, and their decompressed bytes
    lines       lines and pieces of text       records     JSON lines, JSON arrays, Parquet
    formats     what a record means            documents   the stream of documents
    chat        conversations and their mask   encode      token ids and masks
    writer, cache                              tokens on disk, written once
    tokens, pretokenized                       reading them
    permute, packed, batch                     the order, the sequences, the batch
    prefetch                                   batches made ahead of the step
    shared                                     one rank's part of each
    opening                                    all of the above, in order

Nothing holds the corpus in memory: a chunk of a file, a batch of the tokenizer and the sequences of a step
are what is live at any time.
"""

from outsize.data.batch import IGNORED, Batch
from outsize.data.detected import Detected
from outsize.data.formats import FORMATS
from outsize.data.opening import Progress, open_data
from outsize.data.packed_dataset import PackedDataset
from outsize.data.prefetch import Prefetcher, PrefetchStatistics
from outsize.data.shared import SharedData

__all__ = [
    "FORMATS",
    "IGNORED",
    "Batch",
    "Detected",
    "PackedDataset",
    "PrefetchStatistics",
    "Prefetcher",
    "Progress",
    "SharedData",
    "open_data",
]
