"""Open the data of a run, read conversations as it does, and name settings without effect on its data and model."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from outsize.checkpoint import tokenizer_files
from outsize.checkpoint.files.checkpoint_files import has_tokenizer, locate_checkpoint
from outsize.config import Config, DataConfig, EvalConfig, SourceConfig, Surroundings
from outsize.data import Corpus, ModelLimits, open_data
from outsize.data.batch import Masker
from outsize.data.chat import ChatTemplate
from outsize.data.packed_dataset import PackedDataset
from outsize.data.reading.conversations import (
    SYSTEM_FIELDS,
    as_messages,
    holds_messages,
    is_blank,
    read_messages,
    read_template_arguments,
    read_tools,
    system_field,
    with_system,
)
from outsize.data.reading.corpus_files import find_sources
from outsize.data.reading.formats import CONVERSATIONS, unread_fields
from outsize.detail import Detail
from outsize.errors import DataError, StorageError
from outsize.hardware.cpu import read_cpu
from outsize.model.build import is_masked, load_hf_config
from outsize.model.sizes.model_spec import num_positions
from outsize.session.job.planning import why_whole
from outsize.session.job.prepare import Job
from outsize.session.steps import list_files
from outsize.storage.directory import needed_directory
from outsize.units import format_bytes

_OFFERS = ("tools", "functions", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, to be answered by the assistant.

    Attributes:
        messages: dicts with ``role`` and ``content``, and what else a chat template reads.
        tools: JSON schemas that are offered to the template; None for none.
        options: further variables of the template, e.g. ``enable_thinking``.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def read_prompt(record: Mapping[str, Any], where: str, *, chat: bool = False) -> str | Conversation:
    """Return what a record asks for: a text to go on from, or a conversation to answer.

    Args:
        record: with ``prompt``, a text, or a conversation under ``messages``, ``conversations`` or ``prompt``; beside a
            conversation ``tools`` and ``chat_template_kwargs`` count, and ``system``, which makes one of a text, as in
            data that are trained on.
        where: ``file:line``, for errors.
        chat: whether a text is the message of a user.

    Raises:
        DataError: it asks for nothing, or says of a conversation what a text does not have.
    """
    name, chat = _field_of(record), chat or system_field(dict(record)) is not None
    if not name or not isinstance(record[name], str | list | dict):
        raise DataError(f"{where}: a record needs 'prompt', a text, or 'messages', a list of objects")
    text = record[name]
    if name == "prompt" and isinstance(text, str) and not chat and not holds_messages(text):
        beside = [each for each in _OFFERS if not is_blank(record.get(each))]
        if beside:
            raise DataError(
                f"{where}: {', '.join(beside)}: beside a 'prompt' that is a text to go on from; for a conversation say "
                "--chat, or write 'messages'"
            )
        return text
    if name == "prompt":
        messages = as_messages(dict(record), name, "user", where, {})
    else:
        messages = read_messages(dict(record), name, where, {})
    messages = with_system(messages, dict(record), where)
    return Conversation(
        messages, read_tools(dict(record), where), read_template_arguments(dict(record), where)
    )


def unread_of(record: Mapping[str, Any], *, is_scored: bool = False) -> list[str]:
    """Return the fields of a record to be answered, or scored, that hold something and are not read."""
    if is_scored and record.get("completion") is None and isinstance(record.get("text"), str):
        return unread_fields(dict(record), {"text"})
    return unread_fields(
        dict(record), {_field_of(record), *SYSTEM_FIELDS, *_OFFERS, *(("completion",) if is_scored else ())}
    )


def _field_of(record: Mapping[str, Any]) -> str:
    return next(
        (name for name in (*CONVERSATIONS, "prompt") if record.get(name) not in (None, "", [], {})), ""
    )


def chat_text(tokenizer: Any, conversation: Conversation) -> str:
    """Return a conversation as text, by the template of its tokenizer, up to where the reply begins.

    Raises:
        DataError: the template refuses the conversation.
    """
    return ChatTemplate(tokenizer).open(conversation.messages, conversation.tools, conversation.options)


# Between two lines that tell how much is tokenised.
SAY_EVERY_S = 10.0


class ModelFiles(Protocol):
    """What tells how text becomes tokens of a model, and how many."""

    @property
    def directory(self) -> Path:
        """Where its tokenizer lies."""

    @property
    def hf_config(self) -> Any:
        """Its own configuration."""


def open_dataset(
    config: Config,
    model: ModelFiles,
    run_dir: Path,
    announce: Callable[[str], None],
    *,
    measured: bool = False,
) -> PackedDataset:
    """Open the data set of ``config``, tokenised into ``run_dir`` unless it is there already, and say what is in it.

    Args:
        config: of the run.
        model: of the run.
        run_dir: its directory.
        announce: told what the data were taken for.
        measured: open what the model is measured on, and not what the model is trained on.

    Raises:
        DataError: there is no tokenizer, or the data cannot be used.
        ConfigError: sequences are longer than the model takes.
    """
    with contextlib.ExitStack() as unless_used:
        dataset = unless_used.enter_context(_open(config, model, run_dir, measured, announce))
        tokens = dataset.kept()
        if measured and config.eval.split:
            announce(f"held out for evaluation: {dataset.num_sequences:,} sequences")
        else:
            announce(dataset.describe(tokens))
            announce(Detail(dataset.shown()))
        if measured:
            tell_of_overlap(config, announce)
        tokens.check(config.data.seq_len)
        unless_used.pop_all()
    return dataset


def tokenising(announce: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return what tells from time to time how much of a source is tokenised."""
    said_s = time.monotonic()

    def progress(num_read: int, num_bytes: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            share = (
                f"{num_read / num_bytes:.0%} of {format_bytes(num_bytes)}"
                if num_bytes
                else "some of a dataset"
            )
            announce(f"tokenised {share}")

    return progress


def _open(
    config: Config, model: ModelFiles, run_dir: Path, measured: bool, announce: Callable[[str], None]
) -> PackedDataset:
    corpora = corpora_of(config.data, config.eval, measured=measured)
    is_tokens = [
        corpus.format == "tokens"
        or find_sources(Path(corpus.path), corpus.glob, measured=corpus.measured).container == "tokens"
        for corpus in corpora
    ]
    masks = is_masked(model.hf_config)
    tokenizer = (
        None if all(is_tokens) and not masks else load_tokenizer(model, config.model.trust_remote_code)
    )
    text_config = model.hf_config.get_text_config()
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
            window=None if measured else config.data.window,
            progress=tokenising(announce),
            limits=ModelLimits(
                max_positions=num_positions(text_config.to_dict()),
                vocab_size=getattr(text_config, "vocab_size", None),
            ),
        )
    if config.data.is_grouped and not measured:
        dataset.grouped(config.sequences_per_step)
    if not masks:
        return dataset
    with contextlib.ExitStack() as unless_used:
        unless_used.enter_context(dataset)
        masker = Masker(
            tokenizer,
            config.train.seed,
            mlm_probability=config.data.mlm_probability,
            mask_replace_prob=config.data.mask_replace_prob,
            random_replace_prob=config.data.random_replace_prob,
            vocab_size=getattr(text_config, "vocab_size", None),
        )
        unless_used.pop_all()
    announce(masker.describe())
    return dataset.masked(masker)


def corpora_of(data: DataConfig, evaluated: EvalConfig, *, measured: bool = False) -> list[Corpus]:
    """Return the sources of a run's data, or of what the run is ``measured`` on."""
    corpora = [
        Corpus(**{name: getattr(source, name) for name in SourceConfig.model_fields}, split=evaluated.split)
        for source in (data, *data.more)
    ]
    if not measured:
        return corpora
    if evaluated.data is not None:
        return [replace(corpora[0], path=evaluated.data, weight=1.0, measured=True)]
    return [replace(corpus, weight=1.0, held=True) for corpus in corpora]


def tell_of_overlap(config: Config, announce: Callable[[str], None]) -> None:
    """Say which file of ``eval.data`` is trained on as well."""
    if config.eval.data is None:
        return
    trained, measured = (
        [
            file.path.resolve()
            for corpus in corpora_of(config.data, config.eval, measured=is_measured)
            for file in find_sources(Path(corpus.path), corpus.glob, measured=is_measured).files
        ]
        for is_measured in (False, True)
    )
    both = sorted(set(trained) & set(measured))
    if both:
        announce(
            f"note: eval.data: {both[0]} is trained on as well, so its loss is not that of texts never seen"
        )


def data_of(dataset: PackedDataset, data: DataConfig) -> dict[str, Any]:
    """Return what tells the sequences of a run from others, and the files that they come from."""
    sources = [(str(source.path), source.glob) for source in (data, *data.more)]
    return {**dataset.identity(), "files": list_files(sources)}


def load_tokenizer(model: ModelFiles, trust_remote_code: bool) -> Any:
    """Load the tokenizer beside the model.

    Raises:
        DataError: there is none.
    """
    try:
        return tokenizer_files.load_tokenizer(model.directory, trust_remote_code=trust_remote_code)
    except StorageError:
        raise
    except Exception as error:  # transformers and its tokenizers raise a dozen kinds
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(
            f"no tokenizer in {model.directory}: {first_line}; copy the tokenizer files of the model there, or use "
            "pre-tokenised data with data.format=tokens"
        ) from error


@dataclass(frozen=True)
class _Files:
    """A model of which only tokenizer and configuration are read."""

    directory: Path
    hf_config: Any


def files_of(config: Config, begun: Path | None = None) -> ModelFiles:
    """Return what is read of a run's model where its weights are not.

    Args:
        config: of the run.
        begun: directory of adapters that it begins with; None for no directory.

    Raises:
        OutsizeError: there is no such model.
    """
    return _Files(
        begun if begun is not None and has_tokenizer(begun) else locate_checkpoint(config.model.path),
        load_hf_config(config.model.path, config.model.trust_remote_code),
    )


def notes_of(config: Config, prepared: Job, num_processes: int = 1) -> list[str]:
    """Return a line for every setting of ``config``, as the user gave it, without effect on the run that it came to.

    And one of what of the optimizer's state is kept in fewer bits than a plain fp32 run has, and one of steps that
    cannot be cut.
    """
    container = None
    with contextlib.suppress(DataError):  # which says so itself where it is opened
        container = find_sources(Path(config.data.path), config.data.glob).container
    around = Surroundings(
        num_processes=num_processes,
        num_numa_nodes=len(read_cpu(Path("/")).numa_nodes) or None,
        device=str(prepared.machine.devices),
        home=prepared.machine.home,
        dtype=prepared.dtype,
        chunks_loss=prepared.chunk_tokens is not None,
        container=container,
        one_file=Path(config.data.path).is_file(),
        masks=is_masked(prepared.hf_config),
    )
    lossy = prepared.plan.state.lossy
    rounded = [f"not bit-exact, since rounded by chance: {' and '.join(lossy)}"] if lossy else []
    reason = why_whole(prepared.split, prepared.measured)
    is_one = (
        config.train.microbatches is None and prepared.config.microbatches == 1 < config.sequences_per_step
    )
    uncut = [f"steps are not cut into microbatches: {reason}"] if reason and is_one else []
    return [f"note: {note}" for note in (*config.notes(around), *rounded, *uncut)]


def over(dataset: PackedDataset, prepared: Job, announce: Callable[[str], None]) -> Job:
    """Return the run over its data: with their chat template, and its steps where their number follows from them."""
    prepared = replace(prepared, template=dataset.template, reply_end=dataset.reply_end)
    if prepared.config.train.epochs is None:
        return prepared
    prepared = replace(prepared, run=prepared.run.over(dataset.num_sequences))
    config = prepared.config
    epochs = f"{config.train.epochs:g} {'epoch' if config.train.epochs == 1 else 'epochs'}"
    steps = f"{config.train.steps:,} steps of {config.sequences_per_step}"
    announce(Detail(f"{epochs} of {dataset.num_sequences:,} sequences are {steps}"))
    return prepared


def with_tokenizer(prepared: Job) -> Job:
    """Return the run with the tokenizer of the model that the user names, where the checkpoint came without one.

    The Hugging Face ``Trainer`` saves one only if it was given one.
    """
    named = Path(prepared.config.model.path)
    if any(prepared.directory.glob("tokenizer*")) or not named.is_dir():
        return prepared
    return replace(prepared, directory=named)
