"""What is not finite: no weight changes, in no plane, by not one bit."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

import zoo
from bad_input.traps import Trap
from bad_input.world import SEQ_LEN, WEIGHTS, World, change_weight
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.errors import NonFiniteError
from outsize.planner.program.program import Kind
from outsize.session.job.prepare import prepare
from outsize.session.process_settings import borrowed_torch
from outsize.session.steps import StepOutcome
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.run import train

NAN = float("nan")
POISONED = 50  # the row of the embedding that is NaN
PLANES = ("weights", "exp_avg", "exp_avg_sq")
WHAT_TO_TRY = "no weight was changed. Try a lower optimizer.lr.*train.on_nonfinite=skip"


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("home", ["disk", "host"])
def test_a_nan_weight_ends_the_run_in_the_first_step(world: World, max_grad_norm: float, home: str) -> None:
    model = world.own_model()
    change_weight(model, NAN)
    norm = ", gradient norm nan" if max_grad_norm else ""
    world.fails(
        NonFiniteError,
        f"^step 1: loss nan{norm}; {WHAT_TO_TRY}",
        begins=True,
        model={"path": str(model)},
        optimizer={"max_grad_norm": max_grad_norm},
        memory={"home": home},
    )
    assert (world.root / "library" / "heartbeat.jsonl").read_text() == ""


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_skipped_steps_are_counted_and_change_nothing(world: World, max_grad_norm: float, loss: str) -> None:
    model = world.own_model()
    change_weight(model, NAN)
    outcome = world.command(
        world.config(
            model={"path": str(model)},
            optimizer={"max_grad_norm": max_grad_norm, "weight_decay": 0.5},
            train={"on_nonfinite": "skip", "loss": loss},
        )
    )
    assert (outcome.status, outcome.result["skipped_steps"], outcome.result["loss"]) == (0, 3, None)
    assert "skipped: not finite" in outcome.err
    saved: dict[str, Tensor] = {}
    for path in Path(outcome.result["export_dir"]).glob("*.safetensors"):
        saved.update(load_file(path))
    for name, before in load_file(model / WEIGHTS).items():
        assert torch.equal(saved[name].view(torch.int32), before.view(torch.int32)), name
    beats = [json.loads(line) for line in (world.root / "run/heartbeat.jsonl").read_text().splitlines()]
    assert [(beat["loss"], beat["skipped"]) for beat in beats] == [(None, True)] * 3


# --- in the middle of a run ---------------------------------------------------------------------------------


def batch_of(first: int) -> Batch:
    """Four sequences of tokens from ``first`` on."""
    ids = first + torch.arange(4 * SEQ_LEN).view(4, SEQ_LEN) % 20
    return Batch(ids, ids)


GOOD, BAD, OTHER = batch_of(3), batch_of(POISONED - 5), batch_of(25)


def poisoned_config(world: World, **sections: Any) -> Config:
    """A model that gives NaN only for batches that hold one certain token."""
    model = world.own_model()
    change_weight(model, NAN, "model.embed_tokens.weight", POISONED * zoo.SIZES["hidden_size"])
    return world.config(model={"path": str(model)}, **{"optimizer": {"schedule": "constant"}, **sections})


def state_bits(trainer: StreamedTrainer) -> dict[str, str]:
    """Hash every plane of every unit."""
    return {
        f"{unit.name} {plane}": hashlib.sha256(
            b"".join(tensor.numpy().tobytes() for tensor in trainer.read_unit(unit, plane).values())
        ).hexdigest()
        for unit in trainer.spec.units
        for plane in PLANES
    }


def steps_of(
    world: World, config: Config, batches: Sequence[Batch]
) -> tuple[list[StepOutcome], dict[str, str]]:
    """Train on ``batches``; returns what happened and the state after it."""
    with borrowed_torch(deterministic=True):
        prepared = prepare(RunSpec.of(config, world.root), lambda _: None)
        with StreamedTrainer(prepared, world.root / "store") as trainer:
            trainer.fill()
            outcomes = list(trainer.steps(batches))
            trainer.settle()
            return outcomes, state_bits(trainer)


@pytest.mark.parametrize("home", ["disk", "host"])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_raising_leaves_the_state_of_the_step_before(world: World, home: str, max_grad_norm: float) -> None:
    optimizer = {"schedule": "constant", "max_grad_norm": max_grad_norm}
    config = poisoned_config(world, memory={"home": home}, optimizer=optimizer)
    _, after_one = steps_of(world, config, [GOOD])
    with borrowed_torch(deterministic=True):
        prepared = prepare(RunSpec.of(config, world.root), lambda _: None)
        with StreamedTrainer(prepared, world.root / "store") as trainer:
            trainer.fill()
            steps = trainer.steps([GOOD, BAD, OTHER])
            next(steps)
            with pytest.raises(NonFiniteError, match=r"^step 2: loss nan"):
                next(steps)
            assert state_bits(trainer) == after_one


def test_a_skipped_step_is_as_if_it_had_not_been(world: World) -> None:
    config = poisoned_config(world, train={"on_nonfinite": "skip"})
    with_bad, end_with_bad = steps_of(world, config, [GOOD, BAD, OTHER])
    without, end_without = steps_of(world, config, [GOOD, OTHER])
    assert [outcome.skipped for outcome in with_bad] == [False, True, False]
    assert math.isnan(with_bad[1].loss)
    assert [with_bad[0].loss, with_bad[2].loss] == [outcome.loss for outcome in without]
    assert end_with_bad == end_without


# --- infinite gradients -------------------------------------------------------------------------------------


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


@pytest.fixture
def exploding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the second step, one unit's gradient is infinite while the loss is not."""
    found: list[bool] = []
    trap = Trap(monkeypatch, Kind.BACKWARD, microbatch=0, unit=2)
    trap.put(LlamaMLP, "forward", lambda: found.append(True))
    trapped = LlamaMLP.forward

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        found.clear()
        out = trapped(self, x)
        return Explodes.apply(out) if found else out

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    yield
    monkeypatch.undo()


def test_an_infinite_gradient_raises(world: World, exploding: None) -> None:
    match = rf"^step 2: loss 4\.\d+, gradient norm (inf|nan); {WHAT_TO_TRY}"
    world.fails(NonFiniteError, match, begins=True)


def test_an_infinite_gradient_is_skipped(world: World, exploding: None) -> None:
    result = train(world.config(train={"on_nonfinite": "skip"}))
    assert (result.skipped_steps, math.isfinite(result.loss)) == (1, True)
    beats = [json.loads(line) for line in (world.root / "run/heartbeat.jsonl").read_text().splitlines()]
    assert [(beat["skipped"], beat["grad_norm"] is None) for beat in beats] == [
        (False, False),
        (True, True),
        (False, False),
    ]


UNCLIPPED = {"max_grad_norm": 0.0, "weight_decay": 0.5, "schedule": "constant"}


@pytest.mark.parametrize("home", ["disk", "host"])
def test_without_clipping_a_unit_does_not_step_by_an_infinite_gradient(
    world: World, exploding: None, home: str
) -> None:
    """No norm is taken then: units behind it may have stepped, but nothing of that step is saved."""
    match = r"^step 2: loss 4\.\d+, gradient of model\.layers\.1 not finite; nothing of this step is saved"
    sections: dict[str, Any] = {"optimizer": UNCLIPPED, "memory": {"home": home}}
    world.fails(NonFiniteError, match, begins=True, train={"save_every": 1}, **sections)
    assert not (world.root / "library/checkpoints/step-00000002").exists()


@pytest.mark.parametrize("home", ["disk", "host"])
def test_a_step_skipped_without_clipping_is_as_if_it_had_not_been(
    world: World, exploding: None, home: str
) -> None:
    """Skipping has to know all gradients before the first unit steps."""
    config = world.config(train={"on_nonfinite": "skip"}, optimizer=UNCLIPPED, memory={"home": home})
    outcomes, after_two = steps_of(world, config, [GOOD, OTHER])
    assert [(outcome.skipped, math.isfinite(outcome.loss)) for outcome in outcomes] == [
        (False, True),
        (True, True),
    ]
    _, after_one = steps_of(world, config, [GOOD])
    assert after_two == after_one
