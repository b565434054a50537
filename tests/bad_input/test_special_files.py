"""Files that are no files, do not end, or hold what no parser takes: each reader says so, and none of them waits."""

import contextlib
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from outsize.checkpoint.files.checkpoint_files import (
    INDEX,
    WEIGHTS,
    find_tensors,
    read_beside,
    read_generation_config,
)
from outsize.cli.plan.plan_machine import net_of
from outsize.cli.plan.plan_model import read_config
from outsize.cli.text.prompts import read_records
from outsize.config.load import load_config
from outsize.data.chat.chat_template import ChatTemplate
from outsize.data.reading.corpus_files import find_sources
from outsize.doctor.run_record import read_run
from outsize.errors import OutsizeError
from outsize.files import read_bytes, read_text
from outsize.hardware.from_probe import read_machine
from outsize.model.build import load_hf_config
from outsize.reporting.history import History
from outsize.telemetry.run_reading import read_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outsize.cli.plan.plan_machine import PlanFlags

_PATIENCE_S = 60
_NO_FILES = ("pipe", "socket", "device without an end")


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # a test's path is longer than what a socket binds to


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**36)


def _bomb(path: Path) -> None:
    rows = "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    path.write_text(f"a: &a [{','.join('x' * 9)}]\n{rows}")


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device without an end": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "sparse": _sparse,
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "deep": lambda path: path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "long number": lambda path: path.write_text('{"a":' + "1" * 5_000 + "}"),
    "aliases": _bomb,
}


def _network(path: Path) -> None:
    net_of(cast("PlanFlags", SimpleNamespace(net=str(path), nodes=2, clip=None)))


def _template(path: Path) -> None:
    ChatTemplate(cast("PreTrainedTokenizerBase", SimpleNamespace(chat_template=None)), str(path))


def _history(path: Path) -> None:
    History(path.parent).advance()


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config": ("config.yaml", load_config),
    "machine": ("machine.json", read_machine),
    "network": ("net.json", _network),
    "model config": ("config.json", lambda path: read_config(str(path))),
    "build": ("config.json", load_hf_config),
    "prompts": ("prompts.jsonl", read_records),
    "weights": (WEIGHTS, lambda path: find_tensors(path.parent)),
    "beside": ("generation_config.json", lambda path: read_beside(path.parent, with_code=False)),
    "generation": ("generation_config.json", lambda path: read_generation_config(path.parent)),
    "index": (INDEX, lambda path: find_tensors(path.parent)),
    "history": ("heartbeat.jsonl", _history),
    "doctor": ("heartbeat.jsonl", lambda path: read_run(path.parent)),
    "mapping": ("plan.json", read_mapping),
    "template": ("named", _template),
    "corpus": ("data.txt", find_sources),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_it_is_read_or_refused(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    KINDS[kind](path)

    def give_up(*_: object) -> None:
        pytest.fail(f"{reader} waits for ever")

    former = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_PATIENCE_S)
    try:
        with pytest.raises(OutsizeError) if kind in _NO_FILES else contextlib.suppress(OutsizeError):
            read(path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def test_what_may_be_large_takes_the_memory_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 3_000_000)
    assert len(read_bytes(tmp_path / "small", most=2**60)) == 3_000_000
    with pytest.raises(OSError, match="larger than 2,999,999 bytes"):
        read_bytes(tmp_path / "small", most=2_999_999)


def test_a_pipe_of_the_shell_is_read() -> None:
    """``outsize train <(make_config)``."""
    reading, writing = os.pipe()
    with open(reading, "rb"):
        with open(writing, "w", encoding="utf-8", newline="") as file:
            file.write("a: 1\r\nb: 2\n")
        assert read_text(Path(f"/dev/fd/{reading}")) == "a: 1\nb: 2\n"
