"""Disks that are full, and directories that cannot be written or are in use."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bad_input.traps import while_saving
from bad_input.world import STEPS, World, half_written, names_below, process_state, run_well
from outsize.errors import ConfigError, StorageError
from outsize.session.job.machine import home_file
from outsize.training.run import train
from outsize.training.short_runs import verify

KIB = 1024


def no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- full ---------------------------------------------------------------------------------------------------


def test_a_disk_too_full_for_the_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_space)
        world.fails(
            StorageError, "cannot allocate .* for .*home.bin: No space left on device; free some space"
        )


@pytest.mark.parametrize("name", ["config.yaml", "plan.json"])
def test_a_disk_too_full_for_a_small_file(world: World, name: str) -> None:
    """The kernel itself refuses: /dev/full takes no byte."""
    for directory in ("library", "command"):
        (world.root / directory).mkdir()
        (world.root / directory / f"{name}.partial").symlink_to("/dev/full")
    with pytest.raises(
        StorageError, match=f"cannot write .*{name}: No space left on device; free some space"
    ):
        train(world.config("library"))
    outcome = world.command(world.config("command"))
    assert (outcome.status, outcome.result["error"]) == (2, "StorageError")
    assert not half_written(world.root)


def test_a_disk_too_full_for_the_heartbeat(world: World) -> None:
    (world.root / "library").mkdir()
    (world.root / "library" / "heartbeat.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    result = train(world.config("library"), announce=said.append)
    assert (result.steps, result.failed_writes) == (3, 3)
    told = [line for line in said if "heartbeat" in line]
    assert len(told) == 1
    assert "cannot be told, and the run goes on: cannot write" in told[0]


@pytest.mark.parametrize("at", [0, 9, 40])
def test_a_disk_that_fills_up_under_a_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At the first byte, in the weights, in the optimizer's state: the run says so and goes on."""
    with monkeypatch.context() as patched:
        while_saving(patched, 2, at, no_space)
        outcome = world.command(world.config(train={"save_every": 1}))
    assert (outcome.status, outcome.result["failed_saves"]) == (0, 1)
    warning = r"warning: .*step-00000002: No space left on device; free some space.*still step-00000001"
    assert re.search(warning, outcome.err)
    assert names_below(world.root / "run/checkpoints") >= {"step-00000001", "step-00000003"}
    assert not (world.root / "run/checkpoints/step-00000002").exists()
    run_well(world, "through")
    assert world.digest() == world.digest("through")


@pytest.mark.parametrize("at", [0, 9, 40])
def test_a_disk_that_fills_up_under_the_last_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """There is nothing left to go on with: an error, and the checkpoint before is where --resume auto goes on."""
    with monkeypatch.context() as patched:
        while_saving(patched, STEPS, at, no_space)
        outcome = world.command(world.config(train={"save_every": 2}))
    assert (outcome.status, outcome.result["error"]) == (2, "StorageError")
    assert re.search(r"step-00000003: No space left on device; free some space", outcome.err)
    checkpoints = world.root / "run/checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step-00000002"}
    outcome = world.command(world.config(), "--resume", "auto")
    assert (outcome.status, outcome.result["steps"]) == (0, STEPS)
    run_well(world, "through")
    assert world.digest() == world.digest("through")


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 1 MiB."""
    directory = tmp_path_factory.mktemp("small")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_small_disk_takes_the_store_or_says_how_much_is_free(world: World, small_disk: Path) -> None:
    """The planner sees what is free; a budget that promises more than there is fails when the file is made."""
    (small_disk / "ballast").write_bytes(bytes(700 * KIB))
    memory = {"store_dir": str(small_disk / "store"), "disk_memory": "1MiB"}
    world.fails(StorageError, r"home and activations take .*, and .* has .* free; free some", memory=memory)
    assert names_below(small_disk) == {"ballast"}
    (small_disk / "ballast").unlink()
    run_well(world, memory=memory)
    assert names_below(small_disk) == set()


def test_a_small_disk_for_checkpoints(world: World, small_disk: Path) -> None:
    """One checkpoint fits, a second one does not."""
    memory = {"store_dir": str(world.root / "store")}
    run_dir = {"run_dir": str(small_disk / "run"), "save_every": 1}
    with pytest.raises(StorageError, match=r"disk is full|No space left"):
        train(world.config(memory=memory, train=run_dir))
    kept = (small_disk / "run/checkpoints/latest").read_text().strip()
    assert (small_disk / "run/checkpoints" / kept / "trainer_state.json").is_file()
    assert not half_written(small_disk)


# --- not writable -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "match"),
    [
        ("file/run", "Not a directory; choose a directory"),
        ("file", "File exists; choose a path that is not a file"),
        ("/proc/run", "cannot write in /proc/run"),
    ],
)
@pytest.mark.parametrize("key", ["train.run_dir", "memory.store_dir"])
def test_a_directory_that_cannot_be_written(world: World, below: str, match: str, key: str) -> None:
    (world.root / "file").write_text("not a directory")
    section, _, name = key.partition(".")
    sections = {section: {name: str(world.root / below)}}
    error = world.fails(StorageError, match, **sections)
    assert f"({key})" in str(error)


def test_verify_says_so_too(world: World) -> None:
    (world.root / "file").write_text("not a directory")
    config = world.config(train={"run_dir": str(world.root / "file" / "run")})
    with pytest.raises(StorageError, match="choose a directory"):
        verify(config)
    outcome = world.command(config, name="verify")
    assert (outcome.status, outcome.result["error"]) == (2, "StorageError")


# --- in use -------------------------------------------------------------------------------------------------


def test_a_run_is_not_started_over_another(world: World) -> None:
    run_well(world)
    before = world.digest()
    with pytest.raises(
        ConfigError, match=r"holds a run already; go on with it with --resume auto .* or choose"
    ):
        train(world.config())
    outcome = world.command(world.config())
    assert (outcome.status, outcome.result["error"]) == (2, "ConfigError")
    assert world.digest() == before


def test_a_directory_of_a_run_that_never_began_may_be_used(world: World) -> None:
    (world.root / "run").mkdir()
    (world.root / "run" / "heartbeat.jsonl").touch()
    (world.root / "run" / "notes.txt").write_text("the user's own")
    run_well(world)
    assert (world.root / "run" / "notes.txt").read_text() == "the user's own"


def in_the_middle(action: Callable[[], None]) -> Callable[[Any], None]:
    """A progress callback that does something after the first step."""

    def progress(record: Any) -> None:
        if record.step == 1:
            action()

    return progress


def test_two_runs_cannot_have_one_directory(world: World) -> None:
    def second() -> None:
        for resume in ("none", "auto"):
            with pytest.raises(
                StorageError, match="run is in use by another run; wait for it, or choose another"
            ):
                train(world.config(train={"resume": resume}))

    assert train(world.config(), progress=in_the_middle(second)).steps == STEPS
    run_well(world, "alone")
    assert world.digest() == world.digest("alone")


@pytest.mark.parametrize("key", ["train.run_dir", "memory.store_dir"])
def test_nothing_is_trained_in_a_checkpoint_that_goes_with_all_in_it(world: World, key: str) -> None:
    run_well(world)
    inside = str(world.root / "run/checkpoints/step-00000003/mine")
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"\({key}\) lies among the checkpoints of the run .*/run, which"):
        train(world.config("other", **{section: {name: inside}}))


def test_two_runs_can_share_a_place_for_their_stores(world: World) -> None:
    """Each has the name of its own run, so neither touches the other."""
    memory = {"store_dir": str(world.root / "stores"), "offload": True}

    def second() -> None:
        run_well(world, "inner", memory=memory)

    state = process_state()
    assert train(world.config("outer", memory=memory), progress=in_the_middle(second)).steps == STEPS
    assert process_state() == state
    run_well(world, "alone")
    assert world.digest("inner") == world.digest("outer") == world.digest("alone")
    assert not (world.root / "stores").exists()


def test_a_store_that_has_a_name_is_locked(world: World) -> None:
    """A run whose directory is not locked, by a file system without locks, is told all the same, and harms nothing."""
    (world.root / "stores").mkdir()
    memory = {"store_dir": str(world.root / "stores")}
    file = home_file(world.config(memory=memory).memory, world.root / "run")
    with file.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            StorageError, match=r"\.bin is in use by another run; give this one another directory"
        ):
            train(world.config(memory=memory))
    file.unlink()


def test_runs_without_a_name_get_one_each(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.root)
    nameless = {"run_dir": None, "steps": 1}
    directories = {train(world.config(train=nameless)).run_dir for _ in range(3)}
    assert len(directories) == 3
    assert all(json.loads((Path(d) / "plan.json").read_text()) for d in directories)
