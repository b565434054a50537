from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outsize.planner.program.program import parse_op
from outsize.planner.program.stages import Choice, Extent
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.forward.saved_tensors import storages_of
from outsize.runtime.ops.activation_ops import ActivationOps
from outsize.runtime.ops.context import arrivals_behind
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool
from outsize.storage.scratch import DiskScratch, HostScratch

SAVE, FETCH = parse_op("SAVE 2.1@w0"), parse_op("FETCH 2.1@w0")


@pytest.fixture(params=["host", "disk"])
def scratch(request, tmp_path):
    with Arena() as arena, IOPool(2) as pool:
        if request.param == "host":
            made = HostScratch(4, 2**14, arena)
        else:
            made = DiskScratch(4, 2**14, tmp_path / "scratch", pool, arena)
        yield made
        made.close()


def context_of(*tensors: Tensor) -> SimpleNamespace:
    """A step whose microbatch 1 keeps ``tensors`` for unit 2."""
    stored = storages_of(tensors)
    run = SimpleNamespace(
        stored=lambda unit: stored if unit == 2 else [],
        emptied=lambda unit: [storage for storage, _ in stored],
        replace_input=lambda unit, storages: None,
        below=set(),
    )
    return SimpleNamespace(runs={1: run}, number=0)


def test_a_save_followed_by_a_fetch_changes_nothing_but_memory(scratch):
    """In between the device holds no byte of it, and every tensor that shows the storage is valid afterwards."""
    one, other = torch.randn(3, 100), torch.randint(0, 9, (50,), dtype=torch.int16).to(torch.bfloat16)
    copies = one.clone(), other.clone()
    view = one[1]
    ops = ActivationOps(CpuDevice(), scratch)
    context = context_of(one, other)
    ops.save(SAVE, context)
    assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert scratch.num_held == 1
    ops.fetch(FETCH, context)
    assert torch.equal(one, copies[0])
    assert torch.equal(other, copies[1])
    assert torch.equal(view, copies[0][1])
    assert scratch.num_held == 0
    assert ops.bytes_up == ops.bytes_down == 1200 + 100


def test_room_is_made_behind_the_op_before_unless_something_leaves_between():
    text = "FA 2.0, OFFLOAD 2.0, ONLOAD 2.0, B 3.0, FETCH 1.0, ONLOAD 1.0, B 2.0"
    ops = [*(parse_op(f"{op}@w0") for op in text.split(", ")), parse_op("FETCH 4.1@w1")]
    arrivals = {str(op): [str(each) for each in coming] for op, coming in arrivals_behind(ops).items()}
    assert arrivals == {"B 3.0@w0": ["FETCH 1.0@w0", "ONLOAD 1.0@w0"]}


@pytest.mark.parametrize("what", ["put", "take"])
def test_what_a_move_that_failed_has_left_below_can_be_forgotten(
    scratch, what: str, monkeypatch: pytest.MonkeyPatch
):
    ops, context, move = (
        ActivationOps(CpuDevice(), scratch),
        context_of(torch.randn(3), torch.randn(5)),
        getattr(scratch, what),
    )

    def fails(key, *tensors):
        if what == "put":
            move(key, *tensors)
        raise OSError

    monkeypatch.setattr(scratch, what, fails)
    with pytest.raises(OSError):  # noqa: PT011 - the one above
        ops.save(SAVE, context), ops.fetch(FETCH, context)
    ops.forget(0)
    assert scratch.num_held == 0


def test_what_an_onload_that_failed_has_left_below_can_be_forgotten(scratch, monkeypatch: pytest.MonkeyPatch):
    kept = torch.randn(7)
    held = SimpleNamespace(storages=lambda: [kept.untyped_storage()], take=lambda: None)
    context = SimpleNamespace(runs={1: SimpleNamespace(held=lambda unit: held)}, number=0)
    choices = ((), (), (Choice.OFFLOAD_PRODUCTS,) * 2)
    ops = ActivationOps(CpuDevice(), None, rooms={Extent.PRODUCTS: scratch}, choices=choices)
    ops.offload(parse_op("OFFLOAD 2.1@w0"), context)
    monkeypatch.setattr(scratch, "take", lambda key, *into: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ops.onload(parse_op("ONLOAD 2.1@w0"), context)
    ops.forget(0)
    assert scratch.num_held == 0


def test_a_slice_takes_its_whole_storage_along(scratch):
    """A unit may be called with a part of a larger tensor; the rest of it must come back as well."""
    whole = torch.randn(4, 64)
    copy = whole.clone()
    part = whole[1:2]
    ops = ActivationOps(CpuDevice(), scratch)
    ops.save(SAVE, context_of(part))
    ops.fetch(FETCH, context_of(part))
    assert torch.equal(whole, copy)


def test_autograd_s_own_references_stay_valid(scratch):
    weight = torch.randn(8, requires_grad=True)
    x = torch.randn(8)
    expected = x.clone()
    product = weight * x  # keeps x for the backward
    ops = ActivationOps(CpuDevice(), scratch)
    ops.save(SAVE, context_of(x))
    ops.fetch(FETCH, context_of(x))
    product.sum().backward()
    assert torch.equal(weight.grad, expected)


def test_nothing_to_save_is_fine(scratch):
    ops = ActivationOps(CpuDevice(), scratch)
    ops.save(SAVE, context_of())
    ops.fetch(FETCH, context_of())
    assert ops.bytes_up == 0
