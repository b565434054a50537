"""Directories with splits: what is read is what ``datasets.load_dataset`` calls train, over many layouts."""

import json
import re
from pathlib import Path

import datasets
import pytest

from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.errors import DataError

CARD = "---\nlicense: mit\nconfigs:\n{configs}\n---\n# A data set\n"
ONE = "- config_name: default\n  data_files:\n  - split: train\n    path: {train}\n  - split: test\n    path: {test}"


def write(root, *names):
    """Write files of two records each, whose text is their name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [{"text": f"{name} {n}"} for n in range(2)]
        if path.suffix == ".parquet":
            datasets.Dataset.from_list(records).to_parquet(path)
        elif path.suffix == ".csv":
            datasets.Dataset.from_list(records).to_csv(path)
        elif path.name in ("dataset_infos.json", "config.json"):
            path.write_text("{}")
        elif path.suffix == ".json":
            path.write_text(json.dumps(records))
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        else:
            path.write_text(f"{name} 0\n{name} 1\n")


def ours(root, glob=None):
    """Return the lines of text that are read of a directory."""
    found = DocumentReader(find_sources(root, glob), None, Corpus(path=root)).documents()
    return sorted(line for document in found for line in document.text.splitlines())


def theirs(root):
    """Return the lines of text that the datasets library calls train."""
    cache = root.parent / "cache"
    return sorted(datasets.load_dataset(str(root), split="train", cache_dir=str(cache))["text"])


SPLITS = ("train", "validation", "test")
LAYOUTS = {
    **{
        f"files of {suffix}": [f"{s}.{suffix}" for s in SPLITS]
        for suffix in ("jsonl", "json", "csv", "parquet", "txt")
    },
    "shards of the hub": [f"data/{s}-0000{n}-of-00002.parquet" for s in SPLITS for n in range(2)],
    "shards in the root": ["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"],
    "directories": ["train/a.jsonl", "train/b.jsonl", "test/a.jsonl", "validation/a.jsonl"],
    "directories in a directory": ["data/train/a.jsonl", "data/dev/a.jsonl"],
    "words for splits": ["training.jsonl", "dev.jsonl", "eval.jsonl"],
    "words within names": ["my-train-set.jsonl", "my_val_set.jsonl", "chats.test.jsonl"],
    "words that only begin like one": ["trainer.jsonl", "testament.jsonl", "latest.jsonl", "devices.jsonl"],
    "numbers": ["train_1.jsonl", "train_2.jsonl", "test_1.jsonl"],
    "one file": ["chats.jsonl"],
    "files without splits": ["a.jsonl", "b.jsonl", "deep/c.jsonl"],
    "train and files of no split": ["train.jsonl", "more.jsonl"],
    "train alone": ["train.jsonl"],
    "directories before names": ["train/test.jsonl", "test/train.jsonl"],
    "a file in two splits": ["train-eval.jsonl", "eval.jsonl"],
    "what is written about data": ["train.json", "dataset_infos.json", "config.json", "README.md"],
    "a page and a script beside records": ["README.md", "load.py", "data.jsonl"],
    "a page beside tables": ["README.md", "data.csv"],
    "a script beside tables for training": ["load.py", "train.csv", "test.csv"],
    "a page beside prose": ["README.md", "train.txt", "test.txt"],
    "hidden files": [".hidden/train.jsonl", ".train.jsonl", "train.jsonl", "test.jsonl"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_of_a_directory_is_what_datasets_calls_train(tmp_path, layout):
    root = tmp_path / "folder"
    write(root, *LAYOUTS[layout])
    assert ours(root) == theirs(root)


CONFIGS = {
    "splits": ONE.format(train="a.jsonl", test="b.jsonl"),
    "patterns": ONE.format(train="deep/*", test="'*.jsonl'"),
    "several patterns": ONE.format(train="[a.jsonl, deep/c.jsonl]", test="b.jsonl"),
    "everything below": ONE.format(train="deep/**", test="b.jsonl"),
    "one path": "- config_name: any\n  data_files: b.jsonl",
    "a list of paths": "- config_name: any\n  data_files: [b.jsonl, deep/c.jsonl]",
    "a default among several": (
        "- config_name: one\n  data_files: a.jsonl\n- config_name: two\n  default: true\n  data_files: b.jsonl"
    ),
    "one that is called default": (
        "- config_name: one\n  data_files: a.jsonl\n- config_name: default\n  data_files: b.jsonl"
    ),
    "no files": "- config_name: default\n  version: 1.0.0",
}


@pytest.mark.parametrize("configs", CONFIGS)
def test_the_front_matter_of_a_page_names_the_files_as_for_datasets(tmp_path, configs):
    root = tmp_path / "folder"
    write(root, "a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/d.jsonl")
    (root / "README.md").write_text(CARD.format(configs=CONFIGS[configs]))
    assert ours(root) == theirs(root)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        (
            "- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl",
            "several conf.*a, b.*glob",
        ),
        ("- config_name: a\n  data_files: away.jsonl", "names away.jsonl"),
        ("- config_name: a\n  data_files: https://host/a.jsonl", "names https"),
        ("- config_name: a\n  data_files: {split: train}", "a path, a list of paths"),
        ("- config_name: a\n  data_files: a.jsonl\n  sep: ';'", "sets sep, which is not honoured"),
        ("- just text", "list of mappings"),
        ("- [", "cannot be read"),
    ],
)
def test_front_matter_that_cannot_be_followed_is_an_error_that_names_it(tmp_path, configs, message):
    write(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "README.md").write_text(CARD.format(configs=configs))
    with pytest.raises(DataError, match=f"README.md.*{message}"):
        find_sources(tmp_path)
    assert ours(tmp_path, "a.jsonl") == ["a.jsonl 0", "a.jsonl 1"]


def test_what_is_left_out_is_named(tmp_path):
    write(tmp_path, "train.jsonl", "more.jsonl", "test.jsonl", "val.jsonl", "val_2.jsonl")
    assert find_sources(tmp_path).note == (
        "split train: 1 file, by names of files; left out: validation (2 files), test (1 file), of no split (1 file)"
    )


def test_a_test_set_is_not_trained_on_beside_files_of_no_split(tmp_path):
    write(tmp_path, "chats.jsonl", "test.jsonl")
    assert ours(tmp_path) == ["chats.jsonl 0", "chats.jsonl 1"]
    assert "left out: test (1 file)" in (find_sources(tmp_path).note or "")


def test_a_directory_of_one_split_is_read_and_says_so(tmp_path):
    write(tmp_path, "test/test-00000-of-00001.parquet")
    assert len(ours(tmp_path / "test")) == 2
    assert (
        find_sources(tmp_path / "test").note == "split test, the only one there is: 1 file, by names of files"
    )


def test_several_splits_without_one_for_training_are_refused_with_a_pattern_that_works(tmp_path):
    write(
        tmp_path, *(f"data/{s}-0000{n}-of-00002.parquet" for s in ("train_sft", "test_sft") for n in range(2))
    )
    with pytest.raises(DataError, match=r"train_sft \(2 files\).*glob=") as refusal:
        find_sources(tmp_path)
    pattern = re.search("glob='(.*)'", str(refusal.value))[1]
    assert len(ours(tmp_path, pattern)) == 4


@pytest.mark.parametrize(
    ("names", "measured"),
    [
        (("train.jsonl", "validation.jsonl", "test.jsonl"), ["validation.jsonl"]),
        (("train/a.jsonl", "test/a.jsonl"), ["test/a.jsonl"]),
        (
            ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
            ["data/test-00000-of-00001.parquet"],
        ),
        (("train.json", "dev.json", "notes.md"), ["dev.json"]),
        (("train.jsonl", "held_out.jsonl"), ["held_out.jsonl"]),
        (("train.jsonl",), ["train.jsonl"]),
        (("a.jsonl", "b.jsonl"), ["a.jsonl", "b.jsonl"]),
    ],
)
def test_of_a_directory_with_splits_a_model_is_measured_on_what_is_for_that(tmp_path, names, measured):
    write(tmp_path, *names)
    sources = find_sources(tmp_path, measured=True)
    assert [file.path.relative_to(tmp_path).as_posix() for file in sources.files] == measured


def test_a_model_is_not_measured_on_train_where_no_split_is_named(tmp_path):
    write(tmp_path, "data/train-00000-of-00001.parquet", "data/other-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"none is called validation or test; name a file.* in eval\.data"):
        find_sources(tmp_path, measured=True)
    with pytest.raises(DataError, match=r"name a split, e\.g\. hf:/datasets/a/b#validation"):
        find_sources(Path("hf://datasets/a/b"), measured=True)
    assert find_sources(Path("hf://datasets/a/b#test"), measured=True).container == "dataset"


def test_tokens_made_elsewhere_have_splits_and_source_code_has_none(tmp_path):
    write(tmp_path / "tokens", "train.bin", "val.bin")
    assert [file.path.name for file in find_sources(tmp_path / "tokens").files] == ["train.bin"]
    write(tmp_path / "code", "train.py", "test.py", "tests/test_a.py")
    assert len(find_sources(tmp_path / "code").files) == 3
