"""Whole commands over run directories of anybody: a file in them damaged, and the command to end as it may.

A command comes to what it comes to over the undamaged directory, or names the file that is another: in an error of
ours, or in a note where it can do without. A resume that goes on ends bit for bit where it would have, or says with
what other setting it goes on.
"""

import functools
import hashlib
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from fuzz.damage import JUNK, places
from outsize.checkpoint.checkpoint_state import latest
from outsize.cli import main
from outsize.config import Config, dump_config
from outsize.training.records import StepRecord
from outsize.training.run import train
from tiny import tiny_run

DEEP = "[" * 100_000 + "]" * 100_000


def _as_link(to: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(to)

    return damage


def _as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _with(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


WHOLE: Mapping[str, Callable[[Path], Any]] = {
    "absent": Path.unlink,
    "directory": _as_directory,
    "pipe": _as_pipe,
    "link to nowhere": _as_link("nowhere"),
    "link to zeros": _as_link("/dev/zero"),
    "empty": _with(lambda data: b""),
    "zeros": _with(lambda data: bytes(len(data))),
    "half": _with(lambda data: data[: len(data) // 2]),
    "twice": _with(lambda data: data * 2),
    "not UTF-8": _with(lambda data: b"\xff" + data),
    "list": _with(lambda data: b"[1]"),
    "deep": _with(lambda data: f'{{"x": {DEEP}}}'.encode()),
    "long number": _with(lambda data: b'{"x": ' + b"1" * 5000 + b"}"),
}
DAMAGES = st.one_of(
    st.sampled_from(sorted(WHOLE)),
    st.tuples(st.integers(0, 10**6), JUNK),  # a value in a file of JSON
    st.tuples(
        st.integers(0, 10**6), st.integers(0, 7).map(lambda bit: bytes([1 << bit]))
    ),  # a bit of any file
)


def _damage(path: Path, how: Any) -> None:
    if isinstance(how, str):
        WHOLE[how](path)
        return
    at, value = how
    data = bytearray(path.read_bytes())
    if not isinstance(value, bytes):
        with suppress(ValueError):
            document = {"": json.loads(data)}
            *outer, last = places(document)[1:][at % (len(places(document)) - 1)]
            functools.reduce(lambda inside, key: inside[key], outer, document)[last] = value
            path.write_bytes(json.dumps(document[""]).encode("utf-8", "surrogatepass"))
            return
    data[at % len(data)] ^= value[0] if isinstance(value, bytes) else 1
    path.write_bytes(data)


class Runs:
    """Three runs, made once: one that has ended, one of adapters, and one that was cut off with its home on disk."""

    KINDS: Mapping[str, Mapping[str, Any]] = {
        "ended": {"memory": {"home": "host"}},
        "adapters": {"memory": {"home": "host"}, "train": {"method": "lora"}},
        "cut off": {"memory": {"home": "disk"}, "train": {"save_every": 2}},
    }

    def __init__(self, root: Path) -> None:
        self._root = root
        self.ends = {kind: self._made(kind, **sections) for kind, sections in self.KINDS.items()}
        self._results: dict[tuple[str, str], Mapping[str, str]] = {}
        self.files = {
            kind: sorted(
                path.relative_to(root) for path in (root / kind / "run").rglob("*") if path.is_file()
            )
            for kind in self.KINDS
        }

    def _made(self, kind: str, **sections: Any) -> Mapping[str, str]:
        (self._root / kind).mkdir(parents=True)
        with suppress(KeyboardInterrupt):
            train(self._config(kind, 6 if kind == "cut off" else 3, **sections), progress=_stop_in_five)
        (self._root / kind / "resume.yaml").write_text(dump_config(self._config(kind, 6, **sections)))
        (self._root / "at").mkdir()
        status, words = self.command("resume", kind, self._root / "at")
        assert status == 0, words
        end = weights(self._root / "at" / kind / "run")
        shutil.rmtree(self._root / "at")
        return end

    def _config(self, kind: str, steps: int, **sections: Any) -> Config:
        settings = {"steps": steps, "resume": "auto", **sections.get("train", {})}
        return tiny_run(self._root / kind, **{**sections, "train": settings})

    def result(self, name: str, kind: str, at: Path) -> Mapping[str, str]:
        """What a command comes to over the undamaged directory; nothing where it refuses."""
        if (name, kind) not in self._results:
            status, words = self.command(name, kind, at)
            self._results[name, kind] = {} if status else result_of(at / kind, words, self.files[kind])
            shutil.rmtree(at / kind)
        return self._results[name, kind]

    def command(
        self, name: str, kind: str, at: Path, damage: tuple[Path, Any] | None = None
    ) -> tuple[int, str]:
        """Run a command on a copy in ``at``; returns its status and what it said.

        Raises:
            Exception: whatever is no error of ours.
        """
        shutil.copytree(self._root / kind, at / kind, dirs_exist_ok=True)
        if damage is not None:
            _damage(at / damage[0], damage[1])
        out, err = io.StringIO(), io.StringIO()
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(signal, "pause"))  # what serves ends at once
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            try:
                main([part.replace("RUN", str(at / kind / "run")) for part in COMMANDS[name].split()])
            except SystemExit as ended:
                return int(ended.code or 0), out.getvalue() + err.getvalue()
        raise AssertionError("a command returned")


def _stop_in_five(record: StepRecord) -> None:
    if record.step == 5:
        raise KeyboardInterrupt


def weights(run_dir: Path) -> Mapping[str, str]:
    """Digests of the weights and the optimizer's state that a run has saved last."""
    saved = latest(run_dir)
    assert saved is not None, f"{run_dir} has saved nothing"
    files = sorted(saved.rglob("*.safetensors"))
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Times, rates, sizes in memory, and how long ago a run spoke last.
_VARYING = re.compile(
    r"http://\S+|\"\w*(seconds|_s|per_s)\": [0-9.e+-]+|[\d.]+ (ms|s|tokens/s|GiB/s|KiB|MiB|GiB)\b"
    r"|.*predicted.*|\"status\": \{[^}]*\}"
)


def result_of(at: Path, words: str, files: Sequence[Path]) -> Mapping[str, str]:
    """What a command has said and written, but for what belongs to the run."""
    before = {at.parent / path for path in files}
    written = sorted(
        path
        for path in at.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and path not in before
        and not path.name.endswith((".html", ".made-with.json"))
    )
    digests = {str(path.relative_to(at)): hashlib.sha256(path.read_bytes()).hexdigest() for path in written}
    return {**digests, "words": _VARYING.sub("", words)}


def is_noticed(name: str, path: Path, how: Any) -> bool:
    """Whether a command can know that a file is another: by its form, or by a checksum that it holds it against."""
    if name in ("export", "merge", "generate", "score"):
        return "optimizer" not in path.parts
    whole = isinstance(how, str) and how not in ("absent", "link to nowhere")
    return whole and not (path.suffix == ".yaml" and how in ("half", "zeros", "twice"))


_MEMORY = "--device cpu --device-memory 512MiB"
COMMANDS = {
    "report": "report RUN --json -o RUN/../page.html",
    "doctor": "doctor RUN --fail-on never --json",
    "watch": "watch RUN",
    "plan": "plan RUN/config.yaml --gpus 4090",
    "plan on its machine": "plan RUN/config.yaml --machine RUN/machine.json --dtype fp32",
    "generate": f"generate RUN --prompt a --max-new-tokens 2 {_MEMORY}",
    "serve": f"serve RUN --port 0 {_MEMORY}",
    "score": f"score RUN --data RUN/../data.txt --context 16 --out RUN/../scores.jsonl {_MEMORY}",
    "export": "export RUN",
    "merge": "export RUN --merge",
    "verify": "verify RUN/config.yaml --run-dir RUN/../verified --steps 1",
    "resume": "train RUN/../resume.yaml --run-dir RUN",
}


COMPARED = ("report", "doctor", "plan", "plan on its machine", "generate", "score", "export", "merge")


@functools.cache
def _runs(root: Path) -> Runs:
    return Runs(root)


def read_by_a_command(root: Path, name: str, kind: str, file: int, how: Any) -> None:
    """Damage a file of a run, and have a command read it."""
    runs = _runs(root)
    at = root / "at"
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir()
    damaged = runs.files[kind][file % len(runs.files[kind])]
    expected = runs.result(name, kind, at)
    status, words = runs.command(name, kind, at, (damaged, how))
    assert status in (0, 2), words
    assert status == 0 or "outsize: " in words, words
    if name in COMPARED and expected and damaged.name not in words and is_noticed(name, damaged, how):
        assert status == 0, f"{damaged} is not named: {words}"
        assert result_of(at / kind, words, runs.files[kind]) == expected, (
            f"{damaged}: another result, and no word"
        )
    if name == "resume" and status == 0 and "goes on with" not in words:
        assert weights(at / kind / "run") == runs.ends[kind], f"another end, and nothing said: {words}"


def strategies() -> tuple[st.SearchStrategy[Any], ...]:
    """What `read_by_a_command` is given after its root."""
    return (
        st.sampled_from(sorted(COMMANDS)),
        st.sampled_from(sorted(Runs.KINDS)),
        st.integers(0, 10**6),
        DAMAGES,
    )
