"""Records with fields of their own: pairs of answers, marked answers, texts of a class, texts that belong together."""

import contextlib
import importlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outsize.config import Config
from outsize.data.chat import ChatTemplate
from outsize.data.encode import added_tokens
from outsize.data.reading.conversations import TRUTHS, listed, read_template_arguments
from outsize.data.reading.corpus_files import Corpus, Tolerance, find_sources
from outsize.data.reading.documents import read_records
from outsize.data.reading.formats import CONVERSATIONS, renamed, unread_fields
from outsize.data.reading.text_records import Record
from outsize.errors import ConfigError, DataError
from outsize.objectives.objective_models import Row, asks_as_chat, has_messages, messages_row, texts_row
from outsize.objectives.recipes import Recipe
from outsize.training.run_data import corpora_of, tell_of_overlap


def read_rows(
    config: Config, objective: str, recipe: Recipe, announce: Callable[[str], None], *, measured: bool = False
) -> list[Row]:
    """Return the records of a run as its trainer wants them, in the order of the files.

    Args:
        config: of the run.
        objective: of the run.
        recipe: names the fields.
        announce: told what was left out.
        measured: return what the model is measured on, and not what it is trained on.

    Raises:
        DataError: there are none, or one that is not such a record.
        ConfigError: sources are weighted.
    """
    if any(source.weight != 1 for source in config.data.more):
        raise ConfigError(f"data.more: weight: with train.objective={objective} all sources count once")
    if measured:
        tell_of_overlap(config, announce)
    rows: list[Row] = []
    for corpus in corpora_of(config.data, config.eval, measured=measured):
        rows += _of_source(corpus, objective, recipe, config.train.seed, announce)
    for name, nothing in (("tools", None), ("chat_template_kwargs", {})):
        if any(name in row for row in rows):
            rows = [{**row, name: row.get(name, nothing)} for row in rows]
    kinds = {tuple(sorted((name, isinstance(value, list)) for name, value in row.items())) for row in rows}
    if len(kinds) > 1 and recipe.by_trl:
        raise DataError(
            f"{config.data.path}: some records have texts where others have messages, or other fields; all records of "
            "a run have one form"
        )
    if not rows:
        raise DataError(f"{config.data.path}: no records for train.objective={objective}")
    return rows[: config.eval.sequences] if measured else rows


def as_read(chat: ChatTemplate, row: Row, where: str) -> Row:
    """Return a row whose tool calls have the form that a template reads: arguments as objects, or as JSON text.

    What the template does not read of the row is told.

    Raises:
        DataError: the template refuses a conversation of the row, or reads no form of it.
    """
    messages = {name: value for name, value in row.items() if isinstance(value, list)}
    tools, options = row.get("tools"), row.get("chat_template_kwargs") or {}
    says_more = any(message.keys() - {"role", "content"} for value in messages.values() for message in value)
    if not (says_more or tools or options):
        return row
    prompt = messages.pop("prompt", [])
    changed: Row = {}
    for name, answer in messages.items():
        form = chat.form([*prompt, *answer], tools and json.loads(tools), where, options)
        changed |= {name: form[len(prompt) :], **({"prompt": form[: len(prompt)]} if prompt else {})}
    return {**row, **changed}


def as_texts(rows: Sequence[Row], tokenizer: Any) -> list[Row]:
    """Return conversations of pairs as the texts that TRL makes of them by the template, tools offered."""
    trl: Any = importlib.import_module("trl.data_utils")
    return [trl.apply_chat_template(row, tokenizer, json.loads(row.get("tools") or "null")) for row in rows]


def begun_once(rows: list[Row], tokenizer: Any) -> list[Row]:
    """Return texts without the token that begins a text, where the tokenizer puts one there itself, as sft has it."""
    begin, fields = tokenizer.bos_token, ("chosen", "rejected", "completion")
    if not begin or added_tokens(tokenizer)[0] != [tokenizer.bos_token_id]:
        return rows
    first = [("prompt",) if row.get("prompt") else fields for row in rows]
    return [
        {name: v.removeprefix(begin) if name in begins else v for name, v in row.items()}
        for row, begins in zip(rows, first, strict=True)
    ]


def as_dataset(rows: list[Row]) -> Any:
    """Return rows as a dataset whose messages come out as they went in.

    Arrow gives all messages of a column the same keys, so that a call with an argument less than another would say
    null for it; kept as JSON, each has its own.

    Raises:
        ConfigError: the library keeps no JSON.
    """
    library: Any = importlib.import_module("datasets")
    of_messages = [name for name, value in rows[0].items() if isinstance(value, list)]
    of_objects = [name for name, value in rows[0].items() if isinstance(value, dict)]
    if not of_messages and not of_objects:
        return library.Dataset.from_list(rows)
    if not hasattr(library, "Json"):
        raise ConfigError(
            "conversations as records need a datasets library with Json; pip install -U datasets"
        )
    features = {
        **dict.fromkeys(of_messages, library.List(library.Json())),
        **dict.fromkeys(of_objects, library.Json()),
    }
    plain = [{name: value for name, value in row.items() if name not in features} for row in rows]
    features |= library.Dataset.from_list(plain).features
    return library.Dataset.from_list(rows, features=library.Features(features))


def _of_source(
    corpus: Corpus, objective: str, recipe: Recipe, seed: int, announce: Callable[[str], None]
) -> list[Row]:
    sources = find_sources(Path(corpus.path), corpus.glob, measured=corpus.measured)
    if sources.container in ("text", "tokens"):
        raise DataError(
            f"{corpus.path}: train.objective={objective} takes records with {listed(recipe.fields)}, and text files "
            "hold none; try JSONL, CSV or Parquet"
        )
    if sources.note is not None:
        announce(f"{corpus.path}: {sources.note}")
    bad = Tolerance(corpus.max_bad_records)
    records: list[tuple[Record, str]] = []
    for file in sources.files:
        for number, record in read_records(
            file.path, sources.container or "json", lambda _: None, bad.forgive
        ):
            where = f"{file.path}:{number}"
            try:
                named = renamed(record, corpus.columns, where)
            except DataError as error:
                bad.forgive(error)
            else:
                records.append(({name: value for name, value in named.items() if value is not None}, where))
    as_chat = recipe.by_trl and any(asks_as_chat(record) for record, _ in records)
    rows: list[Row] = []
    unread: Counter[str] = Counter()
    for record, where in records:
        try:
            row, others = _row(record, objective, recipe, (corpus.roles, as_chat), where)
        except DataError as error:
            bad.forgive(error)
        else:
            rows.append(row)
            unread.update(others)
    if unread:
        counts = ", ".join(f"{name} ({count:,} records)" for name, count in unread.most_common())
        announce(f"{corpus.path}: in the records and not used: {counts}")
    if objective == "classify" and sources.container in ("csv", "tsv"):
        _type_labels(rows)
    if bad.count:
        announce(f"{corpus.path}: {bad.count} malformed records left out; the first: {bad.messages[0]}")
    if not corpus.split:
        return rows
    held = set(random.Random(seed).sample(range(len(rows)), round(corpus.split * len(rows))))
    return [row for number, row in enumerate(rows) if (number in held) == corpus.held]


def _row(
    record: Record, objective: str, recipe: Recipe, how: tuple[Mapping[str, str], bool], where: str
) -> tuple[Row, list[str]]:
    """Return what a trainer takes of a record, and the fields that nothing reads."""
    roles, as_chat = how
    if objective == "kto":  # as in LLaMA-Factory
        theirs = {"kto_tag": "label", **({"output": "completion"} if "instruction" in record else {})}
        record = {
            theirs.get(name, name) if theirs.get(name) not in record else name: v
            for name, v in record.items()
        }
    answers = tuple(name for name in recipe.fields if name not in ("prompt", "label"))
    is_chat = recipe.by_trl and (as_chat or has_messages(record, answers))
    held = len(answers) == 1 and any(record.get(name) for name in CONVERSATIONS)
    implied = {"prompt", *(answers if held else ())} if is_chat else set()
    missing = [name for name in recipe.fields if name not in record and name not in implied]
    if missing:
        raise DataError(
            f"{where}: train.objective={objective} takes records with {listed(recipe.fields)}, and found "
            f"{listed(record)}; data.columns maps other names, e.g. {{{missing[0]}: theirs}}"
        )
    names = [name for name in (*recipe.fields, *recipe.optional) if name in record or name in implied]
    read: set[str] = set(names)
    if is_chat:
        values, read_too = messages_row(record, answers, roles, where, alone=objective == "reward")
        read |= read_too - (set() if "tools" in recipe.optional else {"tools", "functions"})
    else:
        values = texts_row(record, answers, where) if recipe.by_trl else {}
        read -= {"tools", "chat_template_kwargs"}
    for name in (set(names) & read & set(record)) - {*values, "tools"}:
        values[name] = _value(record.get(name), name, objective, where)
    row = {name: values[name] for name in names if name in values and name in read}
    if is_chat and "prompt" in values:
        row["prompt"] = values["prompt"]
    unread = unread_fields(record, read)
    if objective == "embed" and "score" in record:  # how alike the texts are
        unread.append("score")
    return row, unread


def _value(value: Any, name: str, objective: str, where: str) -> Any:
    """Return the value of a field that is no prompt and no answer of a trainer of TRL."""
    if name == "chat_template_kwargs":
        return read_template_arguments({name: value}, where)
    if name == "margin":
        with contextlib.suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                return number
        raise DataError(f"{where}: field {name!r} is a number, not {value!r}")
    if name == "label":
        if objective == "kto":
            if (truth := TRUTHS.get(str(value).lower())) is not None:
                return truth
            raise DataError(f"{where}: field 'label' of train.objective=kto is true or false, not {value!r}")
        if isinstance(value, str) or (isinstance(value, (int, float)) and math.isfinite(value)):
            return value
        shown = value if isinstance(value, float) else type(value).__name__
        raise DataError(f"{where}: field 'label' is a name or a number, not {shown}")
    if not isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a string, found {type(value).__name__}")
    if name != "prompt" and not value.strip():
        raise DataError(
            f"{where}: field {name!r} is empty; leave such records out, or raise data.max_bad_records"
        )
    return value


def _type_labels(rows: list[Row]) -> None:
    """Make numbers of the labels of a table, which has no types, where all of them are."""
    labels = [row["label"] for row in rows]
    try:
        numbers: list[int | float] = [float(label) for label in labels]
    except ValueError:
        return
    if all(label.lstrip("-").isdigit() for label in labels):
        numbers = [int(label) for label in labels]
        if labels != [str(number) for number in numbers]:  # 007 is a name
            return
    if all(map(math.isfinite, numbers)):
        for row, number in zip(rows, numbers, strict=True):
            row["label"] = number


class Classes:
    """The labels of a data set as numbers: of classes, or as they are where they are measures.

    Args:
        labels: all there are.
        known: number of each name, of a model that has learnt them already.

    Attributes:
        changes: what the model's config says of them.
    """

    def __init__(self, labels: Sequence[Any], ids_by_label: Mapping[str, int]) -> None:
        kinds = {type(label) for label in labels}
        self._are_measures = float in kinds and kinds <= {int, float}
        self.changes: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
        if self._are_measures:
            return
        if {str(label) for label in labels} <= set(ids_by_label):
            self._numbers = dict(ids_by_label)
        else:
            numeric = all(isinstance(label, int) for label in labels)
            names = sorted(set(labels)) if numeric else sorted({str(label) for label in labels})
            self._numbers = {str(name): number for number, name in enumerate(names)}
        if len(self._numbers) < 2:
            raise DataError(
                f"all records have the label {labels[0]!r}; train.objective=classify takes several"
            )
        self.changes = {
            "num_labels": len(self._numbers),
            "id2label": {number: name for name, number in self._numbers.items()},
            "label2id": self._numbers,
            "problem_type": "single_label_classification",
        }

    def number(self, label: Any) -> int | float:
        """Return what the model is given for a label.

        Raises:
            DataError: no record that trains has it.
        """
        if self._are_measures:
            return float(label)
        if str(label) not in self._numbers:
            raise DataError(f"the label {label!r} of eval is that of no record that trains")
        return self._numbers[str(label)]
