"""A run that fails completes the checkpoint under way where its state is there, and says where a resume goes on."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from crash.campaign import digest
from crash.faults import LANE, Fault, Key, Layer, layered
from outsize.checkpoint.saving import Saving
from outsize.config import Config
from outsize.errors import ExecutionError, StorageError
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.shares import commit_record_bytes
from outsize.session.job.machine import home_file
from outsize.storage.committed import CommittedHome, find_record
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool
from outsize.training.records import StepRecord
from outsize.training.run import train
from patience import PATIENCE_S
from support import make_run

HOST: dict[str, Any] = {"home": "host"}
DISK: dict[str, Any] = {"home": "disk"}


def run_of(directory: Path, name: str, memory: dict[str, Any] = HOST, **train_section: Any) -> Config:
    """Three steps in ``directory / name``, saved after each."""
    settings = {"steps": 3, "save_every": 1, "run_dir": str(directory / name), **train_section}
    return make_run(directory, train=settings, memory=memory)


def fail(config: Config, layer: Layer) -> list[str]:
    """Have a run fail, and return what it said."""
    said: list[str] = []
    with layered(layer), pytest.raises(ExecutionError):
        train(config, announce=said.append)
    assert layer.sprung
    return said


def assert_resumes_to_the_same_end(directory: Path, config: Config, memory: dict[str, Any] = HOST) -> None:
    train(run_of(directory, "whole", memory))
    train(config.model_copy(update={"train": config.train.model_copy(update={"resume": "auto"})}))
    assert digest(Path(config.train.run_dir or "")) == digest(directory / "whole")


def latest_of(directory: Path) -> str:
    return (directory / "run/checkpoints/latest").read_text().strip()


@pytest.mark.parametrize(
    "memory",
    [HOST, {**HOST, "device": "emulated:2"}, {**DISK, "commits": "none"}],
    ids=["host", "two workers", "disk in place"],
)
def test_the_checkpoint_under_way_is_completed_when_the_next_step_fails(
    memory: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, "run", memory)
    layer = Layer(tmp_path, {Key(LANE, "CLIP", 1, 0, 0): Fault.EXCEPTION})
    write, failed = Saving._write, threading.Event()
    monkeypatch.setattr(layer, "lane_op", telling(layer, failed))

    def hold(self: Saving, resting: Any, writer: Any) -> None:
        """Until the next step has failed, so that the STOREs behind this one are skipped."""
        assert failed.wait(PATIENCE_S)
        write(self, resting, writer)

    with monkeypatch.context() as patched:
        patched.setattr(Saving, "_write", hold)
        said = fail(config, layer)
    assert latest_of(tmp_path) == "step-00000001"
    assert said[-1] == "the run failed: --resume auto goes on after step 1, from step-00000001"
    assert_resumes_to_the_same_end(tmp_path, config, memory)


def telling(layer: Layer, failed: threading.Event) -> Any:
    """The layer's own, which also tells that an op has failed."""
    lane_op = layer.lane_op

    def told(*arguments: Any) -> None:
        try:
            lane_op(*arguments)
        except RuntimeError:
            failed.set()
            raise

    return told


@pytest.mark.parametrize("op", ["STEP 1", "STEP 0"])
def test_a_state_that_was_never_whole_is_not_saved(op: str, tmp_path: Path) -> None:
    """The optimizer of step 2 fails: the checkpoint after step 2 may have begun, and the one before it stands."""
    config = run_of(tmp_path, "run")
    said = fail(config, Layer(tmp_path, {Key(LANE, op, 1, 0, 0): Fault.EXCEPTION}))
    assert latest_of(tmp_path) == "step-00000001"
    assert said[-1] == "the run failed: --resume auto goes on after step 1, from step-00000001"
    assert_resumes_to_the_same_end(tmp_path, config)


def test_what_fails_beside_the_lanes_loses_no_checkpoint_either(tmp_path: Path) -> None:
    config = run_of(tmp_path, "run")

    def full(record: StepRecord) -> None:
        if record.step == 2:
            raise StorageError("no space for what the caller writes")

    said: list[str] = []
    with pytest.raises(StorageError, match="no space"):
        train(config, progress=full, announce=said.append)
    assert latest_of(tmp_path) == "step-00000001"
    assert "goes on after step 1, from step-00000001" in said[-1]
    assert_resumes_to_the_same_end(tmp_path, config)


def test_a_home_on_disk_says_how_far_it_is_and_a_run_without_anything_says_so(tmp_path: Path) -> None:
    layer = {Key(LANE, "CLIP", 2, 0, 0): Fault.EXCEPTION}
    config = run_of(tmp_path, "disk", DISK, save_every=0)
    said = fail(config, Layer(tmp_path, layer))
    told = re.fullmatch(r"the run failed: --resume auto goes on after step ([12]), from (.*)", said[-1])
    assert told is not None  # the COMMIT of step 2 may have been under way
    assert told[2] == str(tmp_path / "disk/store/home.bin")
    again: list[str] = []
    train(run_of(tmp_path, "disk", DISK, resume="auto"), announce=again.append)
    assert f"resumed from step {told[1]} in {told[2]}" in again
    said = fail(run_of(tmp_path, "host", save_every=0), Layer(tmp_path, layer))
    assert said[-1] == "the run failed: nothing is saved yet, --resume auto starts with step 1 again"


def test_a_timeline_that_cannot_be_written_is_counted_and_every_step_has_its_line(tmp_path: Path) -> None:
    layer = Layer(tmp_path, {Key("pwrite", "disk/timeline.json.partial", 0, 0, 0): Fault.TORN})
    with layered(layer):
        result = train(run_of(tmp_path, "disk", DISK))
    assert result.failed_writes == 1
    lines = (tmp_path / "disk/heartbeat.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, result.steps + 1))


def of_one_unit(num_planes: int) -> ModelSpec:
    shape = (num_planes * PLANE_ELEMENTS,)
    return ModelSpec(units=(pack_unit(0, "unit", "block", [("weight", shape, True, True)]),), dtype="bf16")


def test_the_newest_record_of_a_home_is_read_wherever_its_layout_has_it(tmp_path: Path) -> None:
    """Split masters are more planes than separate ones, so records are longer, and the second begins later."""
    planes = StateLayout(dtype="bf16", masters="split").planes
    specs = (of_one_unit(count) for count in range(1, 1000))
    spec = next(s for s in specs if commit_record_bytes(s, planes=planes) > commit_record_bytes(s))
    config = run_of(tmp_path, "run", DISK)
    path = home_file(config.memory, tmp_path / "run")
    path.parent.mkdir(parents=True)
    with Arena() as arena, IOPool(1) as pool, CommittedHome(spec, planes, path, pool, arena=arena) as home:
        for step in (1, 2):
            home.commit({"step": step})
    record, wrong = find_record(path, spec, planes)
    assert record is not None
    assert (record.state["step"], wrong) == (2, "")
