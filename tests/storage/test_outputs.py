"""Files that options name: whole or not at all, one process beside another, and what a limit is told as."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outsize.checkpoint.files.checkpoint_writer import new_directory
from outsize.cli.text.console import write_output
from outsize.data.token_cache import new_entry
from outsize.errors import StorageError
from outsize.reporting.html_page import write_page

PAGES = "x" * 10_000


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As `ulimit -f` does; Python turns its signal into EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def directory(path: Path) -> None:
    with new_directory(path, 0) as partial:
        (partial / "file").write_text(PAGES)


def entry(path: Path) -> None:
    with new_entry(path) as partial:
        (partial / "file").write_text(PAGES)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_output(path, PAGES),
        lambda path: write_page(path, PAGES),
        directory,
        entry,
    ],
    ids=["output", "page", "directory", "entry"],
)
def test_a_file_over_the_limit_of_sizes_is_told_as_that_and_leaves_nothing(
    write: Callable[[Path], object], tmp_path: Path
):
    with largest_file(4096), pytest.raises(StorageError, match=r"too large; raise .*ulimit -f"):
        write(tmp_path / "out")
    assert os.listdir(tmp_path) == []
    write(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_an_output_that_cannot_be_written_leaves_the_one_before(tmp_path: Path):
    """A machine that was probed for minutes is not lost to a disk that is full."""
    path = tmp_path / "machine.json"
    write_output(path, "before")
    with largest_file(4096), pytest.raises(StorageError, match=r"cannot write .*machine\.json"):
        write_output(path, PAGES)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["machine.json"]


def test_an_output_follows_a_link_and_goes_into_a_pipe(tmp_path: Path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("behind")
    write_output(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "behind").read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    with pytest.raises(StorageError, match=r"cannot write .*; choose another file"):
        write_output(tmp_path, "text")


def test_of_two_that_write_one_directory_the_second_is_refused(tmp_path: Path):
    """It began when there was none yet; what the first one wrote stays."""
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        second = stack.enter_context(new_directory(out, 0))
        (second / "of the second").touch()
        with new_directory(out, 0) as first:
            (first / "of the first").touch()
        with pytest.raises(StorageError, match="exists already; choose another directory"):
            stack.close()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["of the first"]
