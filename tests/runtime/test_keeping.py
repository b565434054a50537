import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outsize.planner.program.program import Kind
from outsize.runtime.forward.saved_tensors import Keeping, Shown
from planner.layouts import first_kept
from runtime.engines import contexts, engine_over
from runtime.test_engine import Breaking, batches, make


def look() -> None:
    pass


def test_weights_are_unpacked_from_where_they_lie_then():
    """Other weights lie in the slot by the time of the backward, and the unit's own in another one."""
    first, second = torch.randn(12), torch.empty(16)
    where = second[4:]
    weight = nn.Parameter(first[:12].view(3, 4))
    expected = weight.detach().clone()
    inputs = torch.randn(2, 4, requires_grad=True)
    frozen = torch.empty(3)
    keeping = Keeping({7: (frozen, first)}, {7: (frozen, where)}.__getitem__, look)
    with keeping.hooks():
        out = nn.functional.linear(inputs, weight)
    second[4:] = first
    first.fill_(torch.nan)
    out.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, torch.ones(2, 3) @ expected)


def test_weights_of_another_type_are_shown_as_they_were_saved():
    plane = torch.randn(8)
    keeping = Keeping({0: (plane,)}, lambda unit: (plane,), look)
    for view in (plane[2:6].view(2, 2).t(), plane.view(torch.int32)[3:], plane[::3]):
        packed = keeping._pack(view)
        assert not isinstance(packed, Tensor | Shown)
        shown = keeping._unpack(packed)
        assert torch.equal(shown, view)
        assert (shown.dtype, shown.stride(), shown.data_ptr()) == (view.dtype, view.stride(), view.data_ptr())


def test_what_is_saved_shares_its_memory_and_holds_no_graph():
    plane, inputs = torch.randn(4), torch.randn(3, requires_grad=True)
    keeping = Keeping({0: (plane,)}, lambda unit: (plane,), look)
    out = inputs.tanh()
    packed = keeping._pack(out)
    assert isinstance(packed, Shown)
    shown = keeping._unpack(packed)
    assert (shown.data_ptr(), shown.grad_fn) == (out.data_ptr(), None)


@pytest.mark.parametrize(("call", "op"), [(1, "FK 2.0@w0"), (2, "FK 2.1@w0"), (3, "FK 3.0@w0")])
def test_a_forward_that_fails_leaves_nothing_of_what_was_kept(call: int, op: str, tmp_path: Path):
    model = make(Breaking)
    model.break_at = call if call < 3 else 0
    seen: list[weakref.ref] = []

    def remember(module: nn.Module, args: tuple, out: Tensor) -> None:
        seen.append(weakref.ref(out))

    for block in model.blocks:
        block.norm.register_forward_hook(remember)
    kept = (0, *[2] * (len(model.blocks)), 0)
    with engine_over(model, tmp_path, microbatches=2, kept=first_kept(kept, 2)) as rig:
        assert any(op.kind is Kind.FORWARD_KEEP for op in rig.engine.plan.program)
        (context,) = contexts(batches(2, steps=1))
        handle = rig.engine.begin(context)
        if model.break_at:
            with pytest.raises(Exception, match=f"raised in {op}, unit blocks.1: IndexError: planted"):
                rig.engine.forward_backward_done(handle)
        else:
            rig.engine.finish(handle)
    del handle, context
    assert seen
    assert [ref() for ref in seen if ref() is not None] == []
