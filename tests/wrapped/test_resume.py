"""What was saved between two steps goes on with the same bits, whichever optimizer steps and whoever saves."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import outsize
import zoo
from outsize.wrapped.optimizer_state import EXACT
from wrapped.loops import assert_equal, streamed_backward, wrapped
from wrapped.test_trainer import fit, values

BATCHES = [zoo.batch("llama", seed=step, num_sequences=1) for step in range(4)]
HALF = torch.bfloat16
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def ours(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.AdamW(model, lr=1e-3)


def of_torch(name: str, **settings: Any) -> Make:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=1e-3, **settings)


def go(
    make: Make, steps: range, saved: Path | None = None, *, dtype: torch.dtype = HALF, **settings: Any
) -> dict[str, Tensor]:
    """Step a wrapped model, from what lies in ``saved`` or to there; returns its weights and optimizer's state."""
    with wrapped(zoo.build("llama", dtype=dtype), **settings) as model:
        optimizer = make(model)
        if saved is not None and steps.start:
            weights, state = torch.load(saved, weights_only=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        for step in steps:
            streamed_backward(model, BATCHES[step])
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        if saved is not None and not steps.start:
            torch.save((dict(model.state_dict()), state), saved)
        numbered = {n: s for n, s in state["state"].items() if n != EXACT}
        return values(model) | {f"{n}.{k}": v.clone() for n, s in numbered.items() for k, v in s.items()}


DISK: dict[str, Any] = {"home": "disk"}
MEMBERS: list[tuple[Make, Make, dict[str, Any]]] = [
    (adamw, adamw, DISK),
    (adamw, adamw, {**DISK, "dtype": torch.float16}),
    (adamw, adamw, {**DISK, "dtype": torch.float32, "state": "int8"}),
    (adamw, adamw, {**DISK, "state": "int8"}),
    (adamw, adamw, {"home": "host", "resident": 99}),
    (adamw, ours, DISK),
    (of_torch("AdamW", fused=True), adamw, DISK),
    *((make, make, {"home": "host"}) for make in (adamw, ours, of_torch("AdamW", amsgrad=True))),
    *((make, make, {"home": "host"}) for make in (of_torch("SGD", momentum=0.9), of_torch("Adafactor"))),
]


@pytest.mark.parametrize(("first", "then", "settings"), MEMBERS)
def test_a_file_goes_on_bit_for_bit(first: Make, then: Make, settings: dict[str, Any], tmp_path: Path):
    whole = go(first, range(4), **settings)
    go(first, range(2), tmp_path / "saved", **settings)
    assert_equal(go(then, range(2, 4), tmp_path / "saved", **settings), whole)


def test_a_file_holds_each_tensor_once(tmp_path: Path):
    found = go(adamw, range(1), tmp_path / "saved", home="disk")
    assert (tmp_path / "saved").stat().st_size < 1.2 * sum(value.nbytes for value in found.values())


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_state_loaded_where_it_is_or_saved_before_a_step_stays(home: str, dtype: torch.dtype):
    """Also what came of torch's ``load_state_dict``, which has rounded it by then, and is saved again."""
    whole = go(adamw, range(3), home=home, dtype=dtype)
    with wrapped(zoo.build("llama", dtype=dtype), home=home) as model:
        optimizer = adamw(model)
        for step in range(3):
            streamed_backward(model, BATCHES[step])
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_equal(values(model), {name: whole[name] for name in values(model)})


def test_what_a_program_changed_after_loading_counts(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """A value that is no longer the saved one, rounded; and a file without the unrounded ones is told."""
    go(adamw, range(2), tmp_path / "saved", home="disk")
    weights, state = torch.load(tmp_path / "saved", weights_only=True)
    with wrapped(zoo.build("llama", dtype=HALF), home="disk") as model:
        optimizer = adamw(model)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.state[next(model.parameters())]["exp_avg"].zero_()
        streamed_backward(model, BATCHES[2])
        gradient = next(model.parameters()).grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        assert torch.equal(
            optimizer.state[next(model.parameters())]["exp_avg"],
            torch.zeros_like(gradient).lerp(gradient, 0.1),
        )
        assert not caplog.records
        optimizer.load_state_dict({**state, "state": {n: s for n, s in state["state"].items() if n != EXACT}})
        streamed_backward(model, BATCHES[3])
        optimizer.step()
    assert "that were loaded are in bfloat16" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("home", ["host", "disk"])
def test_trainer_goes_on_bit_for_bit_with_its_default(home: str, tmp_path: Path):
    def run(steps: int, *, resume: bool = False) -> dict[str, Tensor]:
        with wrapped(zoo.build("llama", dtype=HALF), home=home, microbatches=2) as model:
            changes = {"max_steps": steps, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
            fit(model, tmp_path / "run", resume=resume, **changes)
            return values(model)

    run(2)
    resumed = run(4, resume=True)
    assert_equal(resumed, run(4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("home", ["host", "disk"])
def test_accelerate_goes_on_bit_for_bit(home: str, tmp_path: Path):
    def run(steps: range) -> dict[str, Tensor]:
        accelerator = Accelerator(cpu=True)
        with wrapped(zoo.build("llama", dtype=HALF), home=home) as streamed:
            model, optimizer = accelerator.prepare(streamed, adamw(streamed))
            if steps.start:
                accelerator.load_state(str(tmp_path))
            for step in steps:
                accelerator.backward(model(**BATCHES[step]).loss)
                optimizer.step()
                optimizer.zero_grad()
            if steps == range(2):
                accelerator.save_state(str(tmp_path))
            return values(streamed)

    whole = run(range(4))
    run(range(2))
    assert_equal(run(range(2, 4)), whole)
