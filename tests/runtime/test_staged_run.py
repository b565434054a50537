"""What moves with a microbatch from worker to worker, and what does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.errors import ModelError
from outsize.model.split import split
from outsize.model.walk import Boundaries, UnitCall
from outsize.runtime.forward.saved_tensors import bytes_of
from outsize.runtime.forward.staged_run import StagedRun, saved_things_here
from outsize.runtime.forward.unit_visit import UnitVisit, visit_of
from runtime.oddities import Sparse, batch


class OneThread:
    """A glue that runs every piece where it is asked for."""

    worker = 0

    def __init__(self) -> None:
        self.where = torch.device("cpu")

    def device(self) -> torch.device:
        return self.where

    def run(self, run: StagedRun, piece: Callable[[], Any]) -> Any:
        return piece()


class World:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.glue = model, OneThread()
        self.parts = split(model)
        self.boundaries = Boundaries(self.parts.modules)
        count = self.parts.spec.num_streamed
        self.run = StagedRun(model, batch(), (True,) * count, lambda unit, glue: None, outer=self.glue)  # type: ignore[arg-type]

    def forward(self, unit: int) -> None:
        self.run.forward(unit, self.boundaries.forwards[unit])

    def backward(self, unit: int) -> None:
        self.run.recompute(unit, self.boundaries.forwards[unit])
        self.run.backward(unit, self.boundaries.forwards[unit])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def moved(storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Copies of storages; the storages themselves are empty afterwards."""
    copies = [bytes_of(storage).clone().untyped_storage() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return copies


@pytest.fixture
def world() -> World:
    torch.manual_seed(1)
    found = World(Sparse())
    yield found
    found.run.close()
    found.boundaries.close()


def test_moved_away_and_back_before_every_use_changes_nothing(world: World):
    torch.manual_seed(1)
    plain = Sparse()
    plain(**batch()).loss.backward()
    last = world.parts.spec.num_streamed - 1
    run = world.run
    below = {}
    for unit in range(last):
        if unit:
            run.replace_input(unit, [bytes_of(s).clone().untyped_storage() for s in below[unit]])
        world.forward(unit)
        if unit + 1 < last:
            run.arrive(unit + 1)
        below[unit + 1] = moved(run.input_storages(unit + 1))
    run.replace_input(last, below[last])
    run.forward_backward(last, world.boundaries.forwards[last], 1.0)
    for unit in reversed(range(last)):
        gradient = moved(run.take_gradient(unit + 1))
        assert run._visits[unit].box.values == [None]
        run.put_gradient(unit + 1, gradient)
        if unit:
            run.replace_input(unit, below[unit])
        world.backward(unit)
    want, got = gradients_of(plain), gradients_of(world.model)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_only_what_the_unit_before_made_moves(world: World):
    world.forward(0)
    world.run.arrive(1)
    (storage,) = world.run.input_storages(1)
    assert storage.nbytes() == 2 * 5 * 8 * 4  # type: ignore[attr-defined]  # the hidden state, and not the ids


def test_an_input_with_a_copy_below_leaves_the_worker(world: World):
    world.forward(0)
    world.run.arrive(1)
    world.run.leave_below(1)
    assert all(storage.nbytes() for storage in world.run.input_storages(1))  # type: ignore[attr-defined]
    world.run.below.add(1)
    world.run.leave_below(1)
    assert not any(storage.nbytes() for storage in world.run.input_storages(1))  # type: ignore[attr-defined]


def test_what_all_units_share_crosses_once_for_each_worker(world: World):
    mask, table = torch.ones(4, 4), torch.arange(8)

    def visit() -> UnitVisit:
        return visit_of(UnitCall(0, (mask, table, table[2:], "text"), {}))

    first, second, here = visit(), visit(), visit()
    world.run._localise(here)
    assert here.leaves[1] is table
    world.glue.where = torch.device("meta")
    world.run._localise(first)
    world.run._localise(second)
    assert all(leaf.device.type == "meta" for leaf in first.leaves)
    assert all(a is b for a, b in zip(first.leaves, second.leaves, strict=True))
    assert len(world.run._copies) == 3


def test_only_memory_that_has_been_given_away_is_a_reason_for_one_device():
    given_away = torch.ones(4, 4)
    given_away.untyped_storage().resize_(0)
    with pytest.raises(ModelError, match="use one device"), saved_things_here():
        given_away @ torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="peer memory"), saved_things_here():
        raise RuntimeError("peer memory is not allocated")
