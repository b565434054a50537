import bz2
import gzip
import lzma
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import zstandard

from outsize.data.reading import corpus_files
from outsize.data.reading.corpus_files import find_sources, read_chunks
from outsize.data.reading.documents import read_records
from outsize.errors import DataError


def names(sources, root):
    return [str(file.path.relative_to(root)) for file in sources.files]


def write(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")


def test_a_directory_is_read_recursively_sorted_without_hidden_files(tmp_path):
    write(tmp_path, "b/two.py", "a.txt", "b/one.md", ".git/x.txt", "__pycache__/y.py", "z.png")
    sources = find_sources(tmp_path)
    assert names(sources, tmp_path) == ["a.txt", "b/one.md", "b/two.py"]
    assert sources.container == "text"
    assert sources.num_skipped == 1


def test_vague_suffixes_count_only_alone(tmp_path):
    write(tmp_path, "a.json", "b.json")
    assert names(find_sources(tmp_path), tmp_path) == ["a.json", "b.json"]
    write(tmp_path, "c.py")
    sources = find_sources(tmp_path)
    assert names(sources, tmp_path) == ["c.py"]
    assert sources.num_skipped == 2


def test_a_glob_chooses_and_takes_any_suffix(tmp_path):
    write(tmp_path, "a.jsonl", "README.md", "deep/b.weird", "deep/c.weird")
    assert names(find_sources(tmp_path, "*.jsonl"), tmp_path) == ["a.jsonl"]
    assert names(find_sources(tmp_path, "**/*.weird"), tmp_path) == ["deep/b.weird", "deep/c.weird"]


def test_kinds_do_not_mix(tmp_path):
    write(tmp_path, "a.jsonl.gz", "b.jsonl", "c.txt")
    with pytest.raises(DataError, match=r"2 json, 1 text.*glob"):
        find_sources(tmp_path)


@pytest.mark.parametrize("content", [[], ["picture.png"]])
def test_nothing_to_read(tmp_path, content):
    write(tmp_path, *content)
    with pytest.raises(DataError, match="no data files"):
        find_sources(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        find_sources(tmp_path / "absent")


BODY = b"".join(b"line %d of a compressed file\n" % i for i in range(50_000))


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".gz", lambda body: gzip.compress(body[:1000]) + gzip.compress(body[1000:])),
        (".bz2", bz2.compress),
        (".bz2", lambda body: bz2.compress(body[:1000]) + bz2.compress(body[1000:])),
        (".xz", lzma.compress),
        (".xz", lambda body: lzma.compress(body[:1000]) + lzma.compress(body[1000:])),
        (".zst", zstandard.ZstdCompressor().compress),
        (".zst", lambda body: b"".join(map(zstandard.ZstdCompressor().compress, (body[:1000], body[1000:])))),
    ],
)
def test_every_compression_gives_the_same_bytes_and_counts_the_file(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(BODY))
    counted = []
    assert b"".join(read_chunks(path, counted.append)) == BODY
    assert sum(counted) == path.stat().st_size


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstandard.ZstdCompressor().compress),
    ],
)
@pytest.mark.parametrize("damage", [lambda body: body[:-10], lambda body: b"not compressed at all" * 5])
def test_damaged_streams_name_the_file(tmp_path, suffix, compress, damage):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(damage(compress(BODY)))
    with pytest.raises(DataError, match=path.name):
        list(read_chunks(path))


def test_the_page_names_every_compression_and_every_kind_of_record():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    suffixes = [suffix for suffix, kind in corpus_files._CONTAINERS.items() if kind != "text"]
    assert [name for name in (*corpus_files._COMPRESSIONS, *suffixes) if f"`{name}`" not in page] == []


RECORDS = [{"prompt": f"{n} squared is ", "completion": str(n * n)} for n in range(3)]


def test_a_saved_dataset_is_read_as_it_lies(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    sources = find_sources(tmp_path / "saved")
    assert sources.container == "dataset"
    assert [r for _, r in read_records(sources.files[0].path, "dataset", lambda _: None)] == RECORDS
    datasets.DatasetDict({"test": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "several")
    with pytest.raises(DataError, match="name one of them: test"):
        find_sources(tmp_path / "several")
    assert find_sources(tmp_path / "several" / "test").container == "dataset"


def test_a_dataset_of_the_hub_is_streamed(monkeypatch):
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **given: asked.append((a, given)) or RECORDS)
    for path in ("hf://datasets/me/mine", "hf://datasets/me/mine@v2/en#test"):
        sources = find_sources(Path(path))
        assert [r for _, r in read_records(sources.files[0].path, "dataset", lambda _: None)] == RECORDS
    assert asked == [
        (("me/mine", None), {"split": "train", "revision": None, "streaming": True}),
        (("me/mine", "en"), {"split": "test", "revision": "v2", "streaming": True}),
    ]
    with pytest.raises(DataError, match="hf://datasets/OWNER/NAME"):
        find_sources(Path("hf://datasets/mine"))


class UnreachedError(Exception):
    """What httpx raises derives from nothing else."""


def test_a_dataset_that_cannot_be_read_is_an_error_that_names_it(monkeypatch):
    for error in (FileNotFoundError("it is away"), UnreachedError("it"), RuntimeError("it is a script")):
        monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=error))
        with pytest.raises(DataError, match=r"me/mine: cannot read: it.* split, and at the network"):
            list(read_records(Path("hf://datasets/me/mine"), "dataset", lambda _: None))
    monkeypatch.setattr("datasets.load_from_disk", Mock(side_effect=KeyError("shape")))
    with pytest.raises(DataError, match="look at the files that save_to_disk has written"):
        list(read_records(Path("saved"), "dataset", lambda _: None))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.bin", "a.parquet", "a.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_not_read_as_the_file(tmp_path, name):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 12345\n"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(pointer)
    for path in (tmp_path / "in", tmp_path / "in" / name):
        with pytest.raises(DataError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
            find_sources(path)


@pytest.mark.parametrize(
    ("name", "first", "what"),
    [
        ("a.pdf", b"%PDF-1.4 ", "a PDF"),
        ("a.rtf", rb"{\rtf1 ", "RTF"),
        ("a.xlsx", b"PK\x03\x04", "a zip archive"),
    ],
)
def test_documents_of_other_programs_are_no_text(name: str, first: bytes, what: str, tmp_path: Path):
    """All of their bytes may be ASCII, and they would be trained on."""
    (tmp_path / name).write_bytes(first + b"words " * 500)
    with pytest.raises(DataError, match=f"{name} is {what}.*no text; write its text into"):
        find_sources(tmp_path / name)
    with pytest.raises(DataError, match="no text"):
        find_sources(tmp_path, "*")


def test_links_to_files_are_followed_and_links_to_directories_are_told(tmp_path):
    for name in ("real/b.jsonl", "blob", "in/deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "in" / "a.jsonl").symlink_to(tmp_path / "blob")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "real")
    sources = find_sources(tmp_path / "in")
    assert names(sources, tmp_path / "in") == ["a.jsonl", "deep/c.jsonl"]
    assert sources.note == "links to directories are not followed: more"
