"""From the records of an objective to what its trainer takes: rows, and what makes a batch of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.config import Config
from outsize.data.batch import IGNORED
from outsize.data.chat import ChatTemplate
from outsize.data.chat.chat_forms import reply_end
from outsize.data.packed_dataset import PackedDataset
from outsize.errors import ConfigError, DataError
from outsize.model.build import is_masked
from outsize.objectives.objective_models import Row
from outsize.objectives.objective_records import Classes, as_dataset, as_read, as_texts, begun_once, read_rows
from outsize.objectives.recipes import RECIPES, ROW, Recipe, TeacherLogits, teacher_logits_of
from outsize.storage.directory import temporary_directory
from outsize.training.defaults import settle
from outsize.training.run_data import ModelFiles, files_of, load_tokenizer, open_dataset
from outsize.training.run_dir import choose_run_dir
from outsize.wrapped.writing.scoring import ScoredText

Collate = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a trainer is given of the data.

    Attributes:
        tokenizer: of the model, with a token for padding.
        rows: that train.
        measured: that the model is measured on; None for none.
        collate: makes a batch of rows; None where the trainer itself does.
        changes: what the model's config says of the data.
        teacher: its logits, where they are read and not computed.
        reply_end: what ends a reply of a conversation, as the chat template writes it; empty for nothing.
    """

    tokenizer: Any
    rows: Any
    measured: Any = None
    collate: Collate | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    teacher: TeacherLogits | None = None
    reply_end: str = ""


def prepare_data(
    config: Config,
    objective: str,
    recipe: Recipe,
    files: ModelFiles,
    place: tuple[ExitStack, Path],
    announce: Callable[[str], None],
) -> Prepared:
    """Read the data of a run.

    Args:
        config: of the run.
        objective: of the run.
        recipe: of the objective.
        files: of the model.
        place: what is entered in whatever stays open, and the run's directory.
        announce: told what the data are.

    Raises:
        OutsizeError: they cannot be used.
    """
    tokenizer = load_tokenizer(files, config.model.trust_remote_code)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise DataError(
            f"the tokenizer in {files.directory} has neither a pad nor an EOS token; give it a pad_token"
        )
    if not recipe.fields:
        if is_masked(files.hf_config):
            raise ConfigError(
                f"train.objective={objective} learns what a teacher says comes next, and a "
                f"{files.hf_config.model_type} predicts hidden tokens; train it with train.objective=sft"
            )
        return _packed(config, files, tokenizer, place, announce)
    rows = read_rows(config, objective, recipe, announce)
    measured = read_rows(config, objective, recipe, announce, measured=True) if config.eval.on else None
    announce(
        f"{config.data.path}: {len(rows):,} records with {', '.join(rows[0])}"
        + ("" if measured is None else f", {len(measured):,} to measure on")
    )
    if recipe.by_trl:
        return _for_trl(config, recipe, tokenizer, (rows, measured), announce)
    _tell_idle(config, announce)
    return _encoded(config, objective, files, tokenizer, (rows, measured), announce)


def _for_trl(
    config: Config,
    recipe: Recipe,
    tokenizer: Any,
    splits: tuple[list[Row], list[Row] | None],
    announce: Callable[[str], None],
) -> Prepared:
    """Return the rows that a trainer of TRL makes tokens of; the tokenizer gets the template of their conversations."""
    rows, measured = splits
    is_chat, *others = (
        any(isinstance(value, list) for value in part[0].values()) for part in (rows, measured) if part
    )
    if is_chat not in (others or [is_chat]):
        texts, chats = ("data.path", "eval.data")[:: -1 if is_chat else 1]
        raise DataError(
            f"{texts}: the records are texts where those of {chats} are conversations, and what is measured has to be "
            "of the form that is trained; have both in one"
        )
    end = ""
    if is_chat:
        chat = ChatTemplate(tokenizer, config.data.template)
        tokenizer.chat_template = (
            chat.templates if len(chat.templates) > 1 else next(iter(chat.templates.values()))
        )
        rows = [as_read(chat, row, config.data.path) for row in rows]
        measured = measured and [as_read(chat, row, config.data.path) for row in measured]
        if recipe.takes_texts:
            rows = as_texts(rows, tokenizer)
            measured = measured and as_texts(measured, tokenizer)
        end = reply_end(chat.render)
    else:
        _tell_idle(config, announce)
        rows, measured = begun_once(rows, tokenizer), measured and begun_once(measured, tokenizer)
    return Prepared(
        tokenizer=tokenizer,
        rows=as_dataset(rows),
        measured=None if measured is None else as_dataset(measured),
        changes={"num_labels": 1} if recipe.task == "SEQ_CLS" else {},
        reply_end=end,
    )


def _tell_idle(config: Config, announce: Callable[[str], None]) -> None:
    for key, value in (("template", config.data.template), ("roles", config.data.roles)):
        if value:
            announce(f"note: data.{key} has no effect: no record is a conversation")


def _encoded(
    config: Config,
    objective: str,
    files: ModelFiles,
    tokenizer: Any,
    splits: tuple[list[Row], list[Row] | None],
    announce: Callable[[str], None],
) -> Prepared:
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

    num_cut, seq_len = 0, config.data.seq_len

    def tokens(text: str, **how: Any) -> list[int]:
        nonlocal num_cut
        ids: list[int] = tokenizer(text, **how)["input_ids"]
        if len(ids) > seq_len:
            num_cut += 1
            ids = tokenizer(text, truncation=True, max_length=seq_len, **how)["input_ids"]
        return ids

    changes: dict[str, Any] = {}
    collate: Any
    if objective == "classify":
        kinds = getattr(files.hf_config, "architectures", None) or ()
        has_learnt = any(kind.endswith("SequenceClassification") for kind in kinds)
        ids_by_label = dict(files.hf_config.label2id) if has_learnt else {}
        classes = Classes([row["label"] for row in splits[0]], ids_by_label)
        changes, collate = classes.changes, DataCollatorWithPadding(tokenizer)

        def encode(row: Row) -> Row:
            ids = tokens(row["text"])
            if files.hf_config.is_encoder_decoder:  # which takes what it says at the end
                ids = _ended(ids, tokenizer, seq_len)
            return {"input_ids": ids, "labels": classes.number(row["label"])}

    elif objective == "embed":
        if min(len(splits[0]), config.sequences_per_step) < 2:
            raise ConfigError(
                "train.objective=embed sets a text apart from those of the other records of a step; have two at "
                "least, in the data and in train.tokens_per_step"
            )
        collate = PairCollator(tokenizer)

        def encode(row: Row) -> Row:
            return {f"{name}_ids": tokens(text) for name, text in row.items()}

    else:
        collate = DataCollatorForSeq2Seq(tokenizer)

        def encode(row: Row) -> Row:
            labels = _ended(tokens(row["completion"], add_special_tokens=False), tokenizer, seq_len)
            return {"input_ids": tokens(row["prompt"]), "labels": labels}

    rows, measured = (None if part is None else [encode(row) for row in part] for part in splits)
    if num_cut:
        announce(f"{num_cut:,} texts are longer than data.seq_len ({seq_len}) and cut")
    return Prepared(tokenizer=tokenizer, rows=rows, measured=measured, collate=collate, changes=changes)


def _ended(ids: list[int], tokenizer: Any, seq_len: int) -> list[int]:
    """Return tokens, cut to ``seq_len``, and the one that ends them."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return ids if ids[-1:] == end else [*ids[: seq_len - len(end)], *end]


class PairCollator:
    """Pads texts that belong together to one batch: the anchors first, then the positives."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch of twice as many texts as there are ``rows``."""
        ids = [row[name] for name in ("anchor_ids", "positive_ids") for row in rows]
        return dict(self._tokenizer.pad({"input_ids": ids}, return_tensors="pt"))


class PackedRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The sequences of an epoch, each by its number, which counts from ``first`` on where it is in the row as well."""

    def __init__(self, dataset: PackedDataset, most: int | None = None, first: int | None = None) -> None:
        self._dataset, self._first = dataset, first
        self._num_rows = min(dataset.num_sequences, most or dataset.num_sequences)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = {name: value[0] for name, value in self._dataset.sequences(int(number), 1).inputs.items()}
        return row if self._first is None else {**row, ROW: torch.tensor(self._first + int(number))}


def _stacked(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of sequences, of which those without padding have no mask."""
    all_ones = torch.ones_like(rows[0]["input_ids"])
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: torch.stack([row.get(name, all_ones) for row in rows]) for name in names}


def _packed(
    config: Config,
    files: ModelFiles,
    tokenizer: Any,
    place: tuple[ExitStack, Path],
    announce: Callable[[str], None],
) -> Prepared:
    """Return the sequences that sft would train."""
    stack, run_dir = place
    dataset = stack.enter_context(open_dataset(config, files, run_dir, announce))
    tokenizer.chat_template = dataset.template or tokenizer.chat_template  # as the trainer saves it
    logits_in = teacher_logits_of(config)
    first = None if logits_in is None else 0
    rows, measured, num_rows = PackedRows(dataset, first=first), None, dataset.num_sequences
    if config.eval.on:
        held = stack.enter_context(open_dataset(config, files, run_dir, announce, measured=True))
        measured = PackedRows(held, config.eval.sequences, None if first is None else num_rows)
        num_rows += len(measured)
    teacher = None if logits_in is None else TeacherLogits(logits_in, num_rows)
    if teacher is not None:
        teacher.check(rows, *([] if measured is None else [measured]))
        announce(teacher.describe())
    return Prepared(
        tokenizer=tokenizer,
        rows=rows,
        measured=measured,
        collate=_stacked,
        teacher=teacher,
        reply_end=dataset.reply_end,
    )


class ScoredSequences:
    """The sequences of a run that learns from a teacher, to be scored by it; those the run is measured on are last.

    Raises:
        OutsizeError: the run learns something else, or its data cannot be used.
    """

    def __init__(self, config: Config, stack: ExitStack, announce: Callable[[str], None]) -> None:
        if config.train.objective != "distill":
            raise ConfigError(
                f"train.objective is {config.train.objective}: the logits of sequences are for a run that learns from "
                "a teacher; set it to distill"
            )
        config = settle(config, choose_run_dir(config.train.run_dir), announce, objective="distill").config
        place = stack, stack.enter_context(temporary_directory())
        train = config.train.model_copy(update={"teacher": config.model.path})  # whose logits are to be made
        config = config.model_copy(update={"train": train})
        data = prepare_data(config, "distill", RECIPES["distill"], files_of(config), place, announce)
        measured = () if data.measured is None else (data.measured,)
        self._rows: Any = torch.utils.data.ConcatDataset([data.rows, *measured])
        self.step_sequences, self.seq_len = config.sequences_per_step, config.data.seq_len

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> ScoredText:
        row = self._rows[number]
        ids, counts = row.pop("input_ids").tolist(), row.pop("labels") != IGNORED
        return ScoredText(ids, counts=counts, inputs=row)


def tell_of_lengths(config: Config, trained: Any, read: Any, announce: Callable[[str], None]) -> None:
    """Say how many records are left out or cut, for they are longer than a sequence.

    Raises:
        DataError: none is left.
    """
    seq_len = config.data.seq_len
    if not len(trained):
        raise DataError(
            f"{config.data.path}: no record is trained: of each, what is asked (system prompt, tools and all) or an "
            f"answer is longer than data.seq_len={seq_len} tokens; raise it"
        )
    if num_left_out := len(read) - len(trained):
        announce(
            f"{num_left_out:,} of {len(read):,} records are left out: what is asked, or an answer, is too long for "
            f"data.seq_len={seq_len}"
        )
    if isinstance(trained, PackedRows):
        return
    if num_cut := sum(width_of(row) > seq_len for row in trained):
        announce(
            f"{num_cut:,} of {len(trained):,} records are longer than data.seq_len ({seq_len}): their answers are cut"
        )


def width_of(row: dict[str, Any]) -> int:
    """Return the tokens of the longest sequence that a batch has of a record."""
    named = ((name, value) for name, value in row.items() if name.endswith("ids") or name == "labels")
    lengths = {name: len(value) for name, value in named if hasattr(value, "__len__")}
    return lengths.pop("prompt_ids", 0) + max(lengths.values(), default=0)


def preview(config: Config, objective: str, announce: Callable[[str], None]) -> dict[str, Any]:
    """Return what the records of an objective hold; reads no weights.

    Returns:
        Their number, the first of them, how often there is each label, and by field the tokens of its texts: the most,
        the mean, and how many are longer than `data.seq_len`.

    Raises:
        OutsizeError: what would keep the data from being used.
    """
    recipe = RECIPES[objective]
    tokenizer = load_tokenizer(files_of(config), config.model.trust_remote_code)
    rows = read_rows(config, objective, recipe, announce)
    lengths: dict[str, list[int]] = {}
    for row in rows:
        for name, value in row.items():
            text = "".join(part["content"] for part in value) if isinstance(value, list) else value
            if isinstance(text, str) and name not in ("label", "tools"):
                lengths.setdefault(name, []).append(len(tokenizer(text)["input_ids"]))
    return {
        "objective": objective,
        "num_records": len(rows),
        "first": rows[0],
        "labels": dict(Counter(str(row["label"]) for row in rows if "label" in row)),
        "tokens": {
            name: {
                "most": max(counts),
                "mean": sum(counts) / len(counts),
                "num_longer": sum(length > config.data.seq_len for length in counts),
            }
            for name, counts in lengths.items()
        },
        "steps_per_epoch": len(rows) / config.sequences_per_step,
    }
