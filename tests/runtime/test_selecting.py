from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from outsize.planner.program.stages import Choice
from outsize.runtime.forward.saved_tensors import (
    ATTENTION,
    PRODUCTS,
    DivergedError,
    Selected,
    is_kept_product,
)
from planner.layouts import first_kept
from reference import Recipe
from runtime.engines import contexts, engine_over
from runtime.engines import train as train_engine
from runtime.oddities import Sparse
from runtime.test_engine import batches, make


class Counting(TorchDispatchMode):
    """Counts what is computed below it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Projections, attention, a product of its output, and a product that ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, after, last = self.weights
        q, k = (linear(x, weight).view(1, -1, 2, 4).transpose(1, 2) for weight in (query, key))
        mixed = scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).reshape(-1, 8)
        return linear(linear(mixed, after).tanh(), last)


def gradients(block: nn.Module, x: Tensor, selected: Selected | None) -> tuple[list[Tensor], Counter[Any]]:
    """Gradients of a forward and a recompute, and what the recompute computed."""
    if selected is not None:
        with selected.recording():
            out = block(x)
        assert out.requires_grad
        selected.rewind()
    with Counting() as counting:
        if selected is None:
            out = block(x)
        else:
            with selected.replaying():
                out = block(x)
        counts = counting.counts.copy()
    return list(torch.autograd.grad(out.square().sum(), [x, *block.parameters()])), counts


@pytest.mark.parametrize(("most", "attention", "products"), [(0, 0, 4), (2, 0, 2), (3, 0, 1), (None, 0, 0)])
def test_a_recompute_computes_what_was_not_kept_and_ends_with_the_same_bits(
    most: int | None, attention: int, products: int
):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(6, 8, requires_grad=True)
    want, counts = gradients(block, x, None)
    assert (sum(counts[op] for op in ATTENTION), sum(counts[op] for op in PRODUCTS)) == (1, 4)
    got, counts = gradients(block, x, Selected(most))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    found = (sum(counts[op] for op in ATTENTION), sum(counts[op] for op in PRODUCTS))
    assert found == (attention, products)


def test_a_forward_that_selects_saves_nothing_else():
    block, x = Block(), torch.randn(6, 8, requires_grad=True)
    selected = Selected(0)
    with selected.recording():
        out = block(x)
    assert sum(storage.nbytes() for storage in selected.held.storages()) == 6 * 8 * 4 + 6 * 2 * 4
    with pytest.raises(AssertionError, match="no backward"):
        out.sum().backward()


@pytest.mark.parametrize("in_place", [Tensor.tanh_, lambda out: out.add_(1)])
def test_memory_that_is_changed_in_place_is_not_kept(in_place: Any):
    selected = Selected(None)
    with selected.recording():
        in_place(linear(torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)))
    assert len(selected) == 0
    assert selected.held.storages() == []


def test_a_recompute_that_runs_other_operations_is_found_out():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    selected = Selected(None)
    with selected.recording():
        linear(x, weight)
    selected.rewind()
    with pytest.raises(DivergedError), selected.replaying():
        linear(x[:2], weight)
    selected.rewind()  # a second attempt finds nothing: half of it may have been handed out
    with pytest.raises(DivergedError), selected.replaying():
        linear(x, weight)


def test_a_recompute_whose_groups_end_elsewhere_is_found_out():
    x, experts = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 4)
    selected = Selected(None)
    with selected.recording():
        nn.functional.grouped_mm(x, experts, offs=torch.tensor([2, 6], dtype=torch.int32))
    selected.rewind()
    with pytest.raises(DivergedError), selected.replaying():
        nn.functional.grouped_mm(x, experts, offs=torch.tensor([3, 6], dtype=torch.int32))


def test_what_draws_random_numbers_leaves_the_generator_as_it_did(monkeypatch: pytest.MonkeyPatch):
    drop = torch.ops.aten.native_dropout.default
    monkeypatch.setattr("outsize.runtime.forward.saved_tensors.ATTENTION", frozenset({drop}))

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        x = torch.ones(64, requires_grad=True)
        return drop(x, 0.5, True)[0], torch.rand(4)

    selected = Selected(0)
    with selected.recording():
        want = run()
    selected.rewind()
    with selected.replaying():
        got = run()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("choice", [Choice.OFFLOAD_PRODUCTS, Choice.OFFLOAD])
def test_what_finds_no_room_is_recomputed(choice: Choice, tmp_path: Path):
    model, data = make(Sparse), batches(2, steps=2)
    blocks = len(model.blocks)
    kept = first_kept((0, *[2] * blocks, 0), 2, choice)
    with engine_over(model, tmp_path, microbatches=2, kept=kept, room_bytes=16) as rig:
        for context in contexts(data):
            rig.engine.finish(rig.engine.begin(context))
        assert rig.engine.activations.num_let_go == 2 * 2 * blocks
        assert rig.engine.activations.bytes_down == 0
        weights = {name: weight.clone() for name, weight in rig.weights().items()}
    recipe = Recipe(steps=2, schedule="constant", causal=False, max_grad_norm=0.0)
    want = reference.train(make(Sparse), data, recipe)
    assert all(torch.equal(weights[name], weight) for name, weight in want.weights.items())


@pytest.mark.parametrize("choice", [Choice.OFFLOAD_PRODUCTS, Choice.OFFLOAD])
def test_what_leaves_comes_back_byte_for_byte(choice: Choice, tmp_path: Path):
    model = make(Sparse)
    kept = first_kept((0, *[1] * len(model.blocks), 0), 1, choice)
    with engine_over(model, tmp_path, microbatches=1, kept=kept) as rig:
        (context,) = contexts(batches(1, steps=1))
        rig.engine.finish(rig.engine.begin(context))
        moved = rig.engine.activations
        assert moved.num_let_go == 0
        assert moved.bytes_down == moved.bytes_up > 0
    assert train_engine(make(Sparse), batches(1, 1), tmp_path / "again", kept=kept).losses


class Adapted(nn.Module):
    """A layer under an adapter of rank 4, in fp32 as PEFT has them, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = (nn.Parameter(torch.randn(64, width)) for width in (64, 64))
        self.a, self.b = nn.Parameter(torch.randn(4, 64)), nn.Parameter(torch.randn(64, 4))
        self.experts = nn.Parameter(torch.randn(2, 64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = linear(x, self.base) + 2.0 * linear(linear(x, self.a), self.b)
        ends = torch.tensor([5, x.shape[0]], dtype=torch.int32)
        mixed = torch.nn.functional.grouped_mm(x.tanh(), self.experts, offs=ends)
        return linear(torch.cat([mixed, mixed.relu()], -1), self.down).tanh()


def test_products_of_adapters_are_computed_again_and_those_of_experts_are_not():
    """What an adapter returns has as many elements as what its layer returns, in fp32, and takes next to nothing."""
    torch.manual_seed(0)
    block, x = Adapted(), torch.randn(12, 64, requires_grad=True)
    ops: Counter[bool] = Counter()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            ops[is_kept_product(func, args)] += func in PRODUCTS or "grouped_mm" in str(func)
            return func(*args, **(kwargs or {}))

    with Products():
        block(x)
    assert ops == {True: 4, False: 1}
    expected, _ = gradients(block, x, None)
    selected = Selected(None)
    found, computed = gradients(block, x, selected)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert computed[torch.ops.aten.mm.default] == 1
    assert not computed[torch.ops.aten._grouped_mm.default]
