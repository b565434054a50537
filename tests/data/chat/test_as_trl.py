"""What is trained of a conversation is what TRL's SFTTrainer trains of the same record, token for token.

Three differences are ours on purpose (docs/data.md): arguments of calls that are text where the template wants an
object are made one, a record that the template does not write in full is refused, and an EOS token ends what has none.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from data.chat.shapes import SHAPES, Message
from data.chat.test_templates import tokenizer, turns_of
from outsize.data.encode import Encoder
from outsize.data.reading.formats import Document
from outsize.errors import DataError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

__all__ = ["tokenizer"]  # a fixture
Row = dict[str, Any]
Trained = tuple[list[int], list[int]]
TEMPLATES = ("llama3_1", "qwen3", "gemma3", "phi3", "glm4moe")


class Rows:
    """As much of a streamed dataset as TRL asks of one."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.column_names = list(dict.fromkeys(name for row in rows for name in row))

    def __iter__(self) -> Iterator[Row]:
        return iter([dict(row) for row in self._rows])

    def map(self, make: Callable[..., Row], fn_kwargs: Row | None = None, **_: Any) -> "Rows":
        return Rows([{**row, **make(dict(row), **(fn_kwargs or {}))} for row in self._rows])


def by_trl(tokenizer: PreTrainedTokenizerFast, record: Row) -> Trained:
    """Tokens and labels that TRL trains of a record, by its defaults: all of a conversation, or a completion."""
    options = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        shuffle_dataset=False,
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss="prompt" in record, args=options
    )
    (row,) = trl.SFTTrainer._prepare_dataset(
        trainer, Rows([record]), tokenizer, options, False, None, "train"
    )
    return row["input_ids"], row["labels"]


def by_us(tokenizer: PreTrainedTokenizerFast, document: Document) -> Trained:
    (encoded,) = Encoder(tokenizer, eos=True, masked=True).encode([document])
    assert encoded.trained is not None
    ids = encoded.ids.tolist()
    return ids, [one if trained else -100 for one, trained in zip(ids, encoded.trained, strict=True)]


def is_equal(ours: Trained, theirs: Trained, eos: int) -> bool:
    """Whether as much is trained, but for an EOS token at the end."""
    ids, labels = ours
    return (ids, labels) == theirs or (ids[-1] == eos and (ids[:-1], labels[:-1]) == theirs)


def parts(messages: list[Message]) -> int:
    """Messages before the last replies."""
    return max((n for n, message in enumerate(messages) if message["role"] != "assistant"), default=-1) + 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_tokens_and_targets_of_trl(name: str, tokenizer: PreTrainedTokenizerFast):
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    compared, refusals = 0, []
    for shape, (messages, tools) in SHAPES.items():
        asked = parts(messages)
        documents = {"all": Document("f:1", messages=messages, tools=tools)}
        records: dict[str, Row] = {"all": {"messages": messages, "tools": tools}}
        if 0 < asked < len(messages):
            turns = tuple(n for n in turns_of(messages) if n >= asked)
            documents["completion"] = Document(
                "f:1", messages=messages, turns=turns, num_asked=asked, tools=tools
            )
            records["completion"] = {
                "prompt": messages[:asked],
                "completion": messages[asked:],
                "tools": tools,
            }
        for kind, document in documents.items():
            try:
                theirs = by_trl(tokenizer, records[kind])
            except TemplateError:
                continue
            try:
                ours = by_us(tokenizer, document)
            except DataError as error:
                refusals.append(str(error))
                continue
            if shape != "a call with arguments as text":
                assert is_equal(ours, theirs, tokenizer.eos_token_id), (shape, kind)
                compared += 1
    assert all("the chat template leaves out" in refusal for refusal in refusals)
    assert compared > len(SHAPES)
