"""Files of JSON: what means a list of records is read as that, and what is no record is an error with its line."""

import codecs
import json

import datasets
import pytest

from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader, read_records
from outsize.errors import DataError

ROWS = [{"text": "one", "label": 1}, {"text": "zwei 😀", "label": 2}]
COLUMNS = {"text": ["one", "zwei 😀"], "label": [1, 2]}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def read(path, container="json"):
    return [record for _, record in read_records(path, container, lambda num_bytes: None)]


@pytest.mark.parametrize(
    ("body", "records"),
    [
        ("\n".join(map(json.dumps, ROWS)), ROWS),
        (json.dumps(ROWS), ROWS),
        ("\ufeff\n " + json.dumps(ROWS), ROWS),
        (json.dumps(ROWS, indent=2), ROWS),
        (json.dumps(ROWS[:1]) + "\n" + json.dumps(ROWS[1:]) + "\n", ROWS),
        (json.dumps(ROWS) + json.dumps(ROWS), ROWS + ROWS),
        ("[]\n" + json.dumps(ROWS), ROWS),
        ("\n".join(json.dumps(row, indent=2) for row in ROWS), ROWS),
        (json.dumps(ROWS[0], indent=2), ROWS[:1]),
        (json.dumps(ROWS[0]), ROWS[:1]),
        (json.dumps({"data": ROWS}), ROWS),
        (json.dumps({"version": "1.1", "data": ROWS}, indent=1) + "\n", ROWS),
        (json.dumps(COLUMNS), ROWS),
        (json.dumps(COLUMNS, indent=4), ROWS),
        (json.dumps({"messages": [CHAT["messages"]] * 2}), None),
        (json.dumps({"messages": [CHAT["messages"]] * 2, "id": [1, 2]}), [{**CHAT, "id": n} for n in (1, 2)]),
        (json.dumps({name: dict(enumerate(column)) for name, column in COLUMNS.items()}), ROWS),
        (json.dumps(CHAT), [CHAT]),
        (json.dumps(CHAT, indent=2), [CHAT]),
        (json.dumps({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}), None),
        (json.dumps({"train": ROWS, "test": ROWS}), None),
        (json.dumps({"text": ["a", "b"], "label": [1]}), None),
        (json.dumps({"data": ROWS}) + "\n" + json.dumps({"data": ROWS}), [{"data": ROWS}] * 2),
        ("", []),
        ("\n \n", []),
    ],
)
def test_a_file_of_json_means_the_same_records_however_they_are_written(tmp_path, body, records):
    path = tmp_path / "a.json"
    path.write_text(body)
    assert read(path) == ([json.loads(body)] if records is None else records)


@pytest.mark.parametrize("body", [json.dumps(ROWS), "\n".join(map(json.dumps, ROWS))])
def test_what_datasets_reads_of_one_file_is_what_is_read(tmp_path, body):
    path = tmp_path / "a.json"
    path.write_text(body)
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "c"))
    assert read(path) == list(loaded)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt"])
def test_a_byte_order_mark_says_how_a_file_is_encoded(tmp_path, encoding, suffix):
    bodies = {
        "jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
        "json": json.dumps(ROWS, ensure_ascii=False),
        "csv": "text,label\none,1\nzwei 😀,2\n",
        "tsv": "text\tlabel\none\t1\nzwei 😀\t2\n",
        "txt": "one\nzwei 😀\n",
    }
    path = tmp_path / f"a.{suffix}"
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(encoding, b"")
    path.write_bytes(mark + bodies[suffix].encode(encoding))
    documents = DocumentReader(find_sources(path), None, Corpus(path=path)).documents()
    assert [document.text.split("\n")[:2] for document in documents] == (
        [["one", "zwei 😀"]] if suffix == "txt" else [["one"], ["zwei 😀"]]
    )


def test_a_file_that_breaks_off_in_a_wide_character_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps(ROWS[0]).encode("utf-16") + b"\x00")
    with pytest.raises(DataError, match=r"a.jsonl: begins as utf-16"):
        read(tmp_path / "a.jsonl")


BAD = {
    "nested too deep": ('{"text": "b", "x": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deep"),
    "a number of 5,000 digits": ('{"text": "b", "n": ' + "1" * 5000 + "}", "not valid JSON: .*digits"),
    "half a character": (r'{"text": "half \ud83d of it"}', r"field 'text' holds half a character \(.ud83d"),
    "half a character, deeper": (r'{"text": "b", "m": [{"content": "\uDE00"}]}', "field 'm' holds half"),
    "half a character in a name": (r'{"text": "b", "\ud83d": 1}', r"field '.ud83d' holds half"),
    "half a character in bytes": (b'{"text": "\xed\xa0\xbd"}', "not UTF-8 text"),
    "quotes of Python": ("{'text': 'b'}", "quotes are single.*json.dumps"),
    "wide characters without a mark": ('{"text": "b"}'.encode("utf-16-le"), "UTF-16"),
    "another encoding": ('{"text": "für"}'.encode("latin-1"), "not UTF-8 text"),
    "a list": ("[1]", "expected a JSON object, found list"),
    "a number": ("7", "expected a JSON object, found int"),
    "not whole": ('{"text": ', "not valid JSON"),
}


def reader_of(path, limit):
    return DocumentReader(find_sources(path), None, Corpus(path=path, max_bad_records=limit))


@pytest.mark.parametrize("kind", BAD)
def test_a_line_that_is_no_record_has_file_and_line_and_is_counted(tmp_path, kind):
    line, message = BAD[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n' + (line if isinstance(line, bytes) else line.encode()) + b'\n{"text": "too"}\n'  # type: ignore[attr-defined]
    )
    with pytest.raises(DataError, match=rf"a.jsonl:2: .*{message}"):
        list(reader_of(path, 0).documents())
    reader = reader_of(path, 1)
    assert [document.text for document in reader.documents()] == ["good", "too"]
    assert reader.bad.count == 1


@pytest.mark.parametrize("kind", [name for name in BAD if "wide" not in name and "encoding" not in name])
def test_an_element_of_an_array_that_is_no_record_has_file_and_line(tmp_path, kind):
    line, message = BAD[kind]
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"text": "good"},\n'
        + (line if isinstance(line, bytes) else line.encode())  # type: ignore[attr-defined]
        + b',\n{"text": "too"}]\n'
    )
    message = message.replace("not UTF-8 text", "") if kind == "half a character in bytes" else message
    with pytest.raises(
        DataError, match=rf"a.json:2: .*{message}" if kind != "not whole" else r"a.json:\d: not valid"
    ):
        list(reader_of(path, 0).documents())
    if "half a character" in kind and "bytes" not in kind:
        assert [document.text for document in reader_of(path, 1).documents()] == ["good", "too"]


def test_a_whole_character_in_two_escapes_is_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "\ud83d\ude00"}')
    assert read(tmp_path / "a.jsonl") == [{"text": "😀"}]


@pytest.mark.parametrize("separator", [";", "|", "\t"])
def test_a_table_with_another_separator_is_an_error_that_names_it(tmp_path, separator):
    (tmp_path / "a.csv").write_text(f"text{separator}label\na{separator}b\n")
    with pytest.raises(DataError, match=r"a.csv:1: .*one column.*between the cells"):
        read(tmp_path / "a.csv", "csv")


def test_the_index_of_a_table_of_pandas_is_a_column_of_that_name(tmp_path):
    (tmp_path / "a.csv").write_text(",text\n0,one\n1,two\n")
    assert read(tmp_path / "a.csv", "csv") == [
        {"Unnamed: 0": "0", "text": "one"},
        {"Unnamed: 0": "1", "text": "two"},
    ]


def test_a_first_line_that_is_no_record_says_nothing_of_the_format(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "half \ud83d"}' + '\n{"text": "good"}\n')
    assert reader_of(path, 0).detect() == reader_of(path, 1).detect() == "text"
    with pytest.raises(DataError, match=r"a.jsonl:1: field 'text' holds half"):
        list(reader_of(path, 0).documents())
    path.write_text("[1]\n" * 3)
    with pytest.raises(DataError, match=r"a.jsonl:1: expected a JSON object, found int"):
        reader_of(path, 0).detect()
    path.write_text("1\n" * 1000)
    with pytest.raises(DataError, match=r"a.jsonl:1: expected a JSON object, found int"):
        reader_of(path, 0).detect()


def test_one_object_of_lists_is_said_to_be_several_records(tmp_path, caplog):
    path = tmp_path / "batched.json"
    turns = [[{"role": role, "content": text}] for role, text in (("user", "q"), ("assistant", "a"))]
    path.write_text(json.dumps({"prompt": turns[:1], "completion": turns[1:]}), encoding="utf-8")
    assert read(path) == read(path) == [{"prompt": turns[0], "completion": turns[1]}]
    assert [record.message for record in caplog.records] == [
        f"{path}: one JSON object that holds lists is read as the records in them (1)"
    ]
