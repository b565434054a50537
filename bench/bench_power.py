"""Does a run survive a loss of power? Every crash state of its run directory must be gone on from, bit for bit.

Tiny runs over a text, with the home on disk and on the host, are trained once while every call to the file system is
recorded: what was written where, synced, renamed, removed, and when each call began and ended. From that record crash
states of the *whole* run directory are made (`power_states`): the home, checkpoints, configuration, plan, heartbeat,
tokens. In each, ``resume: auto`` has to go on to the end without a word of the user's: from a step that is not older
than the last commit or checkpoint that had ended, to the same weights and optimizer state, bit for bit.

    python bench/bench_power.py                           # 600 crash points by replay, half of them per home
    python bench/bench_power.py --mount ext4 --points 60  # the same on a file system that is really cut off, as root

With ``--mount`` an image is made, mounted over a loop device, and shut down without its log at a random moment
(FS_IOC_SHUTDOWN), under a run in a process of its own; then it is mounted again, and the run goes on.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common
from bench_kill import forked
from power_states import POLICIES, Disk, keeping, resolve

from crash.faults import Layer, Operation, layered
from outsize.checkpoint.checkpoint_state import STATE, latest
from outsize.checkpoint.saver import Saver
from outsize.config import Config
from outsize.errors import OutsizeError
from outsize.optim.optimizer_names import OWN
from outsize.storage.committed import CommittedHome
from outsize.training.run import train
from tiny import tiny_run

HOMES = ("disk", "host")
# _IOR('X', 125, __u32) of linux/fs.h, and its EXT4_GOING_FLAGS_NOLOGFLUSH: nothing more reaches the disk.
SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2
IMAGE_BYTES = 64 * 2**20
HANG_S = 120.0


def config_of(root: Path, home: str, steps: int, save_every: int, optimizer: str = "adamw") -> Config:
    return tiny_run(
        root,
        train={"steps": steps, "resume": "auto", "save_every": save_every},
        optimizer={"name": optimizer, "lr": 1e-3},
        memory={"home": home, "disk_memory": "32MiB"},
    )


def in_dir(config: Config, run_dir: Path) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"run_dir": str(run_dir)})})


def end_digest(run_dir: Path) -> str:
    """Digest of the newest checkpoint, weights and optimizer state, without what differs from run to run."""
    saved = latest(run_dir)
    assert saved is not None, "nothing was saved"
    digest = hashlib.sha256(saved.name.encode())
    for path in sorted(path for path in saved.rglob("*") if path.is_file() and path.name != STATE):
        digest.update(str(path.relative_to(saved)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


# --- by replay ------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What one run did to its files.

    Attributes:
        operations: all calls, in the order in which they began.
        end: digest of what it came to.
        durable: by step, when its commit or its checkpoint had ended, on the clock of the operations.
    """

    operations: list[Operation] = field(default_factory=list)
    end: str = ""
    durable: dict[int, int] = field(default_factory=dict)


def record(config: Config, root: Path) -> Recording:
    """Train while everything is recorded."""
    found = Recording()
    layer = Layer(root, keep_data=True)
    commit, report = CommittedHome.commit, Saver._report

    def ended(step: int) -> None:
        found.durable.setdefault(step, max(op.ended for op in list(layer.operations)))

    def watched_commit(self: CommittedHome, state: Any) -> None:
        commit(self, state)
        ended(state["step"])

    def watched_report(self: Saver, saving: Any) -> None:
        if saving is not None and saving.path is not None:
            ended(saving.step)
        report(self, saving)

    CommittedHome.commit = watched_commit  # type: ignore[method-assign]
    Saver._report = watched_report  # type: ignore[method-assign]
    try:
        with layered(layer):
            train(config)
    finally:
        CommittedHome.commit = commit  # type: ignore[method-assign]
        Saver._report = report  # type: ignore[method-assign]
    changing = (op for op in layer.operations if op.kind not in ("pread", "close", "lane"))
    found.operations = sorted(changing, key=lambda op: op.begun)
    found.end = end_digest(Path(config.train.run_dir or ""))
    return found


def went_on(config: Config, end: str, least: int) -> int:
    """Go on with a run to its end, and return the step that it went on from.

    Raises:
        OutsizeError: it cannot.
        AssertionError: it went on from a step older than ``least``, or to another end than ``end``.
    """
    said: list[str] = []
    result = train(config, announce=said.append)
    first = from_step(said)
    run_dir = Path(config.train.run_dir or "")
    assert result.steps == config.train.steps, f"it ended after step {result.steps}"
    assert first >= least, f"step {first} is older than {least}, which was safe"
    assert end_digest(run_dir) == end, f"from step {first} it came to another end"
    litter = [path.name for path in run_dir.rglob("*.partial*")]
    assert not litter, f"{litter} stay"
    return first


def from_step(said: list[str]) -> int:
    """Return the step that a run went on from, by what it said."""
    for line in said:
        if found := re.search(r"resumed from step[ -](\d+)", line) or re.search(
            r"has (\d+) of \d+ steps", line
        ):
            return int(found[1])
    assert "starting with step 1" in said, said
    return 0


def moments(found: Recording, points: int, chance: random.Random) -> Iterator[tuple[int, str]]:
    """Yield moments of a crash and policies, half of the moments around syncs, renames and what else is no write."""
    last = max(op.ended for op in found.operations)
    lively = sorted({op.begun for op in found.operations if op.kind not in ("pwrite", "open")})
    for number in range(points):
        near = chance.random() < 0.5
        moment = chance.choice(lively) + chance.randint(-2, 2) if near else chance.randint(0, last + 1)
        yield moment, POLICIES[number % len(POLICIES)]


def examine(root: Path, config: Config, found: Recording, points: int, seed: int) -> dict[str, Any]:
    """Make crash states of the run directory and go on from each."""
    chance = random.Random(seed)
    steps: Counter[int] = Counter()
    failures: list[str] = []
    run_dir, crashed = Path(config.train.run_dir or ""), root / "crashed"
    calls, names = resolve(found.operations)
    top = names.directory(run_dir)
    for moment, policy in moments(found, points, chance):
        shutil.rmtree(crashed, ignore_errors=True)
        crashed.mkdir()
        Disk(calls, moment, keeping(policy, chance)).write_to(top, crashed)
        least = max((step for step, at in found.durable.items() if at <= moment), default=0)
        try:
            steps[went_on(in_dir(config, crashed), found.end, least)] += 1
        except (OutsizeError, AssertionError) as error:
            failures.append(f"crash at {moment}, unsynced: {policy}: {type(error).__name__}: {error}")
    return {
        "points": points,
        "operations": len(found.operations),
        "went_on_from": dict(sorted(steps.items())),
        "corrupt": len(failures),
        "failures": failures[:20],
    }


# --- on a file system that is cut off -------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(image: Path, at: Path) -> Iterator[None]:
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def cut_off(at: Path) -> None:
    """Let nothing more reach the disk below the file system at ``at``: what was not synced is gone."""
    descriptor = os.open(at, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
    finally:
        os.close(descriptor)


def waited_for(pid: int, seconds: float) -> int | None:
    """Return the status of a child once it has ended, None where it has not after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def run_child(config: Config, end: str | None) -> None:
    """Train; where ``end`` is given, to that end. What goes wrong on purpose is status 2, as of the command."""
    try:
        if end is None:
            train(config, announce=lambda line: print(line, flush=True))
        else:
            print("went on from", went_on(config, end, 0), flush=True)
    except OutsizeError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(2)


def cut_once(root: Path, kind: str, config: Config, end: str, after_s: float) -> tuple[str, str]:
    """Cut one run off after so many seconds, and go on with it; returns how the cut one ended, and what went wrong."""
    image, at, log = root / "image", root / "mounted", root / "log"
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True, stderr=subprocess.DEVNULL)
    there = in_dir(config, at / "run")
    with mounted(image, at):
        pid = forked(partial(run_child, there, None), log)
        status = waited_for(pid, after_s)
        if status is None:
            cut_off(at)
            status = waited_for(pid, HANG_S)
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        text = log.read_text()
        ended = (
            "hung" if status is None else {0: "at its end", 2: "an error of ours"}.get(status, "a traceback")
        )
    with mounted(image, at):
        pid = forked(partial(run_child, there, end), log)
        status = waited_for(pid, HANG_S)
        wrong = "" if status == 0 else log.read_text()[-2000:]
    if ended in ("hung", "a traceback"):
        wrong = f"{text[-2000:]}\n{wrong}"
    return ended, wrong


def examine_mounted(root: Path, kind: str, config: Config, points: int, seed: int) -> dict[str, Any]:
    """Cut runs off at random moments on a real file system of that kind, and go on with each."""
    chance, log = random.Random(seed), root / "log"
    whole = in_dir(config, root / "whole")
    began = time.monotonic()
    if waited_for(forked(partial(run_child, whole, None), log), HANG_S) != 0:
        raise SystemExit(log.read_text())
    run_s, end = time.monotonic() - began, end_digest(root / "whole")
    endings: Counter[str] = Counter()
    failures: list[str] = []
    for _ in range(points):
        ended, wrong = cut_once(root, kind, config, end, chance.uniform(0, 1.1 * run_s))
        endings[ended] += 1
        failures += [wrong] if wrong else []
    return {
        "points": points,
        "file_system": kind,
        "the_cut_run_ended_with": dict(endings),
        "corrupt": len(failures),
        "failures": failures[:20],
    }


# --- the command ----------------------------------------------------------------------------------------------


def examined(arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outsize-power-") as made:
        root = Path(made)
        config = config_of(root, home, arguments.steps, arguments.save_every, arguments.optimizer)
        points = arguments.points // len(arguments.homes)
        if arguments.mount:
            return examine_mounted(root, arguments.mount, config, points, arguments.seed)
        return examine(root, config, record(config, root), points, arguments.seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--optimizer", choices=tuple(OWN), default="adamw")
    parser.add_argument("--homes", nargs="+", choices=HOMES, default=HOMES)
    parser.add_argument("--mount", help="a file system, as mkfs calls it: ext4, xfs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    results = {}
    for home in arguments.homes:
        results[home] = examined(arguments, home)
        for failure in results[home]["failures"]:
            print(failure, flush=True)
    rows = [(home, r["points"], r["points"] - r["corrupt"], r["corrupt"]) for home, r in results.items()]
    common.print_table(("home", "cuts", "went on bit-equal", "did not"), rows, title="Loss of power")
    common.finish(
        {
            "bench": "power",
            "optimizer": arguments.optimizer,
            "machine": common.machine(),
            "steps": arguments.steps,
            "save_every": arguments.save_every,
            "by": arguments.mount or "replay",
            "homes": results,
            "cuts": sum(r["points"] for r in results.values()),
            "ok": not any(r["corrupt"] for r in results.values()),
            "s": time.perf_counter() - began,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
