"""Whole commands whose words do not arrive, or that are told to end: what becomes of what they train.

Each is a process of its own. What it trains goes on to its end or is saved where it was told to end; where it is then
resumed, it ends bit for bit where an undisturbed run does. Nothing ends in a traceback.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from crash.campaign import digest
from outsize.config import Config, dump_config
from tiny import tiny_run

STEPS = 40
_TIMEOUT_S = 120.0
# A run that was asked to end has saved, however far it came.
_SAVES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Teller:
    """One way in which words do not arrive, or a run is told to end.

    Attributes:
        home: where its state lies.
        stderr, stdout: ``pipe``, ``full`` (a disk without room), or ``gone`` (a reader that leaves after some lines).
        number: signal that it gets after some steps; 0 for none.
        removed: whether its directory is removed under it: it says what it cannot write, and makes it anew to save.
        status: that it is to end with.
        ends: whether it comes to its last step undisturbed.
    """

    home: str
    stderr: str = "pipe"
    stdout: str = "pipe"
    number: int = 0
    removed: bool = False
    status: int = 0
    ends: bool = True


def _tellers() -> Mapping[str, Teller]:
    found: dict[str, Teller] = {}
    for home in ("host", "disk"):
        found[f"{home}: stderr is full"] = Teller(home, stderr="full")
        found[f"{home}: its reader goes away"] = Teller(home, stderr="gone")
        for number in _SAVES:
            found[f"{home}: {number.name}"] = Teller(home, number=number, ends=False)
        # Ctrl-\\ ends a process at once, for a core; a home on disk has its last step all the same.
        found[f"{home}: SIGQUIT"] = Teller(home, number=signal.SIGQUIT, status=-signal.SIGQUIT, ends=False)
        found[f"{home}: SIGKILL"] = Teller(home, number=signal.SIGKILL, status=-signal.SIGKILL, ends=False)
    found["host: its directory is removed"] = Teller("host", removed=True)
    return found


TELLERS = _tellers()


class Stage:
    """Makes runs of one configuration in ``root``, and knows how an undisturbed one ends."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._expected: dict[str, Mapping[str, str]] = {}

    def judge(self, name: str) -> tuple[str, list[str]]:
        """Return what a teller did (its status and last words), and which promises were broken."""
        teller = TELLERS[name]
        config, file = self._config(teller.home, "run")
        run_dir = Path(config.train.run_dir or "")
        shutil.rmtree(run_dir, ignore_errors=True)
        status, words = self._run(teller, file, run_dir)
        problems = (
            [] if status == teller.status else [f"status {status}, not {teller.status}: {words[-600:]}"]
        )
        if "Traceback" in words:
            problems.append(f"a traceback: {words[-600:]}")
        if teller.removed:
            if "cannot write" not in words or not (run_dir / "checkpoints" / "latest").exists():
                problems.append(f"says nothing, or saves nothing: {words[-600:]}")
        elif not problems:
            problems += self._goes_on(teller, file, run_dir)
        return f"{status}: {words.strip().splitlines()[-1] if words.strip() else ''}", problems

    def _goes_on(self, teller: Teller, file: Path, run_dir: Path) -> list[str]:
        """Resume where there are steps left, and compare the end with that of an undisturbed run."""
        problems = []
        saved = (run_dir / "checkpoints" / "latest").exists()
        if teller.number in _SAVES and not saved:
            problems.append("nothing was saved")
        if not teller.ends:
            done = subprocess.run(
                _command(file, "--resume", "auto"), capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                return [*problems, f"cannot be resumed: {done.stderr[-600:]}"]
            if "resumed from step" not in done.stderr and (saved or teller.home == "disk"):
                problems.append("began anew though there was something to go on from")
        found = {name: value for name, value in digest(run_dir).items() if not name.startswith("loss")}
        if found != self._end_of(teller.home):
            problems.append("ends with other weights or state")
        return problems

    def _end_of(self, home: str) -> Mapping[str, str]:
        if home not in self._expected:
            config, file = self._config(home, "undisturbed")
            subprocess.run(_command(file), capture_output=True, check=True)
            found = digest(Path(config.train.run_dir or ""))
            self._expected[home] = {
                name: value for name, value in found.items() if not name.startswith("loss")
            }
        return self._expected[home]

    def _config(self, home: str, name: str) -> tuple[Config, Path]:
        train = {"steps": STEPS, "run_dir": str(self._root / home / name)}
        config = tiny_run(self._root / home, train=train, memory={"home": home})
        file = self._root / home / f"{name}.yaml"
        file.write_text(dump_config(config))
        return config, file

    def _run(self, teller: Teller, file: Path, run_dir: Path) -> tuple[int, str]:
        """Run the command under a teller; returns its status and what it said, where somebody heard it."""
        with Path("/dev/full").open("w") as full:
            streams = {"pipe": subprocess.PIPE, "gone": subprocess.PIPE, "full": full}
            process = subprocess.Popen(
                _command(file), stdout=streams[teller.stdout], stderr=streams[teller.stderr], text=True
            )
        if teller.stderr == "gone" and process.stderr is not None:
            for _ in range(3):
                process.stderr.readline()
            process.stderr.close()
            process.stderr = None
        if teller.number or teller.removed:
            _await(lambda: _num_steps(run_dir) >= 3 or process.poll() is not None)
            if teller.removed:
                shutil.rmtree(run_dir, ignore_errors=True)
            else:
                process.send_signal(teller.number)
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return -1, f"does not end within {_TIMEOUT_S} s"
        return process.returncode, (err or "") + (out or "")


def _command(file: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "outsize", "train", str(file), *more]


def _num_steps(run_dir: Path) -> int:
    heartbeat = run_dir / "heartbeat.jsonl"
    return heartbeat.read_bytes().count(b"\n") if heartbeat.is_file() else 0


def _await(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _TIMEOUT_S
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
