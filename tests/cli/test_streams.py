"""Commands whose words do not arrive: a reader that goes away, a disk that is full."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from outsize.cli import main
from outsize.cli.text.console import Told, told
from outsize.training.run import train
from tiny import tiny_run


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a run that has ended."""
    root = tmp_path_factory.mktemp("ended")
    train(tiny_run(root, train={"steps": 1}))
    return root


def full() -> TextIO:
    return Path("/dev/full").open("w", encoding="utf-8")


def without_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.parametrize("made", [full, without_reader])
def test_what_is_written_into_nothing_raises_nothing(made: Callable[[], TextIO]):
    with made() as stream:
        out = Told(stream)
        for _ in range(3):
            out.write("a line\n" * 2000)
            out.flush()
        assert (out.num_lost > 0) == (
            made is full
        )  # nobody waits for what a reader that has gone does not read
        assert out.encoding == stream.encoding


@pytest.mark.parametrize("made", [full, without_reader])
def test_a_run_whose_words_do_not_arrive_goes_on(
    made: Callable[[], TextIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with made() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with told():
            result = train(
                tiny_run(tmp_path),
                progress=lambda record: sys.stderr.write(f"{record}\n" * 9),
                announce=lambda line: sys.stderr.write(f"{line}\n" * 9),
            )
        monkeypatch.undo()
    assert (result.steps, result.failed_writes) == (3, 0)


@pytest.mark.parametrize(("made", "status"), [(full, 1), (without_reader, 0)])
def test_a_result_that_does_not_arrive_is_a_failure_unless_its_reader_has_gone(
    made: Callable[[], TextIO],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with made() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(["--version"])
        monkeypatch.undo()
    assert (ended.value.code or 0) == status
    assert ("could not be written to stdout" in capsys.readouterr().err) == (status == 1)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_failure(closed: str):
    ran = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m outsize --version {closed}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_no_file_of_a_run_takes_the_number_of_a_closed_stream(tmp_path: Path):
    script = (
        "import os, pathlib, outsize.files as files\n"
        "os.close(1); os.close(2)\n"
        f"path = pathlib.Path({str(tmp_path / 'home')!r})\n"
        "numbers = [files.system().open(path, os.O_RDWR | os.O_CREAT) for _ in '12']\n"
        "os._exit(0 if min(numbers) > 2 else 3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("place", ["file/out", "loop", "loop/out", "n" * 300, "/proc/none/out", "pipe"])
@pytest.mark.parametrize(
    "command",
    [
        "score RUN --data DATA --context 16 --out",
        "generate RUN --prompts DATA --max-new-tokens 1 --out",
        "export RUN --out",
        "report RUN -o",
    ],
)
def test_a_place_that_cannot_be_written_is_refused_by_name(
    command: str, place: str, tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    words = command.replace("RUN", str(ended / "run")).replace("DATA", str(ended / "data.txt")).split()
    if place == "loop" and command.startswith("report"):
        return  # a page takes the place of a link that leads nowhere
    with pytest.raises(SystemExit, match="2"):
        main([*words, str(tmp_path / place)])
    told = "".join(capsys.readouterr().err.split())
    assert "outsize:" in told
    assert place[:4] in told
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)  # nothing has taken its place
