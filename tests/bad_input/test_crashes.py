"""A run that was cut off goes on from the home it left, and ends where an uninterrupted one ends."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bad_input.world import World, make_model, run_well
from outsize.checkpoint.saver import Saver
from outsize.errors import ConfigError, InfeasiblePlanError, StorageError
from outsize.planner.program.program import Kind
from outsize.runtime.engine import engine
from outsize.session.run_state import Position
from outsize.training.forecast import plan
from outsize.training.run import train

STEPS = {"steps": 5}
AUTO = {"train": {"resume": "auto", **STEPS}}


class Cut(BaseException):
    """The process would be gone here."""


@pytest.fixture
def cut(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs until an op of a step comes up, as if the process ended there, and returns what was announced."""

    def run_until(kind: Kind, step: int, **sections: Any) -> list[str]:
        said: list[str] = []
        handle = engine.run_op

        def watched(table: Any, op: Any, context: Any) -> None:
            if op.kind is kind and context.number == step - 1:
                raise Cut
            handle(table, op, context)

        sections["train"] = {**STEPS, **sections.get("train", {})}
        with monkeypatch.context() as patched:
            patched.setattr(engine, "run_op", watched)
            with pytest.raises(Cut):
                train(world.config(**sections), announce=said.append)
        return said

    return run_until


def go_on(world: World, **sections: Any) -> list[str]:
    said: list[str] = []
    sections = {**sections, "train": {**AUTO["train"], **sections.get("train", {})}}
    assert train(world.config(**sections), announce=said.append).steps == 5
    return said


def check_end(world: World) -> None:
    run_well(world, "through", train=STEPS)
    assert world.digest() == world.digest("through")


def home(world: World) -> Path:
    return world.root / "run/store/home.bin"


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.CLIP, Kind.STEP, Kind.COMMIT], ids=str)
def test_a_run_goes_on_from_its_last_committed_step(world: World, cut: Any, kind: Kind) -> None:
    cut(kind, 4)
    assert not (world.root / "run/checkpoints").exists()
    said = go_on(world)
    # The forward of a step begins while the optimizer of the one before still steps: then that one is repeated.
    steps = (2, 3) if kind is Kind.FORWARD else (3,)
    assert any(f"resumed from step {step} in {home(world)}" in said for step in steps)
    check_end(world)


def test_before_the_first_commit_there_is_nothing_to_go_on_from(world: World, cut: Any) -> None:
    cut(Kind.COMMIT, 1)
    assert not home(world).exists()
    assert "starting with step 1" in go_on(world)
    check_end(world)


@pytest.fixture
def saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is complete before the next step begins, so that a cut in that step comes after it."""
    start = Saver._start

    def start_and_wait(self: Saver, position: Position) -> None:
        start(self, position)
        self._report(self._collect())

    monkeypatch.setattr(Saver, "_start", start_and_wait)


@pytest.mark.usefixtures("saved_at_once")
def test_the_newer_of_home_and_checkpoint_is_taken(world: World, cut: Any) -> None:
    every_two = {"save_every": 2}
    cut(Kind.CLIP, 4, train=every_two)
    assert (world.root / "run/checkpoints/latest").read_text() == "step-00000002\n"
    old = world.root / "old.bin"
    shutil.copy(home(world), old)
    cut(Kind.CLIP, 5, train={"resume": "auto", **every_two})
    assert (world.root / "run/checkpoints/latest").read_text() == "step-00000004\n"
    shutil.copy(old, home(world))
    said = go_on(world)
    assert any("home.bin stands at step 3, and step-00000004 is newer" in line for line in said)
    assert "resumed from step-00000004" in said
    check_end(world)


def test_what_was_committed_but_not_saved_is_saved(world: World, cut: Any, monkeypatch: Any) -> None:
    """The last step was committed and the process was gone before the last checkpoint."""

    def gone(*_: Any) -> None:
        raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(Saver, "finish", gone)
        with pytest.raises(Cut):
            train(world.config(train=STEPS))
    assert f"resumed from step 5 in {home(world)}" in go_on(world)
    check_end(world)


def test_at_its_end_a_run_keeps_the_checkpoint_and_removes_the_home(world: World) -> None:
    said: list[str] = []
    train(world.config(), announce=said.append)
    assert any(line.startswith(f"removed {home(world)} (") for line in said)
    assert not home(world).parent.exists()


OTHER_MEMORY = {
    "one slot, small tiles": {"slots": 1, "tile_elements": 2048},
    "staged": {"device": "emulated:1"},
    "on the host": {"home": "host"},
    "in place": {"commits": "none"},
}


@pytest.mark.parametrize("memory", OTHER_MEMORY.values(), ids=OTHER_MEMORY.keys())
def test_a_run_goes_on_with_other_memory(world: World, cut: Any, memory: dict[str, Any]) -> None:
    cut(Kind.STEP, 4, memory={"tile_elements": 6144})
    said = go_on(world, memory=memory)
    assert any(line.startswith("resumed from step 3 in") for line in said)
    check_end(world)
    assert not home(world).exists()


# --- homes that are not what they should be -------------------------------------------------------------------


def flip(path: Path, first: float, last: float = 1.0) -> None:
    """Change a bit in every 512 bytes between two places, as shares of the file."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(int(size * first), int(size * last), 512):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 16]))


@pytest.mark.usefixtures("saved_at_once")
def test_a_damaged_home_falls_back_to_the_checkpoint(world: World, cut: Any) -> None:
    cut(Kind.STEP, 5, train={"save_every": 2})
    (world.root / "run/checkpoints").rename(world.root / "aside")
    flip(home(world), 0.5, 0.6)
    with pytest.raises(
        StorageError, match=r"home.bin is damaged: unit .*, plane .*step 4, the last committed"
    ):
        train(world.config(**AUTO))
    assert home(world).exists()
    (world.root / "aside").rename(world.root / "run/checkpoints")
    said = go_on(world)
    assert any("this run goes back to step-00000004" in line for line in said)
    check_end(world)


def test_a_flipped_bit_in_a_run_stops_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, flipped = engine.run_op, threading.Event()

    def watched(table: Any, op: Any, context: Any) -> None:
        if op.kind is Kind.FORWARD and context.number == 2 and not flipped.is_set():
            flipped.set()  # a second time would undo the first
            flip(home(world), 0.1)
        handle(table, op, context)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "run_op", watched)
        with pytest.raises(StorageError, match=r"home.bin is damaged: unit .*, plane "):
            train(world.config(train=STEPS))
    home(world).unlink()


def test_a_truncated_home_is_announced_and_left(world: World, cut: Any) -> None:
    cut(Kind.STEP, 3)
    home(world).write_bytes(home(world).read_bytes()[:-4096])
    assert any("home.bin is truncated; going on without it" in line for line in go_on(world))
    check_end(world)


def test_a_home_without_a_whole_record_is_announced_and_left(world: World, cut: Any) -> None:
    cut(Kind.STEP, 3)
    flip(home(world), 0.0, 0.05)
    assert any("commit record" in line and "going on without it" in line for line in go_on(world))
    check_end(world)


OTHERS: dict[str, tuple[Callable[[World], dict[str, Any]], type[Exception], str]] = {
    "other model": (
        lambda world: {"model": {"path": str(make_model(world.root / "other", "qwen2"))}},
        ConfigError,
        "model.path=",
    ),
    "seed": (lambda _: {"train": {"seed": 6, **AUTO["train"]}}, ConfigError, "train.seed=5, not 6"),
    "frozen": (
        lambda _: {"model": {"freeze": ("*embed_tokens*",)}, **AUTO},
        StorageError,
        "other parameters, or with others frozen",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_home_of_another_run_is_not_taken(world: World, cut: Any, case: str) -> None:
    change, kind, match = OTHERS[case]
    cut(Kind.STEP, 3)
    before = home(world).read_bytes()
    with pytest.raises(kind, match=match):
        train(world.config(**{**AUTO, **change(world)}))
    assert home(world).read_bytes() == before
    home(world).unlink()


def test_runs_can_share_a_place_for_their_stores(world: World, cut: Any) -> None:
    memory = {"store_dir": str(world.root / "fast")}
    cut(Kind.STEP, 3, memory=memory)
    (left,) = (world.root / "fast").iterdir()
    assert left.name.startswith("run-")
    run_well(world, "second", memory=memory)
    assert list((world.root / "fast").iterdir()) == [left]
    assert f"resumed from step 2 in {left}" in go_on(world, memory=memory)
    check_end(world)


def test_a_run_that_was_cut_off_is_not_overwritten(world: World, cut: Any) -> None:
    cut(Kind.STEP, 3)
    (world.root / "run/heartbeat.jsonl").unlink()
    with pytest.raises(ConfigError, match="holds a run already"):
        train(world.config())
    home(world).unlink()


# --- the plan -------------------------------------------------------------------------------------------------


def test_the_plan_knows_what_a_home_that_commits_takes(world: World) -> None:
    twice, once = plan(world.config()), plan(world.config(memory={"commits": "none"}))
    assert Kind.COMMIT in {op.kind for op in twice.program}
    assert Kind.COMMIT not in {op.kind for op in once.program}
    needed = twice.memory["disk"]["home"]
    assert needed / once.memory["disk"]["home"] > 1.7
    with pytest.raises(InfeasiblePlanError, match=r"memory\.commits=none") as caught:
        train(world.config(memory={"disk_memory": needed - 1}))
    assert caught.value.short_by.keys() == {"disk"}
    run_well(world, memory={"disk_memory": needed - 1, "commits": "none"})
    enough = needed - 1 + caught.value.short_by["disk"]
    run_well(world, "second", memory={"disk_memory": enough})
    assert world.digest() == world.digest("second")


def test_the_file_is_as_large_as_the_plan_says(world: World, cut: Any) -> None:
    cut(Kind.STEP, 3)
    assert home(world).stat().st_size == plan(world.config()).memory["disk"]["home"]
    home(world).unlink()


# --- files of a run that a loss of power has left empty --------------------------------------------------------


@pytest.mark.parametrize("content", ["", "\0" * 200])
@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "run.json", "machine.json", "prediction.json"])
def test_a_broken_file_of_the_run_counts_as_absent(name: str, content: str, world: World, cut: Any) -> None:
    cut(Kind.STEP, 4)
    (world.root / "run" / name).write_text(content)
    said = go_on(world)
    assert f"resumed from step 3 in {home(world)}" in said
    broken = [line for line in said if "counts as none" in line]
    assert [name in line for line in broken] == ([True] if name == "config.yaml" else [])
    check_end(world)


def test_a_run_whose_configuration_is_gone_keeps_the_microbatches_that_it_had(world: World, cut: Any) -> None:
    cut(Kind.STEP, 4, train={"microbatches": 4})
    (world.root / "run/config.yaml").write_text("")
    go_on(world, train={"microbatches": None})
    run_well(world, "through", train={**STEPS, "microbatches": 4})
    assert world.digest() == world.digest("through")


def test_a_setting_that_moves_no_byte_may_change_and_is_said(world: World, cut: Any) -> None:
    cut(Kind.STEP, 4)
    said = go_on(world, optimizer={"layer_decay": 0.9})
    assert f"resumed from step 3 in {home(world)}" in said
    assert "note: the run goes on with optimizer.layer_decay=0.9, and had 1.0" in said


def test_a_home_with_other_weights_frozen_is_refused_by_the_name_of_the_setting(
    world: World, cut: Any
) -> None:
    cut(Kind.STEP, 4)
    freezing = world.config(model={"freeze": ["*layers*"]}, train={"resume": "auto", **STEPS})
    with pytest.raises(StorageError, match=r"goes on with model\.freeze=.*, and had nothing; resume with"):
        train(freezing)
