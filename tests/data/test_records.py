import importlib
import json

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from outsize.data.reading import documents, text_records
from outsize.data.reading.documents import read_records
from outsize.errors import DataError


def read(path, container="json"):
    return list(read_records(path, container, lambda num_bytes: None))


def test_json_lines_are_numbered_and_blank_lines_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": "b"}')
    assert read(path) == [(1, {"text": "a"}), (4, {"text": "b"})]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"a.jsonl:2: not valid JSON"),
        ('{"a": 1}\n\n[1]\n', r"a.jsonl:3: expected a JSON object, found list"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"a.jsonl:2: not valid JSON"),
    ],
)
def test_malformed_lines_are_located(tmp_path, body, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    with pytest.raises(DataError, match=message):
        read(path)


json_objects = st.dictionaries(
    st.text(max_size=5), st.text(max_size=20) | st.integers() | st.lists(st.booleans())
)


@given(objects=st.lists(json_objects, min_size=1), indent=st.sampled_from([None, 2]), size=st.integers(1, 40))
def test_an_array_reads_like_its_objects_whatever_the_chunks(objects, indent, size):
    body = json.dumps(objects, indent=indent)
    texts = [body[i : i + size] for i in range(0, len(body), size)]
    found = list(text_records._read_values(texts, "a.json", documents.refuse))
    assert [record for _, record in found] == objects
    if indent:  # an object begins on the line that its number says
        assert all(body.split("\n")[number - 1].lstrip().startswith("{") for number, _ in found)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('[{"a": 1},\n{"a": 2}\n', r"a.json:3: the JSON array is cut short"),
        ('[{"a": 1},\n{"a": 2', r"a.json:2: not valid JSON"),
        ('[{"a": 1},\n3]', r"a.json:2: expected a JSON object, found int"),
    ],
)
def test_malformed_arrays_are_located(tmp_path, body, message):
    path = tmp_path / "a.json"
    path.write_text(body)
    with pytest.raises(DataError, match=message):
        read(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(DataError, match=r"pip install pyarrow"):
        read(tmp_path / "a.parquet", "parquet")


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"text": f"row {i}"} for i in range(1000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    counted = []
    assert list(read_records(path, "parquet", counted.append)) == list(enumerate(rows, start=1))
    assert 0 < sum(counted) <= path.stat().st_size
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot read as Parquet"):
        read(path, "parquet")
