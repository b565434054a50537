"""Going on with a run: the same run, to the same end; anything else is refused and changes nothing."""

import json
import math
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bad_input.world import World, make_model, names_below, run_well
from outsize.checkpoint.checkpoint_state import latest, render_state
from outsize.errors import CheckpointError, ConfigError
from outsize.training.run import train

RESUME = {"resume": "auto"}


def run_to(world: World, steps: int) -> None:
    """Train the first steps of a run whose learning rate does not depend on its length."""
    run_well(world, train={"steps": steps, **RESUME}, optimizer={"schedule": "constant"})


def test_a_run_goes_on_from_where_it_ended(world: World) -> None:
    """A directory without a checkpoint is where a run with resume=auto begins."""
    for steps in (1, 2, 5):
        run_to(world, steps)
    run_well(world, "through", train={"steps": 5}, optimizer={"schedule": "constant"})
    assert world.digest() == world.digest("through")


@pytest.mark.parametrize("wanted", [3, 2], ids=["as many steps", "fewer steps"])
def test_nothing_left_to_do_says_so_and_returns_the_last_state(world: World, wanted: int) -> None:
    last = run_well(world)
    files = {path: path.stat().st_mtime_ns for path in (world.root / "run").rglob("*") if path.is_file()}
    config = world.config(train={"steps": wanted, **RESUME})
    said: list[str] = []
    result = train(config, announce=said.append)
    assert (result.steps, result.loss, result.export_dir) == (3, last.loss, last.export_dir)
    assert any(f"has 3 of {wanted} steps: nothing is left to do" in line for line in said)
    outcome = world.command(config)
    assert (outcome.status, outcome.result["steps"], outcome.result["loss"]) == (0, 3, last.loss)
    assert "nothing is left to do" in outcome.err
    assert {
        path: path.stat().st_mtime_ns for path in (world.root / "run").rglob("*") if path.is_file()
    } == files


# --- another run --------------------------------------------------------------------------------------------


def other_model(world: World) -> dict[str, Any]:
    return {"model": {"path": str(make_model(world.root / "other", "qwen2"))}}


def same_model_elsewhere(world: World) -> dict[str, Any]:
    return {"model": {"path": str(world.own_model())}}


OTHERS: dict[str, tuple[Callable[[World], dict[str, Any]], str]] = {
    "other model": (other_model, "model.path=.*/model, not .*/other; resume with the former"),
    "same shape, other model": (same_model_elsewhere, "model.path=.*/model, not .*; resume with the former"),
    "seed": (lambda world: {"train": {"seed": 6, "steps": 5, **RESUME}}, "train.seed=5, not 6; resume with"),
    "dtype": (lambda world: {"model": {"dtype": "bf16"}}, "model.dtype=fp32, not bf16; resume with"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_run_is_not_continued(world: World, case: str) -> None:
    change, match = OTHERS[case]
    run_well(world)
    sections = {"train": {"steps": 5, **RESUME}, **change(world)}
    files = names_below(world.root)
    before = world.digest(), (world.root / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=f"step-00000003 belongs to a run with {match}"):
        train(world.config(**sections))
    outcome = world.command(world.config(**sections))
    assert (outcome.status, outcome.result["error"]) == (2, "ConfigError")
    assert (world.digest(), (world.root / "run" / "config.yaml").read_text()) == before
    assert names_below(world.root) - files == {"config-of-command.yaml"}


def test_a_model_that_was_moved_is_the_same_model(world: World) -> None:
    """The checkpoint holds all weights; where they came from may be gone."""
    model = world.own_model("before")
    sections = {"optimizer": {"schedule": "constant"}}
    run_well(world, model={"path": str(model)}, **sections)
    moved = model.rename(world.root / "after")
    run_well(world, model={"path": str(moved)}, train={"steps": 4, **RESUME}, **sections)
    run_well(world, "through", train={"steps": 4}, **sections)
    assert world.digest() == world.digest("through")


# --- damaged checkpoints ------------------------------------------------------------------------------------


def cut_moment(checkpoint: Path) -> None:
    path = next((checkpoint / "optimizer").glob("*layers.1.exp_avg.*"))
    path.write_bytes(path.read_bytes()[:-5])


def remove_moment(checkpoint: Path) -> None:
    next((checkpoint / "optimizer").glob("*layers.1.exp_avg.*")).unlink()


def cut_shard(checkpoint: Path) -> None:
    path = checkpoint / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def spoil_state(checkpoint: Path) -> None:
    (checkpoint / "trainer_state.json").write_text("{")


def forget_key(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["updates"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))


def hostile_moment(value: float, plane: str) -> Callable[[Path], None]:
    """A file that is whole, and as its checksum says: who made it meant it so."""

    def damage(checkpoint: Path) -> None:
        path = next((checkpoint / "optimizer").glob(f"*layers.1.{plane}.*"))
        tensors = load_file(path)
        next(iter(tensors.values())).view(-1)[0] = value
        save_file(tensors, path)
        seal(checkpoint)

    return damage


def hostile_count(checkpoint: Path) -> None:
    seal(checkpoint, updates={"lm_head.weight": 10**400})


def seal(checkpoint: Path, **changes: Any) -> None:
    """Make a checkpoint's checksums right."""
    state = {**json.loads((checkpoint / "trainer_state.json").read_text()), **changes}
    del state["crc32"]
    for name, known in state["files"].items():
        content = (checkpoint / name).read_bytes()
        known.update(num_bytes=len(content), crc32=zlib.crc32(content))
    (checkpoint / "trainer_state.json").write_text(render_state(state))


def remove_checkpoint(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut_moment, "exp_avg.safetensors is truncated"),
    (remove_moment, "exp_avg.safetensors is missing, so the run cannot be resumed exactly"),
    (cut_shard, "model-00002-of-00006.safetensors is truncated"),
    (spoil_state, "trainer_state.json cannot be read"),
    (forget_key, "trainer_state.json cannot be read: updates: missing"),
    (hostile_moment(math.nan, "exp_avg"), "exp_avg of .*layers.1 holds what is no number"),
    (hostile_moment(-1.0, "exp_avg_sq"), "exp_avg_sq of .*layers.1 holds what is no number"),
    (hostile_count, "trainer_state.json cannot be read: updates: missing"),
    (
        remove_checkpoint,
        "latest names 'step-00000003', which is not a checkpoint, with a file trainer_state.json; correct or",
    ),
]


@pytest.mark.parametrize(("damage", "match"), DAMAGES, ids=[d[1][:24] for d in DAMAGES])
def test_a_damaged_checkpoint_is_refused(world: World, damage: Callable[[Path], None], match: str) -> None:
    run_well(world)
    damage(world.root / "run/checkpoints/step-00000003")
    files = names_below(world.root)
    config = world.config(train={"steps": 5, **RESUME})
    with pytest.raises(CheckpointError, match=match):
        train(config)
    outcome = world.command(config)
    assert (outcome.status, outcome.result["error"]) == (2, "CheckpointError")
    assert names_below(world.root) - files == {"config-of-command.yaml"}


def test_what_a_killed_process_left_is_swept_away(world: World) -> None:
    run_to(world, 1)
    checkpoints = world.root / "run/checkpoints"
    for name in ("step-00000002.partial", ".step-00000002.partial.partial-0a1b"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "config.json").write_text("{")
    (checkpoints / "latest.partial").write_text("step-0")
    run_to(world, 3)
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step-00000001", "step-00000003"}


def test_a_checkpoint_that_is_not_whole_is_none_where_nothing_names_the_latest(world: World) -> None:
    """A loss of power while the first one is written: its state is there, and files beside it may not be."""
    run_to(world, 1)
    checkpoints = world.root / "run/checkpoints"
    (checkpoints / "step-00000001").rename(checkpoints / "step-00000002.partial")
    (checkpoints / "latest").unlink()
    cut_shard(checkpoints / "step-00000002.partial")
    assert latest(world.root / "run") is None
    run_to(world, 3)
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step-00000003"}


def test_a_checkpoint_without_the_word_that_it_is_the_latest_is_written_again(world: World) -> None:
    """A process killed between the two last writes leaves a checkpoint that nobody trusts."""
    run_to(world, 1)
    checkpoints = world.root / "run/checkpoints"
    shutil.copytree(checkpoints / "step-00000001", checkpoints / "step-00000003")
    change_weight_of_shard(checkpoints / "step-00000003")
    run_to(world, 3)
    run_well(world, "through", optimizer={"schedule": "constant"})
    assert world.digest() == world.digest("through")


def change_weight_of_shard(checkpoint: Path) -> None:
    path = checkpoint / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
