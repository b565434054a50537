"""Training loops as a user writes them, over a plain model and over a wrapped one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.wrapped import wrap_planning
from reference import num_targets

ROOM = {"device": "cpu", "device_memory": "1GiB", "host_memory": "1GiB", "disk_memory": "1GiB"}
Inputs = Mapping[str, Tensor]


@contextmanager
def wrapped(model: nn.Module, **settings: Any) -> Iterator[nn.Module]:
    """``model``, wrapped with room for everything, until the context ends."""
    streamed = outsize.wrap(model, **{**ROOM, **settings})
    try:
        yield streamed
    finally:
        if type(model).__mro__[1].__name__ == "Wrapped":
            outsize.unwrap(model)


@contextmanager
def planned_in(size: int) -> Iterator[None]:
    """Have calls planned in rounds of ``size`` microbatches, whatever fits."""
    make = wrap_planning.plan_wrapped

    def made(split: Any, machine: Any, measured: Any, options: Any, held: int) -> Any:
        return make(split, machine, measured, replace(options, round_microbatches=size), held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap_planning, "plan_wrapped", made)
        yield


def parts_of(batch: Inputs, count: int) -> list[dict[str, Tensor]]:
    """``batch`` in microbatches, the larger ones first."""
    rows = len(next(iter(batch.values())))
    cut = {name: value.tensor_split(min(count, rows)) for name, value in batch.items()}
    return [{name: values[m] for name, values in cut.items()} for m in range(min(count, rows))]


def resident_backward(model: nn.Module, batch: Inputs, count: int, causal: bool = True) -> Tensor:
    """Loss of the batch, gradients left in the parameters: the ordinary loop over microbatches."""
    parts = parts_of(batch, count)
    targets = [num_targets(part, causal) for part in parts]
    total = None
    for part, own in zip(parts, targets, strict=True):
        if not own:
            continue
        loss = model(**part).loss / (sum(targets) / own)
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, of parameters that have one."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 0.0) -> None:
    """The same names, and the same bits (or nearly)."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if tolerance:
            assert torch.allclose(got[name], value, rtol=tolerance, atol=tolerance), name
        else:
            assert torch.equal(got[name], value), name


def train(
    model: nn.Module,
    batches: Sequence[Inputs],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    forward_backward: Callable[[nn.Module, Inputs], Tensor],
    clip: Callable[[nn.Module], Any] = lambda model: None,
) -> list[float]:
    """The loop that everybody writes; returns the losses."""
    optimizer = make_optimizer(model)
    losses = []
    for batch in batches:
        losses.append(float(forward_backward(model, batch)))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def streamed_backward(model: nn.Module, batch: Inputs) -> Tensor:
    """What a user writes."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()
