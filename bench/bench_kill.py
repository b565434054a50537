"""Does a run survive `kill -9` at any moment? Every kill must be followed by a resume that ends bit for bit the same.

One process imports everything and computes nothing. It forks children that train and kills each at a random moment:
while the model is measured or the home filled, anywhere in the steps, inside a commit, inside a checkpoint, or while
the home is removed. The next child goes on with the same run directory. A child that reaches the end is compared with
an uninterrupted run: weights, optimizer state, and the loss of every step. Then the next run begins.

    python bench/bench_kill.py                      # 200 kills, home on disk
    python bench/bench_kill.py --home host          # the same with checkpoints every two steps
"""

import argparse
import hashlib
import json
import math
import mmap
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child must not miss the threads of its parent
sys.path.insert(0, str(Path(__file__).parent))
import common

import outsize.checkpoint.home_file
import outsize.training.run
from outsize.checkpoint import run_checkpoint
from outsize.checkpoint.saving import Saving
from outsize.config import Config, parse_config
from outsize.session.stream import StreamedTrainer
from outsize.storage.committed import CommittedHome
from outsize.training.run import train

SEQ_LEN, VOCABULARY = 16, 97
# Where a child is, as the parent reads it from memory that they share.
PHASES = ("start", "fill or restore", "steps", "commit", "checkpoint", "end")
SAVE_EVERY = {"disk": 0, "host": 2}


@dataclass
class Run:
    """One run directory and what happened to it."""

    directory: Path
    kills: int = 0
    known: int = 0
    """Steps that its heartbeat knows."""


@dataclass
class Tally:
    """What all runs came to."""

    phases: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    resumes: int = 0
    ended: int = 0
    equal: int = 0
    most_repeated: int = 0
    repeated: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def config_of(root: Path, name: str, home: str, steps: int, optimizer: str = "adamw") -> Config:
    return parse_config(
        {
            "model": {"path": str(root / "model"), "dtype": "fp32"},
            "data": {"path": str(root / "tokens.npy"), "seq_len": SEQ_LEN},
            "train": {
                "steps": steps,
                "tokens_per_step": 4 * SEQ_LEN,
                "microbatches": 2,
                "round_microbatches": 1,
                "run_dir": str(root / name),
                "resume": "auto",
                "save_every": SAVE_EVERY[home],
            },
            "optimizer": {"name": optimizer, "lr": 1e-3},
            "memory": {"device": "cpu", "home": home, "device_memory": "64MiB", "host_memory": "64MiB"},
        }
    )


def write_model(root: Path) -> None:
    """Write a Llama of four blocks, a hundred thousand parameters, and random tokens."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.float32).save_pretrained(
        root / "model"
    )
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 20_000, dtype=np.int32)
    np.save(root / "tokens.npy", ids)


def forked(work: Callable[[], object], log: Path) -> int:
    """Start ``work`` in a child; return its process id. What it says and how it fails goes to ``log``."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def mark_phases(phase: mmap.mmap) -> None:
    """Have this process say in ``phase`` what it is doing."""

    def marking(number: int, function: Callable[..., Any], after: int | None = 2) -> Callable[..., Any]:
        def marked(*arguments: Any, **named: Any) -> Any:
            phase[0] = number
            try:
                return function(*arguments, **named)
            finally:
                if after is not None:
                    phase[0] = after

        return marked

    StreamedTrainer.fill = marking(1, StreamedTrainer.fill)  # type: ignore[method-assign]
    StreamedTrainer.resume = marking(1, StreamedTrainer.resume)  # type: ignore[method-assign]
    run_checkpoint.restore = marking(1, run_checkpoint.restore)
    CommittedHome.commit = marking(3, CommittedHome.commit)  # type: ignore[method-assign]
    Saving.__call__ = marking(4, Saving.__call__)  # type: ignore[method-assign]
    outsize.training.loop.remove_home = marking(5, outsize.checkpoint.home_file.remove_home, None)


def reference_child(config: Config, phase: mmap.mmap, times: Path) -> None:
    """Train without an end, and write what each phase took and which modules were imported."""
    before = set(sys.modules)
    began, over = time.monotonic(), threading.Event()
    seconds: Counter[int] = Counter()

    def watch() -> None:
        last = began
        while not over.wait(0.0005):
            now = time.monotonic()
            seconds[phase[0]] += now - last
            last = now

    phase[0] = 0
    mark_phases(phase)
    watcher = threading.Thread(target=watch)
    watcher.start()
    train(config, announce=lambda line: print(line, flush=True))
    over.set()
    watcher.join()
    found = {"seconds": seconds, "modules": sorted(set(sys.modules) - before)}
    times.write_text(json.dumps(found))


def must(work: Callable[[], object], log: Path) -> None:
    """Run ``work`` in a child that must succeed."""
    if wait_or_kill(forked(work, log)) != 0:
        raise SystemExit(log.read_text())


def child(config: Config, phase: mmap.mmap) -> None:
    mark_phases(phase)
    train(config, announce=lambda line: print(line, flush=True))


def known_steps(run_dir: Path) -> int:
    """Steps that a heartbeat knows; its last line may be cut off."""
    found = 0
    try:
        for line in (run_dir / "heartbeat.jsonl").read_text().splitlines():
            found = max(found, json.loads(line)["step"])
    except (OSError, ValueError):
        pass
    return found


def digest(run_dir: Path) -> dict[str, str]:
    """Hash what a finished run saved, and the last line of its heartbeat for each step."""
    saved = run_dir / "checkpoints" / (run_dir / "checkpoints/latest").read_text().strip()
    found = {
        str(path.relative_to(saved)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in saved.rglob("*.safetensors")
    }
    for line in (run_dir / "heartbeat.jsonl").read_text().splitlines():
        try:
            beat = json.loads(line)
        except ValueError:  # cut off by a kill, and the next one begins behind it
            continue
        found[f"loss {beat['step']}"] = repr(beat["loss"])
    return found


def is_same(found: dict[str, str], expected: dict[str, str], kills: int) -> bool:
    """Whether a run saved the same bits and every loss that it told is the same.

    A step is told once its last op has ended, and a home on disk has committed it by then: a kill in between costs the
    line of that step, one at most for each kill.
    """
    untold = expected.keys() - found.keys()
    return (
        found == {name: value for name, value in expected.items() if name not in untold}
        and all(name.startswith("loss ") for name in untold)
        and len(untold) <= kills
    )


def resumed_step(log: Path) -> int | None:
    """The step that a child began behind; None where it did not come that far."""
    for line in log.read_text().splitlines():
        if line == "starting with step 1":
            return 0
        if line.startswith("resumed from step"):
            words = line.split()
            return int(words[3] if words[2] == "step" else words[2].removeprefix("step-"))
    return None


@dataclass(frozen=True)
class Aim:
    """When to kill: so many seconds after a phase was seen for the ``visit``-th time."""

    phase: int = 0
    visit: int = 1
    delay_s: float = math.inf


TO_THE_END = Aim()
# For a phase so short that the reference run was not seen in it.
UNSEEN_S = 0.02


def choose(chance: random.Random, home: str, steps: int, times: Mapping[int, float]) -> Aim:
    """Draw a moment. ``times`` is what phases took in the reference run, in seconds."""
    kinds = {"start": 2, "fill": 2, "steps": 6, "commit": 4, "checkpoint": 4, "end": 1}
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    if kind == "start":
        return Aim(0, 1, chance.uniform(0, times.get(0, UNSEEN_S)))
    if kind == "fill":
        return Aim(1, 1, chance.uniform(0, 1.3 * times.get(1, UNSEEN_S)))
    if kind == "end" and home == "disk":
        return Aim(5, 1, chance.uniform(0, times.get(5, UNSEEN_S)))
    if kind == "checkpoint":
        return Aim(
            4,
            chance.randint(1, 2) if SAVE_EVERY[home] else 1,
            chance.uniform(0, 1.3 * times.get(4, UNSEEN_S)),
        )
    if kind == "commit" and home == "disk":
        return Aim(3, chance.randint(1, steps // 2), chance.uniform(0, 1.3 * times.get(3, UNSEEN_S) / steps))
    return Aim(2, 1, chance.uniform(0, times.get(2, UNSEEN_S) + times.get(3, 0)))


def wait_or_kill(pid: int, aim: Aim = TO_THE_END, phase: mmap.mmap | None = None) -> int | None:
    """Return the exit status of a child that ended by itself, None after killing it where ``aim`` says."""
    visits, before, deadline = 0, -1, math.inf
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = phase[0] if phase is not None else 0
        visits += now == aim.phase and now != before
        before = now
        if deadline == math.inf and visits == aim.visit:
            deadline = time.monotonic() + aim.delay_s
        if aim.phase < 2:
            time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGKILL else code


def one_child(root: Path, run: Run, home: str, steps: int, aim: Aim, phase: mmap.mmap, tally: Tally) -> bool:
    """Let a child go on with a run until it is killed; return whether the run is over."""
    config, log = config_of(root, run.directory.name, home, steps), root / "child.log"
    phase[0] = 0
    code = wait_or_kill(forked(lambda: child(config, phase), log), aim, phase)
    began = resumed_step(log)
    if run.kills and began is not None:
        tally.resumes += 1
        repeated = max(run.known - began, 0)
        tally.repeated[repeated] += 1
        tally.most_repeated = max(tally.most_repeated, repeated)
    run.known = max(run.known, known_steps(run.directory))
    if code is None:
        run.kills += 1
        tally.kills += 1
        tally.phases[PHASES[phase[0]]] += 1
        return False
    if code:
        tally.failures.append(f"{run.directory.name} after {run.kills} kills:\n{log.read_text()[-3000:]}")
    return True


def survive(root: Path, home: str, steps: int, kills: int, seed: int) -> dict[str, Any]:
    """Kill until it is enough; return the tally."""
    phase = mmap.mmap(-1, 1)
    tally, chance = Tally(), random.Random(seed)
    times = root / "times.json"
    # After the first, this process imports what children would have to.
    for name in ("warm", "reference"):
        work = partial(reference_child, config_of(root, name, home, steps), phase, times)
        must(work, root / "child.log")
        common.import_all(json.loads(times.read_text())["modules"])
    spent = {int(number): seconds for number, seconds in json.loads(times.read_text())["seconds"].items()}
    expected = digest(root / "reference")
    run = Run(root / "run-0")
    number = 0
    over = True
    while tally.kills < kills or not over:
        # The last run goes to its end.
        aim = choose(chance, home, steps, spent) if tally.kills < kills else TO_THE_END
        over = one_child(root, run, home, steps, aim, phase, tally)
        if over:
            tally.ended += 1
            if not tally.failures:
                same = is_same(digest(run.directory), expected, run.kills)
                tally.equal += same
                if not same:
                    tally.failures.append(f"{run.directory.name} ended otherwise after {run.kills} kills")
            number += 1
            run = Run(root / f"run-{number}")
        if tally.failures:
            break
    return {
        "home": home,
        "steps": steps,
        "kills": tally.kills,
        "phases": dict(tally.phases),
        "resumes": tally.resumes,
        "runs": tally.ended,
        "runs_equal": tally.equal,
        "most_steps_repeated": tally.most_repeated,
        "repeated": dict(sorted(tally.repeated.items())),
        "failures": tally.failures,
        "seconds_of_a_run": sum(spent.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", choices=("disk", "host"), default="disk")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where runs are kept; must be empty")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outsize-kill-") as made:
        root = arguments.directory or Path(made)
        must(lambda: write_model(root), root / "child.log")
        result = survive(root, arguments.home, arguments.steps, arguments.kills, arguments.seed)
    limit = max(1, SAVE_EVERY[arguments.home] + 1)
    rows = [(name, result["phases"].get(name, 0)) for name in PHASES]
    common.print_table(("killed during", "times"), rows, title=f"kill -9, home on {arguments.home}")
    for failure in result["failures"]:
        print(failure)
    common.finish(
        {
            "bench": "kill",
            "machine": common.machine(),
            **result,
            "ok": not result["failures"]
            and result["runs_equal"] == result["runs"]
            and result["most_steps_repeated"] <= limit,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
