"""The data set of a run: the model's tokenizer, and sequences made with it."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outsize.config import Config, SourceConfig
from outsize.data import Corpus, ModelLimits, open_data
from outsize.data.packed_dataset import PackedDataset
from outsize.data.reading.corpus_files import find_sources
from outsize.errors import DataError
from outsize.session.job.prepare import Prepared
from outsize.storage.directory import needed_directory


def open_dataset(
    config: Config,
    prepared: Prepared,
    run_dir: Path,
    announce: Callable[[str], None],
    *,
    measured: bool = False,
) -> PackedDataset:
    """Open the data set of ``config``, tokenised into ``run_dir`` unless it is there already.

    Args:
        config: of the run.
        prepared: its model.
        run_dir: its directory.
        announce: told what the data were taken for.
        measured: open what the model is measured on, and not what the model is trained on.

    Raises:
        DataError: there is no tokenizer, or the data cannot be used.
        ConfigError: sequences are longer than the model takes.
    """
    corpora = corpora_of(config, measured=measured)
    is_tokens = [
        corpus.format == "tokens" or find_sources(Path(corpus.path), corpus.glob).container == "tokens"
        for corpus in corpora
    ]
    tokenizer = None if all(is_tokens) else load_tokenizer(prepared)
    text_config = prepared.hf_config.get_text_config()
    cache_dir = run_dir / "data"
    with needed_directory(cache_dir, "train.run_dir"):
        dataset = open_data(
            corpora,
            tokenizer,
            seq_len=config.data.seq_len,
            cache_dir=cache_dir,
            seed=config.train.seed,
            pack=config.data.pack,
            template=config.data.template,
            limits=ModelLimits(
                max_positions=getattr(text_config, "max_position_embeddings", None),
                vocab_size=getattr(text_config, "vocab_size", None),
            ),
        )
    with contextlib.ExitStack() as unless_used:
        unless_used.callback(dataset.close)
        kept = dataset.kept()
        announce(
            f"held out for evaluation: {dataset.num_sequences:,} sequences"
            if measured and config.eval.split
            else dataset.describe(kept)
        )
        kept.check(config.data.seq_len)
        unless_used.pop_all()
    return dataset


def corpora_of(config: Config, *, measured: bool = False) -> list[Corpus]:
    """Return the sources of a run's data, or of what the run is ``measured`` on."""
    corpora = [
        Corpus(**{name: getattr(source, name) for name in SourceConfig.model_fields}, split=config.eval.split)
        for source in (config.data, *config.data.more)
    ]
    if not measured:
        return corpora
    if config.eval.data is not None:
        return [replace(corpora[0], path=config.eval.data, weight=1.0)]
    return [replace(corpus, weight=1.0, held=True) for corpus in corpora]


def load_tokenizer(prepared: Prepared) -> Any:
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
