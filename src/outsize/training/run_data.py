"""The data set of a run: the model's tokenizer, and sequences made with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outsize.config import Config
from outsize.data import open_data
from outsize.data.corpus_files import find_sources
from outsize.data.packed_dataset import PackedDataset
from outsize.errors import DataError
from outsize.session.job.prepare import Job
from outsize.storage.directory import needed_directory


def open_dataset(
    config: Config, prepared: Job, run_dir: Path, announce: Callable[[str], None]
) -> PackedDataset:
    """Open the data set of ``config``, tokenised into ``run_dir`` unless it is there already.

    Raises:
        DataError: there is no tokenizer, or the data cannot be used.
        ConfigError: sequences are longer than the model takes.
    """
    sources = find_sources(Path(config.data.path), config.data.glob)
    pretokenised = config.data.format == "tokens" or sources.container == "tokens"
    tokenizer = None if pretokenised else load_tokenizer(prepared)
    text_config = prepared.hf_config.get_text_config()
    cache_dir = run_dir / "data"
    with needed_directory(cache_dir, "train.run_dir"):
        dataset = open_data(
            config.data.path,
            tokenizer,
            seq_len=config.data.seq_len,
            cache_dir=cache_dir,
            seed=config.train.seed,
            format=config.data.format,
            pack=config.data.pack,
            text_field=config.data.text_field,
            glob=config.data.glob,
            max_positions=getattr(text_config, "max_position_embeddings", None),
            vocab_size=getattr(text_config, "vocab_size", None),
        )
    announce(dataset.detected.describe())
    return dataset


def load_tokenizer(prepared: Job) -> Any:
    """Load the tokenizer beside the model.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            prepared.directory, trust_remote_code=prepared.config.model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(
            f"no tokenizer in {prepared.directory}: {first_line}; copy the tokenizer files of the model there, or use "
            "pre-tokenised data with data.format=tokens"
        ) from error
