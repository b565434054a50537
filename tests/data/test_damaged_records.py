"""Records and pages that are nearly right: read, or refused with an error of ours, and never a traceback."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.damage import JUNK, documents, holes
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.errors import OutsizeError
from outsize.objectives.objective_records import _row
from outsize.objectives.recipes import RECIPES

ROOT = Path(tempfile.mkdtemp(prefix="outsize-records-"))
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "q"}], "weight": 0},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "name": "f", "content": "r"},
    {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'},
    {"role": "assistant", "content": "a", "train": True, "function_call": {"name": "f", "arguments": "{}"}},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
GOOD = [
    {"messages": TURNS, "tools": TOOLS, "system": "s"},
    {"conversations": TURNS, "tools": json.dumps(TOOLS), "functions": TOOLS},
    {"prompt": TURNS[:1], "completion": TURNS[1:], "system_prompt": "s"},
    {"prompt": "q", "completion": "a", "id": 3},
    {"instruction": "i", "input": "c", "output": "o", "system": "s", "history": [["q", "a"]]},
    {"text": "t", "url": "u"},
    {"data": [{"text": "t"}], "version": 1},
    {"text": ["a", "b"], "label": [1, 2]},
    {"text": {"0": "a", "1": "b"}},
]
PREFERENCES = {
    "dpo": {"prompt": TURNS[:1], "chosen": TURNS[1:2], "rejected": TURNS[4:], "tools": TOOLS, "system": "s"},
    "reward": {
        "chosen": TURNS[:2],
        "rejected": [TURNS[0], TURNS[4]],
        "margin": 0.5,
        "chat_template_kwargs": {"a": 1},
    },
    "kto": {"conversations": TURNS, "kto_tag": True, "tools": json.dumps(TOOLS)},
    "orpo": {"instruction": "i", "history": [["q", "a"]], "chosen": "a", "rejected": "b"},
    "classify": {"text": "t", "label": 1},
}
CARD = (
    "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n# Page\n"
)


def read(directory: Path) -> None:
    """Read all documents of a directory, or fail as a run may."""
    with contextlib.suppress(OutsizeError):
        reader = DocumentReader(find_sources(directory), None, Corpus(path=directory, max_bad_records=3))
        reader.detect()
        for _ in reader.documents():
            pass
        reader.notes()


def place(name: str) -> Path:
    (ROOT / name).mkdir(exist_ok=True)
    return ROOT / name


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@given(
    bodies=st.lists(
        st.sampled_from(GOOD).flatmap(
            lambda good: (
                (documents(good) | JUNK).map(lambda record: json.dumps(record).encode())
                | holes(json.dumps(good).encode())
            )
        ),
        min_size=1,
        max_size=3,
    ),
    between=st.sampled_from([b"\n", b",", b"\n\n", b"]\n["]),
    around=st.sampled_from([(b"", b""), (b"[", b"]"), (b"\xff\xfe", b""), (b"[", b""), (b"", b"\x00")]),
)
def test_damaged_records_are_read_or_refused(suffix, bodies, between, around):
    directory = place(suffix)
    (directory / f"a.{suffix}").write_bytes(around[0] + between.join(bodies) + around[1])
    read(directory)


@pytest.mark.parametrize("objective", PREFERENCES)
@given(data=st.data(), as_chat=st.booleans())
def test_damaged_preferences_are_read_or_refused(objective, data, as_chat):
    record = data.draw(documents(PREFERENCES[objective]))
    if isinstance(record, dict):
        present = {str(name): value for name, value in record.items() if value is not None}
        with contextlib.suppress(OutsizeError):
            _row(present, objective, RECIPES[objective], ({}, as_chat), "a:1")


@given(
    page=holes(CARD.encode())
    | st.sampled_from(["---\na: &a [*a]\n---\n", "---\nconfigs: 3\n---\n", "---\n- 3\n---"]).map(str.encode)
)
def test_damaged_pages_are_read_or_refused(page):
    directory = place("page")
    (directory / "a.jsonl").write_text('{"text": "t"}\n')
    (directory / "README.md").write_bytes(page)
    read(directory)
