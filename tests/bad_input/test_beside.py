"""What stands beside `train`: verify, export, a dry run, and a caller that is not the main thread."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bad_input.world import World, change_weight, command, half_written, names_below, process_state, run_well
from outsize import files
from outsize.errors import CheckpointError, DataError, InfeasiblePlanError, OutsizeError, StorageError
from outsize.functions import export
from outsize.training.run import train
from outsize.training.short_runs import verify

# --- verify -------------------------------------------------------------------------------------------------


def test_verify_leaves_nothing_and_torch_as_it_was(world: World) -> None:
    before = process_state()
    assert verify(world.config()).equal
    assert process_state() == before
    assert names_below(world.root) == set()


@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        ({"memory": {"device_memory": 4096}}, InfeasiblePlanError),
        ({"data": {"path": "/nowhere"}}, DataError),
        ({"model": {"path": "/nowhere"}}, OutsizeError),
    ],
)
def test_verify_fails_as_train_does(world: World, sections: dict[str, Any], kind: type[OutsizeError]) -> None:
    before = process_state()
    with pytest.raises(kind):
        verify(world.config(**sections))
    outcome = world.command(world.config(**sections), name="verify")
    assert (outcome.status, outcome.err.count("outsize: ")) == (2, 1)
    assert process_state() == before
    assert names_below(world.root) == {"config-of-command.yaml"}


def test_verify_takes_a_nan_for_a_nan(world: World) -> None:
    model = world.own_model()
    change_weight(model, float("nan"))
    config = world.config(model={"path": str(model)}, train={"on_nonfinite": "skip"})
    outcome = world.command(config, name="verify")
    assert (outcome.status, outcome.result["equal"]) == (0, True)
    assert outcome.result["loss_streamed"] == [None] * 3
    assert "differs" not in command("verify", str(world.root / "config-of-command.yaml")).out


# --- dry run ------------------------------------------------------------------------------------------------


def test_a_dry_run_leaves_nothing(world: World) -> None:
    before = process_state()
    outcome = world.command(world.config(), "--dry-run")
    assert (outcome.status, "plan" in outcome.result) == (0, True)
    assert process_state() == before
    assert names_below(world.root) == {"config-of-command.yaml"}
    outcome = world.command(world.config(memory={"device_memory": 4096}), "--dry-run")
    assert (outcome.status, outcome.result["error"]) == (2, "InfeasiblePlanError")
    assert outcome.result["short_by"].keys() == {"device"}


# --- export -------------------------------------------------------------------------------------------------


def test_export_of_what_is_no_run(world: World) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint: a run has one once it has saved"):
        export(world.root, world.root / "out")
    outcome = command("export", str(world.root), "--json")
    assert (outcome.status, outcome.result["error"]) == (2, "CheckpointError")
    assert names_below(world.root) == set()


def test_export_writes_over_nothing(world: World) -> None:
    run_well(world)
    (world.root / "out").mkdir()
    (world.root / "out" / "mine").write_text("the user's own")
    with pytest.raises(StorageError, match="out exists already; choose another directory or remove it"):
        export(world.root / "run", world.root / "out")
    assert names_below(world.root / "out") == {"mine"}


@pytest.mark.parametrize("below", ["file/out", "full"])
def test_export_to_where_it_cannot_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    run_well(world)
    (world.root / "file").write_text("not a directory")

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if below == "full":
            patched.setattr(files, "copy", no_space)
        names = names_below(world.root)
        with pytest.raises(StorageError, match=r"cannot write .*out: File exists|full: the disk is full"):
            export(world.root / "run", world.root / below)
        assert names_below(world.root) == names
    assert not half_written(world.root)


# --- another thread -----------------------------------------------------------------------------------------


def test_a_run_in_another_thread_ends_where_any_run_ends(world: World) -> None:
    """Signals are for the main thread; everything else works in any."""
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(Path(train(world.config()).run_dir)))
    thread.start()
    thread.join()
    run_well(world, "main")
    assert found == [world.root / "run"]
    assert world.digest() == world.digest("main")
