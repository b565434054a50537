"""What a run has where its configuration does not say: how long it trains, how its data lie in sequences, its rate.

The one place that decides that. A key that the user has given is never changed, and what was chosen is said in a line.

- A run that goes on has what it had, whatever it would be given today.
- Conversations, prompts and preferences are used once, as fine-tuning is counted in epochs. Text is trained for the
  steps of `TrainConfig`.
- Conversations and prompts lie whole in their sequences (`data.pack` is documents), which are as long as the longest
  of them, to a limit; and a step has a few of them.
- Adapters begin at zero and learn with ten times the rate of a whole model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outsize.checkpoint.begun_adapters import with_begun_adapters
from outsize.choices import OF_TEXTS
from outsize.config import Config
from outsize.config.section import Section
from outsize.data.opening import Making, Progress
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.data.reading.record_lengths import length_for, sequences_for
from outsize.data.survey import kept_documents
from outsize.model.build import is_masked
from outsize.model.sizes.model_spec import num_positions
from outsize.optim.optimizer_names import named
from outsize.storage.directory import needed_directory
from outsize.training.run_data import corpora_of, files_of, load_tokenizer, tokenising
from outsize.training.run_dir import runs_so_far

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Announce = Callable[[str], None]
LORA_LR = 2e-4
# What a run that goes on keeps, by section: keys of a group are kept where none of them is given.
_KEPT: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "data": (("pack",), ("seq_len",)),
    "train": (("steps", "epochs"), ("tokens_per_step", "batch_size")),
    "optimizer": (("lr",),),
}


@dataclass(frozen=True, slots=True)
class Settled:
    """A run with nothing left open that its data decide.

    Attributes:
        config: of the run.
        may_unpack: whether documents get a sequence each where the model cannot keep several apart.
        chosen: dotted keys that nobody has given, with what they are.
    """

    config: Config
    may_unpack: bool = False
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return what to tell of that; empty for nothing."""
        pairs = ", ".join(f"{key}={_written(value)}" for key, value in self.chosen.items())
        return f"chosen for these data, and yours to set: {pairs}" if pairs else ""


def settle(
    config: Config,
    run_dir: Path,
    announce: Announce = lambda _: None,
    *,
    resumed: Path | None = None,
    tokens_in: Path | None = None,
    num_ranks: int = 1,
    objective: str | None = None,
) -> Settled:
    """Choose what ``config`` leaves open, and say so.

    Args:
        config: of the run, as the user gave it.
        run_dir: directory of the run.
        announce: called with lines for people.
        resumed: checkpoint that it goes on from; None for none.
        tokens_in: directory that keeps the tokens in place of ``run_dir``; None for that.
        num_ranks: processes that share a step.
        objective: whose trainer trains, where it is not the engine alone.

    Raises:
        OutsizeError: model or data cannot be read.
    """
    if objective is None and config.train.objective != "sft":
        return Settled(config)  # which its own command trains
    if config.train.resume != "none":
        earlier = (before for _, before in runs_so_far(config, run_dir, resumed))
        if (before := next((each for each in earlier if each is not None), None)) is not None:
            return Settled(_as_it_was(config, before))
    settled = _of_data(Settled(config), tokens_in or run_dir, announce, num_ranks, objective)
    if config.train.method == "lora" and not _given(config.optimizer, "lr") and named(config.optimizer.name):
        settled = _with(settled, {"optimizer.lr": LORA_LR})
    if line := settled.line():
        announce(line)
    return settled


def _as_it_was(config: Config, before: Config) -> Config:
    settings: dict[str, Any] = {}
    for section, groups in _KEPT.items():
        for keys in groups:
            if section == "optimizer" and config.optimizer.name != before.optimizer.name:
                continue
            if not any(_given(getattr(config, section), key) for key in keys):
                settings |= {f"{section}.{key}": getattr(getattr(before, section), key) for key in keys}
    return _with(Settled(config), settings).config


def _of_data(
    settled: Settled, tokens_in: Path, announce: Announce, num_ranks: int, objective: str | None
) -> Settled:
    """Choose what follows from the data: nothing for text, and where an order within windows needs their end."""
    config = settled.config
    in_epochs = {} if _given(config.train, "steps", "epochs") else {"train.epochs": 1.0}
    if objective is not None and objective not in OF_TEXTS:
        return _with(settled, in_epochs)
    if config.data.window is not None or not are_records(corpora_of(config.data, config.eval)):
        return settled
    settled = _with(settled, in_epochs)
    return settled if objective is not None else _laid_out(settled, tokens_in, announce, num_ranks)


def _laid_out(settled: Settled, tokens_in: Path, announce: Announce, num_ranks: int) -> Settled:
    """Choose how records lie in sequences, and how many of these a step has."""
    config = settled.config
    open_keys = {key for key in ("pack", "seq_len") if not _given(config.data, key)}
    is_sized = _given(config.train, "tokens_per_step", "batch_size", "microbatches")
    if not open_keys and is_sized:
        return settled
    lengths, limit = _lengths(config, tokens_in, announce)
    if limit is None:  # whose hidden tokens are predicted
        return settled
    chosen: dict[str, Any] = {}
    if "pack" in open_keys:
        apart = config.data.group_by_length or config.model.attention == "flash_attention_2"
        chosen["data.pack"] = "none" if apart else "documents"
    if "seq_len" in open_keys and len(lengths):
        chosen["data.seq_len"] = length_for(lengths, limit, config.train.tokens_per_step, config.microbatches)
    settled = _with(settled, chosen)
    if not is_sized and len(lengths):
        batch = _records_in_step(settled.config, lengths)
        settled = _with(settled, {"train.batch_size": max(num_ranks, batch)})
    return Settled(settled.config, chosen.get("data.pack") == "documents", settled.chosen)


def _lengths(config: Config, tokens_in: Path, announce: Announce) -> tuple[NDArray[np.int64], int | None]:
    """Return the tokens of each record, and those of the longest sequence that the model takes.

    The latter is None where the model predicts hidden tokens: nothing is chosen for such a one.
    """
    _, begun = with_begun_adapters(config)
    model = files_of(config, begun)
    if is_masked(model.hf_config):
        return np.empty(0, np.int64), None
    text_config = model.hf_config.get_text_config()
    with needed_directory(tokens_in / "data", "train.run_dir"):
        lengths = record_lengths(
            corpora_of(config.data, config.eval),
            lambda: load_tokenizer(model, config.model.trust_remote_code),
            cache_dir=tokens_in / "data",
            template=config.data.template,
            vocab_size=getattr(text_config, "vocab_size", None),
            progress=tokenising(announce),
        )
    return lengths, num_positions(text_config.to_dict()) or 2**62


def _records_in_step(config: Config, lengths: NDArray[np.int64]) -> int:
    """Return the sequences of a step that hold some records each."""
    num_records, is_packed = len(lengths) * (1 - config.eval.split), config.data.pack != "none"
    return sequences_for(num_records, float(lengths.mean()) / config.data.seq_len if is_packed else 1.0)


def _given(section: Section, *keys: str) -> bool:
    """Return whether a user has said what any of ``keys`` is."""
    return not section.model_fields_set.isdisjoint(keys)


def _with(settled: Settled, values: Mapping[str, Any]) -> Settled:
    """Return the run with ``values`` by dotted key, which are chosen."""
    config = settled.config
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return Settled(config, settled.may_unpack, {**settled.chosen, **values})


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def are_records(corpora: Sequence[Corpus]) -> bool:
    """Return whether every source holds conversations, or prompts with completions, and none plain text or tokens.

    Raises:
        DataError: a source cannot be read, or its format is not known.
    """
    return all(_format_of(corpus) not in ("text", "tokens") for corpus in corpora)


def record_lengths(
    corpora: Sequence[Corpus],
    tokenizer: "Callable[[], PreTrainedTokenizerBase]",
    *,
    cache_dir: Path,
    template: str | None = None,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.int64]:
    """Return the tokens of each record, int64 ``[records]``; they are kept in ``cache_dir``, where a run finds them.

    Args:
        corpora: sources of records, see `are_records`.
        tokenizer: loads the model's tokenizer.
        cache_dir: see `open_data`.
        template: of conversations, see `ChatTemplate`.
        vocab_size: rows of the model's embedding; None where that is not known.
        progress: see `open_data`.

    Raises:
        DataError, StorageError: see `open_data`.
    """
    making = Making(tokenizer(), cache_dir, template, vocab_size, progress, None)
    lengths = [np.empty(0, np.int64)]
    for corpus in corpora:
        store, _ = making.open(corpus)
        try:
            lengths += [block for block, _ in kept_documents(store, None)]
        finally:
            store.close()
    return np.concatenate(lengths)


def _format_of(corpus: Corpus) -> str:
    sources = find_sources(Path(corpus.path), corpus.glob)
    if corpus.format != "auto":
        return corpus.format
    return "tokens" if sources.container == "tokens" else DocumentReader(sources, None, corpus).detect()
