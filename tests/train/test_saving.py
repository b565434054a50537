"""Checkpoints written beside training: exact, durable at every moment, limited in number, given up without harm."""

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outsize.checkpoint.checkpoint_state import STATE, latest, remove_litter, remove_old
from outsize.checkpoint.files import checkpoint_format, checkpoint_shards
from outsize.checkpoint.run_checkpoint import check_files
from outsize.checkpoint.saving import Saving
from outsize.config import Config
from outsize.errors import CheckpointError, StorageError
from outsize.planner.program.program import Kind
from outsize.runtime.engine import engine
from outsize.runtime.ops.checkpoint_ops import UnitAtRest
from outsize.session.job.prepare import prepare
from outsize.session.run_state import Position
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from patience import PATIENCE_S
from support import make_batches, make_run, read_weights, save, saver_of

ALONE = re.compile(r"STEP (\d+)(#0@t0)? waits for STORE \1")
HOMES = pytest.mark.parametrize("home", ["host", "disk"])


def in_dir(config: Config, run_dir: Path, **changes: Any) -> Config:
    train_config = config.train.model_copy(update={"run_dir": str(run_dir), **changes})
    return config.model_copy(update={"train": train_config})


def contents(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, and how often each parameter has been stepped."""
    found: dict[str, Any] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        tensors = load_file(path)
        found.update({f"{path.relative_to(checkpoint)}:{name}": t for name, t in tensors.items()})
    return found | {"updates": json.loads((checkpoint / STATE).read_text())["updates"]}


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    assert ours.pop("updates") == theirs.pop("updates")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@contextlib.contextmanager
def trainer_of(config: Config, directory: Path) -> Iterator[StreamedTrainer]:
    prepared = prepare(RunSpec.of(config, directory), lambda _: None)
    with StreamedTrainer(prepared, directory / "store") as trainer:
        trainer.fill()
        yield trainer


# --- beside training ----------------------------------------------------------------------------------------


@HOMES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_next_step_computes_while_a_unit_is_stored_and_steps_it_only_then(
    home: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first STORE is held back until nothing but it keeps the next step's optimizer from stepping its unit."""
    config = make_run(tmp_path, model={"dtype": dtype}, memory={"home": home, "tile_elements": 2048})
    train(in_dir(config, tmp_path / "first", steps=1))
    seen: list[str] = []
    write, waiting = Saving._write, dict
    held = threading.Event()

    def hold(self: Saving, resting: UnitAtRest, writer: Any) -> None:
        if self.step == 1 and not held.is_set():
            held.set()
            until = time.monotonic() + PATIENCE_S
            while not ALONE.fullmatch(str(waiting().get("host", ""))) and time.monotonic() < until:
                time.sleep(0.002)
            seen.append(str(waiting().get("host", "nothing")))
        write(self, resting, writer)

    begin = engine.Engine.begin

    def begun(self: engine.Engine, context: Any) -> Any:
        nonlocal waiting
        waiting = self.waiting
        return begin(self, context)

    with monkeypatch.context() as patched:
        patched.setattr(Saving, "_write", hold)
        patched.setattr(engine.Engine, "begin", begun)
        train(in_dir(config, tmp_path / "second", steps=2, save_every=1, save_total_limit=None))
    assert [bool(ALONE.fullmatch(text)) for text in seen] == [True], seen
    assert_same(tmp_path / "first/checkpoints/step-00000001", tmp_path / "second/checkpoints/step-00000001")
    train(in_dir(config, tmp_path / "plain", steps=2))
    assert_same(tmp_path / "plain/checkpoints/step-00000002", tmp_path / "second/checkpoints/step-00000002")


def test_experts_are_stored_one_by_one_from_either_home(tmp_path: Path) -> None:
    """Checkpoints of mixtures hold other tensors than the model; a plane in pieces is laid down and converted."""
    for home in ("host", "disk"):
        config = make_run(tmp_path, "mixtral", memory={"home": home})
        train(in_dir(config, tmp_path / home, steps=1))
    assert_same(tmp_path / "host/checkpoints/step-00000001", tmp_path / "disk/checkpoints/step-00000001")
    names = load_file(sorted((tmp_path / "disk/checkpoints/step-00000001").glob("model-*"))[1]).keys()
    assert any("experts.0." in name for name in names)
    assert not list((tmp_path / "disk/checkpoints/step-00000001").glob(".*"))


def test_a_disk_home_passes_through_a_buffer_that_was_planned(tmp_path: Path) -> None:
    config = make_run(tmp_path, memory={"home": "disk"})
    with trainer_of(config, tmp_path) as trainer:
        planned = trainer.prepared.plan.memory["device"]["checkpoint buffer"]
        sizes: list[int] = []

        def sink(resting: UnitAtRest) -> None:
            for plane in ("weights", "exp_avg"):
                sizes.extend(chunk.nbytes for _, (chunk,) in resting.chunks(plane))

        trainer.engine.wait(trainer.engine.store(sink).tasks)
        assert max(sizes) <= planned == trainer.prepared.plan.store_buffer_bytes
    with trainer_of(make_run(tmp_path), tmp_path) as trainer:
        assert trainer.prepared.plan.store_buffer_bytes == 0


def test_a_unit_that_takes_long_shows_that_it_gets_on(tmp_path: Path) -> None:
    """One STORE is one op, but a slow disk is not one that does not answer: every piece counts as progress."""
    config = make_run(tmp_path)
    with trainer_of(config, tmp_path) as trainer, saver_of(trainer, tmp_path / "run", config) as saver:
        num_stores = len(trainer.spec.units)
        before = trainer.engine.num_ended
        saver.finish(Position(1, 64, 0))
        tensors = sum(len(unit.tensors) for unit in trainer.spec.units)
        assert trainer.engine.num_ended - before >= num_stores + 3 * tensors  # of weights and two moments


# --- when one is due ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "commits", "expected"),
    [
        ({}, False, [1, 4, 7]),
        ({}, True, []),
        ({"save_minutes": 10}, True, [1, 2, 3, 4, 5, 6, 7]),
        ({"save_minutes": 0}, False, []),
        ({"save_minutes": 0, "save_every": 4}, False, [4]),
        ({"save_every": 4}, False, [1, 4, 7]),
    ],
)
def test_checkpoints_are_due_by_steps_and_by_the_clock(
    settings: dict[str, Any], commits: bool, expected: list[int], tmp_path: Path
) -> None:
    """Ten minutes a step; the home of a run without settings is saved after five minutes, then every half
    hour, unless it commits.
    """
    config = make_run(tmp_path, train=settings)
    now = 0.0
    started: list[int] = []

    class Engine:
        def store(self, saving: Saving) -> engine.StoreHandle:
            started.append(saving.step)
            saving.path = tmp_path
            return engine.StoreHandle(saving, [], [])

        def wait(self, tasks: list[Any]) -> None:
            pass

        def note_progress(self) -> None:
            pass

    class Trainer:
        engine = Engine()
        prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)

    saver = saver_of(
        Trainer(), tmp_path, config, commits=commits, state_of=lambda _: {"run": "x"}, clock=lambda: now
    )
    for step in range(1, 8):
        now += 600
        saver.between_steps(Position(step, 0, 0))
    assert started == expected


# --- durable at every moment --------------------------------------------------------------------------------


def test_at_every_operation_latest_names_a_checkpoint_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a name is given, to a directory or in ``latest``, only to what has been synced."""
    config = make_run(tmp_path, train={"save_total_limit": 1})
    run_dir = tmp_path / "run"
    synced: set[str] = set()
    events: list[str] = []

    def checked(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            newest = latest(run_dir)
            if newest is not None:
                check_files(newest)
            if name == "fsync":
                synced.add(os.readlink(f"/proc/self/fd/{args[0]}"))
            if name == "replace" and Path(args[0]).parent.name == "checkpoints":
                source = Path(args[0])
                events.append(f"{source.name} > {Path(args[1]).name}")
                if Path(args[1]).name in ("latest", "step-00000002"):
                    unsynced = {str(p) for p in (source, *source.rglob("*"))} - synced
                    assert not unsynced
            if name == "replace" and str(args[0]) in synced:
                synced.add(str(args[1]))
            return operation(*args, **kwargs)

        return around

    with trainer_of(config, tmp_path) as trainer:
        save(trainer, run_dir, Position(1, 1, 0, 1.0), config)
        with monkeypatch.context() as patched:
            for owner, name in (
                (os, "fsync"),
                (os, "replace"),
                (os, "rmdir"),
                (os, "unlink"),
                (checkpoint_format, "_write_all"),
            ):
                patched.setattr(owner, name, checked(name, getattr(owner, name)))
            save(trainer, run_dir, Position(2, 2, 0, 1.0), config)
    assert events == [
        "step-00000002.partial > step-00000002",
        "latest.partial > latest",
        "step-00000001 > step-00000001.partial-removed",
    ]
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"latest", "step-00000002"}


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Let the ``count``-th write to a file of tensors fail."""
    write_all, left = checkpoint_format._write_all, [count]

    def failing(descriptor: int, data: memoryview, offset: int) -> int:
        left[0] -= 1
        if not left[0]:
            raise error
        return write_all(descriptor, data, offset)

    monkeypatch.setattr(checkpoint_format, "_write_all", failing)


def test_one_that_cannot_be_written_is_given_up_and_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, train={"save_every": 1})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said: list[str] = []
    with trainer_of(config, tmp_path) as trainer:
        saver = saver_of(trainer, tmp_path / "run", config, announce=said.append)
        with monkeypatch.context() as patched:
            fail_at(patched, 9, full)
            saver.between_steps(Position(1, 1, 0, 1.0))
            saver.between_steps(Position(2, 1, 0, 1.0))
        saver.finish(Position(3, 1, 0, 1.0))
        assert saver.num_failed == 1
        assert "step-00000001: No space left on device; free some space" in said[0]
        assert "the run goes on, there is no checkpoint yet" in said[0]
        with monkeypatch.context() as patched:
            fail_at(patched, 30, full)
            with pytest.raises(StorageError, match=r"step-00000004: No space left on device"):
                saver.finish(Position(4, 1, 0, 1.0))
        newest = latest(tmp_path / "run")
        assert newest is not None
        assert newest.name == "step-00000003"
        check_files(newest)
    names = {path.name for path in newest.parent.iterdir()}
    assert names == {"latest", "step-00000002", "step-00000003"}


@HOMES
def test_a_last_one_that_cannot_be_written_fails_the_run_though_it_was_tried_before(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is due after the last step, and is told; then the run ends with it, and does not take it for saved."""
    begin = Saving._begin

    def begin_on_a_disk(self: Saving) -> Any:
        if self.step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return begin(self)

    said: list[str] = []
    monkeypatch.setattr(Saving, "_begin", begin_on_a_disk)
    with pytest.raises(StorageError, match="step-00000002: No space left on device; free some space"):
        train(
            make_run(tmp_path, train={"steps": 2, "save_every": 1}, memory={"home": home}),
            announce=said.append,
        )
    assert any("the run goes on, the newest checkpoint is still step-00000001" in line for line in said)


def test_an_error_beside_one_that_is_under_way_ends_the_run_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first unit is held back until somebody waits for it."""
    config = make_run(tmp_path, train={"save_every": 1})
    waited_for, write = threading.Event(), Saving._write

    def hold(*args: Any) -> None:
        assert waited_for.wait(PATIENCE_S)
        write(*args)

    monkeypatch.setattr(Saving, "_write", hold)
    said: list[str] = []
    with trainer_of(config, tmp_path) as trainer:
        wait = trainer.engine.wait
        monkeypatch.setattr(trainer.engine, "wait", lambda tasks: waited_for.set() or wait(tasks))
        saver = saver_of(trainer, tmp_path / "run", config, announce=said.append)
        with contextlib.suppress(ZeroDivisionError), saver:
            saver.between_steps(Position(1, 1, 0, 1.0))
            raise ZeroDivisionError
        waited_for.set()
    assert said == [f"saved {tmp_path / 'run/checkpoints/step-00000001'}"]


def test_one_that_cannot_be_read_back_is_given_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path)

    def unreadable(*_: Any) -> None:
        raise CheckpointError("planted")

    with trainer_of(config, tmp_path) as trainer:
        saver = saver_of(trainer, tmp_path / "run", config)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_shards, "CheckpointReader", unreadable)
            with pytest.raises(StorageError, match="step-00000001: planted"):
                saver.finish(Position(1, 1, 0, 1.0))
        saver.finish(Position(2, 1, 0, 1.0))
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {"latest", "step-00000002"}


def test_a_home_that_cannot_be_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no matter of the checkpoint: the state itself is damaged."""
    config = make_run(tmp_path, memory={"home": "disk"})
    with trainer_of(config, tmp_path) as trainer:

        def unreadable(*_: Any) -> None:
            raise StorageError("planted")

        monkeypatch.setattr(trainer.home, "read_planes", unreadable)
        with pytest.raises(StorageError, match="planted"):
            save(trainer, tmp_path / "run", Position(1, 1, 0), config)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_saving_that_is_cancelled_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path)
    begin = Saving._begin

    def cancelled(self: Saving) -> Any:
        self.cancelled = True
        return begin(self)

    monkeypatch.setattr(Saving, "_begin", cancelled)
    with trainer_of(config, tmp_path) as trainer:
        saver = saver_of(trainer, tmp_path / "run", config)
        saver.finish(Position(1, 1, 0))
    assert latest(tmp_path / "run") is None
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- how many are kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "kept"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (None, [1, 2, 3, 4])])
def test_the_newest_are_kept(limit: int | None, kept: list[int], tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"save_total_limit": limit})
    with trainer_of(config, tmp_path) as trainer:
        for step in (1, 2, 3, 4):
            save(trainer, tmp_path / "run", Position(step, 1, 0), config)
    found = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert found == ["latest", *(f"step-{step:08d}" for step in kept)]


def make_checkpoint(directory: Path, run: str = "mine") -> Path:
    directory.mkdir(parents=True)
    (directory / STATE).write_text(json.dumps({"run": run}))
    return directory


def test_what_the_run_has_not_made_is_not_removed(tmp_path: Path) -> None:
    newest = make_checkpoint(tmp_path / "step-00000009")
    made = make_checkpoint(tmp_path / "step-00000003")
    beyond = make_checkpoint(tmp_path / "step-00000012")  # never became the latest
    kept = [
        make_checkpoint(tmp_path / "step-00000001", run="another"),
        make_checkpoint(tmp_path / "step-00000003-best"),
        make_checkpoint(tmp_path / "mine" / "step-00000001"),
        tmp_path / "step-00000002",
        tmp_path / "step-00000004",
        tmp_path / "latest",
    ]
    (tmp_path / "step-00000002").symlink_to(kept[2])
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "latest").write_text("step-00000009\n")
    remove_old(tmp_path, newest, 1, "mine")
    assert newest.exists()
    assert all(path.exists() for path in kept)
    assert not made.exists()
    assert not beyond.exists()


def test_litter_is_what_a_killed_process_leaves_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step-00000002.partial", "step-00000001.partial-removed", "my.partial", "step-1.partial"):
        make_checkpoint(tmp_path / name)
    (tmp_path / "latest.partial").write_text("step-0")
    (tmp_path / "step-00000007.partial").symlink_to(tmp_path / "my.partial")
    remove_litter(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"my.partial", "step-1.partial", "step-00000007.partial"}
    assert (tmp_path / "my.partial" / STATE).exists()


# --- what has not changed -----------------------------------------------------------------------------------


def test_frozen_units_are_linked_not_written_again(tmp_path: Path) -> None:
    config = make_run(tmp_path, model={"freeze": ["model.layers.0.*"]}, train={"save_total_limit": 1})
    run_dir = tmp_path / "run"
    with trainer_of(config, tmp_path) as trainer:
        first = save(trainer, run_dir, Position(1, 1, 0), config)
        before = {path.name: path.stat().st_ino for path in first.glob("model-*")}
        second = save(trainer, run_dir, Position(2, 1, 0), config)
        weights = read_weights(trainer)
    linked = {path.name for path in second.glob("model-*") if before[path.name] == path.stat().st_ino}
    assert linked == {"model-00002-of-00006.safetensors"}
    assert not first.exists()
    check_files(second)
    named = dict(AutoModelForCausalLM.from_pretrained(second).named_parameters())
    assert all(torch.equal(named[name], weight) for name, weight in weights.items())


# --- flipped bits -------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = make_run(tmp_path, model={"dtype": "bf16"})
    with trainer_of(config, tmp_path) as trainer:
        for _ in trainer.steps(make_batches("llama", num_sequences=4, num_steps=1)):
            pass
        trainer.settle()
        saved = save(trainer, tmp_path / "run", Position(1, 1, 0, 1.0), config)
    check_files(saved)
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        good = path.read_bytes()
        for position in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[position] ^= 1 << (position % 8)
            path.write_bytes(bad)
            if path.name == STATE:
                with pytest.raises(CheckpointError, match=STATE):
                    check_files(saved)
                continue
            with pytest.raises(CheckpointError, match=f"{path.name} is damaged") as caught:
                check_files(saved)
            if path.name.startswith("model-00002"):
                assert "(unit model.layers.0)" in str(caught.value)
        path.write_bytes(good)
    check_files(saved)


@pytest.mark.parametrize(
    ("name", "device"), [("gpt2", "cpu"), ("gpt2", "emulated:2"), ("bloom", "emulated:2")]
)
def test_tied_weights_are_saved_whoever_computes(name: str, device: str, tmp_path: Path) -> None:
    result = train(make_run(tmp_path, name, train={"steps": 1}, memory={"device": device}))
    AutoModelForCausalLM.from_pretrained(result.export_dir)


def test_tied_weights_are_saved_while_one_of_their_places_is_being_bound(tmp_path: Path) -> None:
    config = make_run(tmp_path, "gpt2")
    with trainer_of(config, tmp_path) as trainer:
        model = trainer.prepared.split.model
        model.lm_head._parameters["weight"] = torch.nn.Parameter(model.lm_head.weight.detach())
        save(trainer, tmp_path / "run", Position(1, 1, 0), config)


def test_a_checkpoint_can_be_taken_elsewhere(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with trainer_of(config, tmp_path) as trainer:
        saved = save(trainer, tmp_path / "run", Position(1, 1, 0), config)
    check_files(Path(shutil.move(saved, tmp_path / "elsewhere")))


def test_a_program_of_stores_holds_every_unit_with_weights_once(tmp_path: Path) -> None:
    with trainer_of(make_run(tmp_path, "gpt2"), tmp_path) as trainer:
        stored: list[str] = []
        tasks = trainer.engine.store(lambda resting: stored.append(resting.unit.name)).tasks
        trainer.engine.wait(tasks)
    assert sorted(stored) == sorted(unit.name for unit in trainer.spec.units if unit.tensors)
    assert {task.op.kind for task in tasks} == {Kind.STORE}
    assert {task.lane for task in tasks} == {"store"}
