"""An exception in the middle of a step, in each lane: named, chained, and nothing of the run is left alive."""

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaModel

from bad_input.traps import Trap, raiser
from bad_input.world import World, run_well
from outsize.errors import DataError, ExecutionError, ModelError, StorageError
from outsize.planner.program.program import Kind
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.ops import optimizer_ops
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.session.decide import decide as planning
from outsize.session.job.prepare import Job
from outsize.session.stream import StreamedTrainer
from outsize.storage.committed import CommittedHome
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.scratch import DiskScratch, HostScratch
from outsize.training.records import Heartbeat
from outsize.training.run import train

DIRECT = {"device": "cpu", "home": "disk", "offload": True}
STAGED = {"device": "emulated:1", "home": "disk", "offload": True}
HOST = {"device": "cpu", "home": "host", "offload": True}
OFFLOAD = {"device": "cpu", "home": "disk", "activations": "offload"}

# where the failure happens: memory, kind of op, the function that fails, and the lane that must be named
LANES: dict[str, tuple[dict[str, Any], Kind, Any, str, str]] = {
    "load from disk": (DIRECT, Kind.LOAD, DiskHome, "read", r"LOAD \d@w0\.\d failed on lane up:w0"),
    "load from host": (HOST, Kind.LOAD, HostHome, "lend", r"LOAD \d@w0\.\d failed on lane up:w0"),
    "read of a unit": (STAGED, Kind.READ, DiskHome, "read", r"READ \d>h\d failed on lane read:units"),
    "save": (DIRECT, Kind.SAVE, DiskScratch, "put", r"SAVE \d\.\d@w0 failed on lane down:w0"),
    "save to host": (HOST, Kind.SAVE, HostScratch, "put", r"SAVE \d\.\d@w0 failed on lane down:w0"),
    "fetch": (DIRECT, Kind.FETCH, DiskScratch, "take", r"FETCH \d\.\d@w0 failed on lane up:w0"),
    "offload": (OFFLOAD, Kind.OFFLOAD, DiskScratch, "put", r"OFFLOAD \d\.\d@w0 failed on lane down:w0"),
    "onload": (OFFLOAD, Kind.ONLOAD, DiskScratch, "take", r"ONLOAD \d\.\d@w0 failed on lane up:w0"),
    "gradient": (DIRECT, Kind.GRAD, DiskHome, "write", r"GRAD \d@w0.* failed on lane down:w0"),
    "write of a unit": (STAGED, Kind.WRITE, DiskHome, "write", r"WRITE \d<h\d failed on lane write:units"),
    "read of a tile": (
        DIRECT,
        Kind.READ,
        CommittedHome,
        "read_planes",
        r"READ \d#\d>t\d failed on lane read:",
    ),
    "step of a tile": (
        DIRECT,
        Kind.STEP,
        optimizer_ops,
        "step_state",
        r"STEP \d#\d@t\d failed on lane host",
    ),
    "step of a unit": (HOST, Kind.STEP, optimizer_ops, "step_state", r"STEP \d failed on lane host"),
    "write of a tile": (
        DIRECT,
        Kind.WRITE,
        CommittedHome,
        "write_planes",
        r"WRITE \d#\d<t\d failed on lane write:",
    ),
}


@pytest.mark.parametrize("case", LANES)
def test_an_exception_in_a_lane_names_op_and_lane(
    world: World, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    memory, kind, owner, name, match = LANES[case]
    with monkeypatch.context() as patched:
        trap = Trap(patched, kind)
        trap.put(owner, name, raiser(RuntimeError("broken")))
        error = world.fails(ExecutionError, rf"^{match}.*RuntimeError: broken$", begins=True, memory=memory)
    assert trap.sprung == 2
    assert type(error.__cause__) is RuntimeError
    # A step is reported once its loss and norm are known; whether that was before its optimizer broke is a race.
    lines = {1, 2} if kind is Kind.STEP or name.endswith("_planes") else {1}
    for directory in ("library", "command"):
        check_unsaved(world, directory, lines)


def test_a_disk_that_fails_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        Trap(patched, Kind.LOAD).put(os, "preadv", raiser(OSError(errno.EIO, os.strerror(errno.EIO))))
        match = r"cannot read \d+ bytes at offset \d+ of .*home.bin: Input/output error; the device reports a fault"
        world.fails(StorageError, match, begins=True)
    check_unsaved(world, "library")


def check_unsaved(world: World, run_dir: str, lines: Collection[int] = (1,)) -> None:
    """A run that broke in its second step has its files, one line and its home; no checkpoint."""
    directory = world.root / run_dir
    names = {path.name for path in directory.iterdir()}
    home = directory / "store" / "home.bin"
    assert home.exists() == ("store" in names)
    names -= {"store"}  # nothing is left of a home before its first commit, and of one in memory
    # The third step leaves a timeline, and what was learnt of the machine.
    names -= {"timeline.json", "prediction.json", "machine.json"}
    assert names == {"config.yaml", "plan.json", "run.json", "heartbeat.jsonl"}
    assert len((directory / "heartbeat.jsonl").read_text().splitlines()) in lines


# --- the model's own code -----------------------------------------------------------------------------------


class BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FloatingPointError("no way back")


def break_forward(trap: Trap, patched: pytest.MonkeyPatch) -> None:
    trap.put(LlamaMLP, "forward", raiser(FloatingPointError("no way back")))


def break_backward(trap: Trap, patched: pytest.MonkeyPatch) -> None:
    breaks = threading.Event()
    trap.put(LlamaMLP, "forward", breaks.set)
    trapped = LlamaMLP.forward

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        breaks.clear()
        out = trapped(self, x)
        return BreaksInBackward.apply(out) if breaks.is_set() else out

    patched.setattr(LlamaMLP, "forward", forward)


CHOICES = {Kind.FORWARD_KEEP: "keep", Kind.FORWARD_PRODUCTS: "offload-products"}
MODEL_CODE: dict[str, tuple[Kind, Callable[[Trap, pytest.MonkeyPatch], None], str]] = {
    "forward": (Kind.FORWARD, break_forward, r"F 2\.1@w0, unit model\.layers\.1"),
    "recompute": (Kind.BACKWARD, break_forward, r"B 2\.1@w0, unit model\.layers\.1"),
    "backward": (Kind.BACKWARD, break_backward, r"B 2\.1@w0, unit model\.layers\.1"),
    "forward that keeps products": (
        Kind.FORWARD_PRODUCTS,
        break_forward,
        r"FP 2\.1@w0, unit model\.layers\.1",
    ),
    "forward that keeps": (Kind.FORWARD_KEEP, break_forward, r"FK 2\.1@w0, unit model\.layers\.1"),
}


@pytest.mark.parametrize("case", MODEL_CODE)
def test_an_exception_of_the_model_names_op_and_unit(
    world: World, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """In the second microbatch of the second step, in one unit's own code."""
    kind, break_it, where = MODEL_CODE[case]
    memory = {"activations": CHOICES[kind]} if kind in CHOICES else {}
    with monkeypatch.context() as patched:
        break_it(Trap(patched, kind, microbatch=1, unit=2), patched)
        match = rf"the model raised in {where}: FloatingPointError: no way back"
        error = world.fails(ModelError, match, begins=True, memory=memory)
    assert type(error.__cause__) is FloatingPointError
    check_unsaved(world, "library")


def test_a_model_that_objects_to_being_unwound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of the other microbatch is under way when the run ends; what it raises then is nobody's error."""
    forward = LlamaModel.forward

    def objects(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except BaseException as error:
            raise RuntimeError("the model was not finished") from error

    with monkeypatch.context() as patched:
        patched.setattr(LlamaModel, "forward", objects)
        break_forward(Trap(patched, Kind.FORWARD, microbatch=1, unit=2), patched)
        world.fails(ModelError, "FloatingPointError: no way back", begins=True)


def test_the_run_before_the_exception_can_be_continued(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    config = world.config(train={"save_every": 1})
    with monkeypatch.context() as patched:
        break_forward(Trap(patched, Kind.FORWARD, step=2), patched)
        with pytest.raises(ModelError):
            train(config)
    # That of step 2 was being written beside step 3, and may have been given up with it.
    newest = (world.root / "run/checkpoints/latest").read_text()
    assert newest in ("step-00000001\n", "step-00000002\n")
    result = run_well(world, train={"resume": "auto"})
    assert result.steps == 3
    run_well(world, "through")
    assert world.digest() == world.digest("through")


# --- nothing stays alive ------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [DIRECT, HOST], ids=["disk", "host"])
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, *CHOICES])
def test_nothing_of_a_failed_run_stays_alive(
    world: World, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], kind: Kind
) -> None:
    """Coroutines, activations and slots are gone; the model has its own forwards and no weights again."""
    alive: list[weakref.ref[Any]] = []
    prepared: list[Job] = []
    activations = CHOICES.get(kind, "recompute")
    with monkeypatch.context() as patched:
        break_forward(Trap(patched, kind, microbatch=1), patched)
        remember_runs(patched, alive)
        remember_outputs(patched, alive)
        remember_prepared(patched, prepared)
        with pytest.raises(ModelError):
            train(world.config(memory={**memory, "activations": activations}))
    split = prepared[0].split
    assert all("forward" not in vars(module) for module in split.modules)
    assert {parameter.device.type for parameter in split.model.parameters()} == {"meta"}
    prepared.clear()
    del split
    gc.collect()
    assert len(alive) > 10
    assert [reference() for reference in alive if reference() is not None] == []


def remember_runs(patched: pytest.MonkeyPatch, alive: list[weakref.ref[Any]]) -> None:
    """Note every passage of a microbatch and its coroutine."""
    begin = MicrobatchRun.__init__

    def noted(self: MicrobatchRun, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        alive.extend((weakref.ref(self), weakref.ref(self._walk), weakref.ref(self._walk._coroutine)))

    patched.setattr(MicrobatchRun, "__init__", noted)


def remember_outputs(patched: pytest.MonkeyPatch, alive: list[weakref.ref[Any]]) -> None:
    """Note every tensor that a block receives."""
    forward = LlamaDecoderLayer.forward

    def noted(self: LlamaDecoderLayer, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        alive.append(weakref.ref(hidden_states))
        return forward(self, hidden_states, *args, **kwargs)

    patched.setattr(LlamaDecoderLayer, "forward", noted)


def remember_prepared(patched: pytest.MonkeyPatch, found: list[Job]) -> None:
    """Keep what the run was made from."""
    prepare = planning.prepare

    def noted(*args: Any, **kwargs: Any) -> Job:
        found.append(prepare(*args, **kwargs))
        return found[-1]

    patched.setattr(planning, "prepare", noted)


def test_an_error_does_not_hold_the_run_in_a_cycle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the error is dropped its traceback goes, and with it the optimizer; no collector is needed."""
    alive: list[weakref.ref[Any]] = []
    begin = OptimizerOps.__init__

    def noted(self: OptimizerOps, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        alive.append(weakref.ref(self))

    with monkeypatch.context() as patched:
        patched.setattr(OptimizerOps, "__init__", noted)
        Trap(patched, Kind.STEP).put(optimizer_ops, "step_state", raiser(RuntimeError("broken")))
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(ExecutionError):
                train(world.config())
            assert alive
            assert not any(reference() for reference in alive)
        finally:
            gc.enable()


# --- threads beside the lanes -------------------------------------------------------------------------------


def test_data_that_shrinks_while_it_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes batches ahead meets the end of the file; the step that needs the batch says so."""
    tokens = world.root / "own.npy"
    whole = world.tokens.read_bytes()
    tokens.write_bytes(whole)
    fill, beat = StreamedTrainer.fill, Heartbeat.beat

    def restore_and_fill(self: StreamedTrainer) -> None:
        tokens.write_bytes(whole)
        fill(self)

    def beat_and_cut(self: Heartbeat, record: Any) -> None:
        beat(self, record)
        os.truncate(tokens, 128)

    with monkeypatch.context() as patched:
        patched.setattr(StreamedTrainer, "fill", restore_and_fill)
        patched.setattr(Heartbeat, "beat", beat_and_cut)
        for directory in ("library", "command"):
            tokens.write_bytes(whole)
            config = world.config(directory, data={"path": str(tokens)}, train={"steps": 8})
            if directory == "library":
                with pytest.raises(DataError, match=r"own.npy: ends at byte \d+; it was changed or cut"):
                    train(config)
            else:
                outcome = world.command(config)
                assert (outcome.status, outcome.result["error"]) == (2, "DataError")
            # The second step was under way; two batches ready and one in the making, at most, were read before the cut.
            check_unsaved(world, directory, range(1, 6))


def test_an_exception_of_the_caller_ends_the_run(world: World) -> None:
    def refuse(_: Any) -> None:
        raise LookupError("the caller's own")

    with pytest.raises(LookupError, match="the caller's own"):
        train(world.config(), progress=refuse)
    assert not (world.root / "run" / "checkpoints").exists()
