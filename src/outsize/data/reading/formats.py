"""What a record means: the table of formats, how one is recognised, and the document each record becomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outsize.choices import DataFormat, TrainOn
from outsize.data.reading.conversations import (
    PARTIAL_FLAGS,
    Message,
    as_messages,
    from_json_text,
    holds_messages,
    is_blank,
    is_conversation,
    is_message,
    listed,
    pop_trained,
    read_messages,
    read_template_arguments,
    read_tools,
    system_field,
    with_system,
)
from outsize.data.reading.corpus_files import DEFAULT_TEXT_FIELD, Corpus
from outsize.data.reading.text_records import Record
from outsize.errors import DataError


@dataclass(frozen=True)
class Document:
    """What is tokenised as one, before special tokens.

    Attributes:
        where: ``file:line``, for errors.
        text: the text, or a prompt and its completion in one.
        trained_from: character of ``text`` where training begins; 0 trains all of it.
        messages: a conversation, instead of ``text``: dicts with ``role`` and ``content``.
        turns: numbers of the messages that are trained; None trains every token.
        num_asked: of the messages, those of a prompt that the others complete; 0 of a conversation that is one.
        tools: JSON schemas offered to the conversation's template.
        options: further variables of the template.
        unused: names of what the record says and nothing reads.
        opens: the document begins here (a long text comes in pieces).
        closes: the document ends here.
    """

    where: str
    text: str = ""
    trained_from: int = 0
    messages: list[dict[str, Any]] | None = None
    turns: tuple[int, ...] | None = None
    num_asked: int = 0
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A layout of records: a row of `FORMATS`.

    Attributes:
        build: makes the document of a record, of which the place is given, as a corpus wants it.
        fields: that a record has; none where it has one text, under the corpus's name for it.
        optional: fields besides that it may have.
        conversation: whether its field is a conversation.
    """

    build: Callable[[Record, str, Corpus], Document]
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    conversation: bool = False


def detect_format(record: Record, text_field: str, where: str) -> DataFormat:
    """Return the format of a record, by its fields; the first row of the table that fits wins.

    A ``text_field`` other than the default was asked for by name, so it wins over the table.

    Raises:
        DataError: no format fits.
    """
    if text_field != DEFAULT_TEXT_FIELD and text_field in record:
        return "text"
    for name, row in FORMATS.items():
        if row.fields and all(record.get(field) is not None for field in row.fields):
            return name
    if text_field in record:
        return "text"
    raise DataError(
        f"{where}: no known format has the fields {listed(record)}; expected {text_field!r} (text_field), "
        f"{_expected()}; data.columns maps these to other names, e.g. {_mapping(record)}{_bare(record)}"
    )


def _expected() -> str:
    *first, last = (" and ".join(map(repr, row.fields)) for row in FORMATS.values() if row.fields)
    return f"{', '.join(first)}, or {last}"


def _mapping(record: Record) -> str:
    """Return the value of data.columns that is likely meant."""
    turns = [name for name, value in record.items() if is_conversation(value)]
    if turns:
        return f"{{messages: {turns[0]}}}"
    answer = next((name for name in _ANSWERS if name in record), None)
    if answer is not None and "instruction" in record:
        return f"{{output: {answer}{', input: context' if 'context' in record else ''}}}"
    question = next((name for name in _QUESTIONS if name in record and name != answer), None)
    if question is None or answer is None:
        text = next((name for name in _TEXTS if name in record), None)
        return "{prompt: question, completion: answer}" if text is None else f"{{text: {text}}}"
    return f"{{prompt: {question}, completion: {answer}}}"


def _bare(record: Record) -> str:
    """Return a hint where a line holds one message, and not a conversation."""
    return (
        '; a record is a conversation, {"messages": [...]}, and not one message of it'
        if is_message(record)
        else ""
    )


def renamed(record: Record, columns: Mapping[str, str], where: str) -> Record:
    """Return a record with its fields under our names.

    Raises:
        DataError: the record lacks a field that ``columns`` names.
    """
    missing = [theirs for theirs in columns.values() if theirs not in record]
    if missing:
        raise DataError(f"{where}: data.columns names {listed(missing)}, found {listed(record)}")
    rest = {name: value for name, value in record.items() if name not in columns.values()}
    return {**rest, **{ours: record[theirs] for ours, theirs in columns.items()}}


def to_document(record: Record, format_name: DataFormat, corpus: Corpus, where: str) -> Document:
    """Return the document of a record.

    Args:
        record: its fields under our names.
        format_name: of the data set.
        corpus: names of the text field and of roles, and what is trained.
        where: ``file:line``, for errors.

    Raises:
        DataError: the record is of another format, or a field is of the wrong type.
    """
    text_field = corpus.text_field
    row = FORMATS[format_name]
    missing = [field for field in row.fields or (text_field,) if field not in record]
    if missing:
        raise DataError(
            f"{where}: a record of format {format_name!r} needs {listed(missing)}, found {listed(record)}; "
            "all records of a data set have one format"
        )
    document = row.build(record, where, corpus)
    return replace(document, unused=(*document.unused, *_unread(record, format_name, document, text_field)))


def _unread(record: Record, format_name: DataFormat, document: Document, text_field: str) -> list[str]:
    """Return the fields of a record that hold something, are not read, and are not plainly about the record."""
    row = FORMATS[format_name]
    read = {*(row.fields or (text_field,)), *row.optional}
    if document.messages is not None:
        read |= {"tools", "functions", "chat_template_kwargs", system_field(record) or ""}
    return unread_fields(record, read)


def unread_fields(record: Record, read: set[str]) -> list[str]:
    """Return the fields of a record that hold something, beside those that are ``read`` and such as are about it."""
    return [
        name
        for name, value in record.items()
        if name not in read and name.lower() not in _ABOUT_RECORDS and not is_blank(value)
    ]


def _text(record: Record, where: str, corpus: Corpus) -> Document:
    return Document(where, _string(record, corpus.text_field, where))


def _prompt_completion(record: Record, where: str, corpus: Corpus) -> Document:
    """Return a prompt and its completion: two texts, or the two parts of a conversation, as under a system prompt."""
    if system_field(record) or any(holds_messages(record[name]) for name in ("prompt", "completion")):
        prompt = with_system(as_messages(record, "prompt", "user", where, corpus.roles), record, where)
        given = as_messages(record, "completion", "assistant", where, corpus.roles)
        return _conversation([*prompt, *given], record, where, corpus.train_on, first=len(prompt))
    return _pair(_string(record, "prompt", where), _string(record, "completion", where), where, corpus)


def _pair(prompt: str, completion: str, where: str, corpus: Corpus) -> Document:
    return Document(where, prompt + completion, trained_from=0 if corpus.train_on == "all" else len(prompt))


def _alpaca(record: Record, where: str, corpus: Corpus) -> Document:
    # The prompt of Stanford Alpaca, word for word: what such data was written for.
    instruction, context = _string(record, "instruction", where), record.get("input") or ""
    if not isinstance(context, str):
        raise DataError(f"{where}: field 'input' must be a string, found {type(context).__name__}")
    output = _string(record, "output", where)
    if system_field(record) or from_json_text(record.get("history"), "history", where):
        turns = alpaca_prompt(record, where)
        return _conversation(
            [*turns, {"role": "assistant", "content": output}], record, where, corpus.train_on
        )
    task = "Below is an instruction that describes a task"
    if context:
        prompt = (
            f"{task}, paired with an input that provides further context. Write a response that "
            f"appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
            f"### Input:\n{context}\n\n### Response:\n"
        )
    else:
        prompt = (
            f"{task}. Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{instruction}\n\n### Response:\n"
        )
    return _pair(prompt, output, where, corpus)


def alpaca_prompt(record: Record, where: str) -> list[Message]:
    """Return what comes before the output as a conversation, as LLaMA-Factory makes one: system, history, instruction.

    Raises:
        DataError: history is no list of pairs of texts, or another field is no text.
    """
    messages: list[Message] = []
    history = from_json_text(record.get("history"), "history", where) or []
    for pair in history if isinstance(history, list) else [history]:
        if not (
            isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        ):
            raise DataError(
                f"{where}: field 'history' must be a list of pairs of texts, found {pair!r} in it"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    texts = [_string(record, name, where) for name in ("instruction", "input") if record.get(name)]
    return with_system([*messages, {"role": "user", "content": "\n".join(texts)}], record, where)


def _chat(field: str, record: Record, where: str, corpus: Corpus) -> Document:
    messages = with_system(read_messages(record, field, where, corpus.roles), record, where)
    return _conversation(messages, record, where, corpus.train_on)


def _conversation(
    messages: list[Message], record: Record, where: str, train_on: TrainOn, first: int = 0
) -> Document:
    """Return a conversation of which the assistant's messages from number ``first`` on are trained.

    Those that their author does not want trained are not; others that the author wants trained are named as unused.
    """
    wanted = [pop_trained(message, where) for message in messages]
    if train_on == "all" and False in wanted:
        raise DataError(
            f"{where}: message {wanted.index(False) + 1} is marked as not to be trained, and data.train_on=all trains "
            "every token; set data.train_on to replies, or take the marks out"
        )
    replies = [i for i, message in enumerate(messages) if i >= first and _is_reply(message)]
    turns = [i for i in (replies[-1:] if train_on == "last" else replies) if wanted[i] is not False]
    unused = [
        f"what says that a message of the {message['role']} is trained"
        for message, is_wanted in zip(messages, wanted, strict=True)
        if is_wanted and not _is_reply(message)
    ]
    unused += [f"{name} of a message" for m in messages for name in PARTIAL_FLAGS if m.get(name) is not None]
    return Document(
        where,
        messages=messages,
        turns=None if train_on == "all" else tuple(turns),
        num_asked=first,
        tools=read_tools(record, where),
        options=read_template_arguments(record, where),
        unused=tuple(dict.fromkeys(unused)),
    )


def blank_replies(document: Document) -> int:
    """Return how many replies of a document are trained and say nothing: neither words, nor calls, nor reasoning."""
    if document.messages is None:
        prompt_end = document.trained_from
        return int(bool(prompt_end) and is_blank(document.text[prompt_end:]))
    replies = (document.messages[turn] for turn in document.turns or ())
    return sum(all(is_blank(value) for key, value in reply.items() if key != "role") for reply in replies)


def _is_reply(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _string(record: Record, field: str, where: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        hint = "; name the field 'messages' in data.columns" if isinstance(value, list) else ""
        raise DataError(f"{where}: field {field!r} must be a string, found {type(value).__name__}{hint}")
    return value


# By name; the first row whose fields a record has is its format. Text and tokens have one field, whose name is said.
FORMATS: Mapping[DataFormat, Format] = {
    "text": Format(build=_text),
    "messages": Format(build=partial(_chat, "messages"), fields=("messages",), conversation=True),
    "sharegpt": Format(build=partial(_chat, "conversations"), fields=("conversations",), conversation=True),
    "prompt_completion": Format(build=_prompt_completion, fields=("prompt", "completion")),
    "alpaca": Format(build=_alpaca, fields=("instruction", "output"), optional=("input", "history")),
    "tokens": Format(build=_text),
}
# Fields that are a conversation; the first that a record has counts.
CONVERSATIONS = tuple(field for row in FORMATS.values() if row.conversation for field in row.fields)
# What data sets call a prompt and its completion, for hints.
_QUESTIONS = ("prompt", "question", "query", "input", "inputs", "problem", "user", "human", "instruction")
_ANSWERS = (
    "completion",
    "response",
    "answer",
    "output",
    "solution",
    "assistant",
    "target",
    "targets",
    "reply",
)
_TEXTS = ("content", "raw_content", "code", "document", "body", "article", "contents")
# Fields that are about a record, whatever it is for: nobody is told that they are not trained on.
# fmt: off
_ABOUT_RECORDS = {
    "unnamed: 0", "id", "ids", "_id", "idx", "index", "uuid", "guid", "hash", "key", "__index_level_0__",
    "source", "sources", "dataset", "dataset_name", "data_source", "origin", "url", "link", "file", "filename",
    "path", "license", "lang", "language", "lang_id", "locale", "date", "created", "created_at", "updated_at",
    "timestamp", "time", "author", "user_id", "conversation_id", "conv_id", "message_id", "prompt_id",
    "question_id", "session_id", "turn", "num_turns", "tags", "tag", "category", "categories", "topic",
    "subtopic", "domain", "subject", "task", "task_name", "task_type", "type", "kind", "subset", "split",
    "level", "difficulty", "meta", "metadata", "info", "extra", "title", "name", "model", "model_name",
    "generator", "annotator", "version", "length", "num_tokens", "token_count", "n_tokens", "word_count",
    "quality", "score", "rating",
}
# fmt: on
