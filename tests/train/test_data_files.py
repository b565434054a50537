"""A resume says which files of the data have changed, and refuses other sequences by the names of their files."""

import os
from pathlib import Path

import pytest

from outsize.config import Config
from outsize.errors import ConfigError
from outsize.session.steps import MOST_LISTED, changed_files, list_files
from outsize.training.run import train
from tiny import tiny_run


def texts(directory: Path) -> Path:
    """Two files of data, and what lies below."""
    data = directory / "texts"
    (data / "below").mkdir(parents=True)
    for name in ("a.txt", "below/b.txt"):
        lines = [f"the square of {n} in {name} is {n * n}" for n in range(30)]
        (data / name).write_text("\n".join(lines), encoding="utf-8")
    return data


def run_over(directory: Path, home: str, **train_section: object) -> Config:
    return tiny_run(
        directory,
        data={"path": str(directory / "texts")},
        memory={"home": home},
        train={"resume": "auto", **train_section},
    )


@pytest.mark.parametrize("home", ["host", "disk"])
def test_files_that_changed_without_other_sequences_are_told_by_name(home: str, tmp_path: Path):
    data = texts(tmp_path)
    train(run_over(tmp_path, home, steps=1))
    said: list[str] = []
    train(run_over(tmp_path, home, steps=2), announce=said.append)
    assert not any("files of the data" in line for line in said)
    os.utime(data / "below/b.txt", ns=(1, 1))
    (data / "a.txt").rename(data / "a2.txt")
    train(run_over(tmp_path, home, steps=3), announce=said.append)
    told = [line for line in said if "files of the data" in line]
    assert told == [
        "note: files of the data have changed, the sequences compared have not: a2.txt is new, below/b.txt was "
        "written again, with as many bytes, a.txt is no longer there"
    ]


@pytest.mark.parametrize("home", ["host", "disk"])
def test_other_sequences_are_refused_by_the_name_of_the_file_that_changed(home: str, tmp_path: Path):
    data = texts(tmp_path)
    train(run_over(tmp_path, home, steps=1))
    text = (data / "below/b.txt").read_text(encoding="utf-8")
    size = len(text)
    (data / "below/b.txt").write_text(f"{text}{text}", encoding="utf-8")
    changed = rf"data\.\*; below/b\.txt has {2 * size} bytes, and had {size}\)"
    with pytest.raises(ConfigError, match=changed):
        train(run_over(tmp_path, home))


def test_many_files_are_one_entry_beyond_the_first(tmp_path: Path):
    for number in range(MOST_LISTED + 20):
        (tmp_path / f"{number:04}.txt").write_text("words", encoding="utf-8")
    before = list_files([(str(tmp_path), None)])
    assert len(before) == MOST_LISTED + 1
    os.utime(tmp_path / "0007.txt", ns=(1, 1))
    (tmp_path / f"{MOST_LISTED + 3:04}.txt").write_text("more words", encoding="utf-8")
    now = list_files([(str(tmp_path), None)])
    assert changed_files(before, now) == (
        "0007.txt was written again, with as many bytes, files beyond the first has 105 bytes, and had 100"
    )


@pytest.mark.parametrize("former", [None, 3, [], "files"])
def test_a_state_that_says_nothing_of_files_compares_with_none(former: object):
    assert changed_files(former, {"a.txt": [1, 1]}) == ""


@pytest.mark.parametrize("entry", [None, 3, [], [1], "words", {}])
def test_entries_of_other_kinds_are_changes(entry: object):
    assert changed_files({"a.txt": entry}, {"a.txt": [1, 1]}).startswith("a.txt ")
