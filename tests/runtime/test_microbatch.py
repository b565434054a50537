import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.errors import ModelError
from outsize.model.split import split
from outsize.model.tiled import loss_of
from outsize.model.walk import Boundaries
from outsize.runtime.forward.microbatch import MicrobatchRun
from runtime.oddities import Odd, batch

Reseed = Callable[[int, bool], None]


def nothing(unit: int, glue: bool) -> None:
    pass


def run_in_units(
    model: nn.Module,
    inputs: list[dict[str, Tensor]],
    tracked: bool = True,
    reseed: Reseed = nothing,
    graph: bool = False,
) -> list[Tensor]:
    """Run all microbatches layer-major, as the engine does; gradients add up in ``parameter.grad``."""
    parts = split(model)
    last = len(parts.modules) - 1
    with Boundaries(parts.modules) as boundaries:
        runs = [MicrobatchRun(model, each, (tracked,) * (last + 1), reseed) for each in inputs]
        forwards = boundaries.forwards
        for unit in range(last):
            for run in runs:
                run.forward(unit, forwards[unit], graph=graph)
        losses = [run.forward_backward(last, forwards[last], len(runs)) for run in runs]
        for unit in reversed(range(last)):
            for run in runs:
                run.backward(unit, forwards[unit])
        for run in runs:
            run.close()
    return losses


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def make(kind: Callable[[], nn.Module] = Odd) -> nn.Module:
    torch.manual_seed(3)
    return kind()


@pytest.mark.parametrize("graph", [False, True])
def test_one_microbatch_in_units_is_the_model_itself(graph: bool):
    plain, cut = make(), make()
    loss = plain(**batch()).loss
    loss.backward()
    (ours,) = run_in_units(cut, [batch()], graph=graph)
    assert ours.item() == loss.item()
    want, got = gradients(plain), gradients(cut)
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None
        else:
            # Used by several units: the same terms, added in another order.
            shared = name in ("gate", "embed.weight") or name.startswith("norm")
            assert torch.allclose(got[name], gradient, atol=1e-7 if shared else 0, rtol=0), name


def test_several_microbatches_add_up_in_order():
    plain, cut = make(), make()
    inputs = [batch(seed) for seed in range(3)]
    for each in inputs:
        (plain(**each).loss / 3).backward()
    run_in_units(cut, inputs)
    for name, gradient in gradients(plain).items():
        if gradient is not None:
            assert torch.allclose(gradients(cut)[name], gradient, atol=1e-7, rtol=0), name


def test_a_parameter_that_is_not_used_gets_no_gradient():
    model = make()
    run_in_units(model, [batch()])
    assert {name for name, gradient in gradients(model).items() if gradient is None} == {
        "blocks.3.linear.weight",
        "blocks.3.linear.bias",
    }


class Dropping(nn.Module):
    """Blocks and glue that draw random numbers, and keep what they drew."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.masks: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.masks.append(torch.rand(x.shape) > 0.5)
            return self.linear(x) * self.masks[-1]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.glue: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for block in self.blocks:
            self.glue.append(torch.rand(()))
            x = block(x) * self.glue[-1]
        return (x.square().mean(),)


def test_the_recompute_draws_what_the_forward_drew():
    model = make(Dropping)
    run_in_units(
        model,
        [{"x": torch.ones(3, 4)}],
        reseed=lambda unit, glue: torch.default_generator.manual_seed(2 * unit + glue),
    )
    for block in model.blocks[:2]:
        forward, again = block.masks
        assert torch.equal(forward, again)
    assert len(model.blocks[2].masks) == 1  # the last unit runs once
    assert not torch.equal(model.blocks[0].masks[0], model.blocks[1].masks[0])
    assert len(model.glue) == 3  # glue runs once
    assert len({float(value) for value in model.glue}) == 3


class Tuple(nn.Module):
    """The simplest chain: ``loss = head(block(block(x)))``."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, **options: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return (x.sum(),)


def test_without_targets_a_microbatch_weighs_nothing():
    model = make(Tuple)
    parts = split(model)
    with Boundaries(parts.modules) as boundaries:
        run = MicrobatchRun(model, {"x": torch.ones(1, 4)}, (True,) * 3, nothing)
        for unit in range(2):
            run.forward(unit, boundaries.forwards[unit])
        loss = run.forward_backward(2, boundaries.forwards[2], float("inf"))
        for unit in (1, 0):
            run.backward(unit, boundaries.forwards[unit])
        run.close()
    assert loss.item() == 0
    assert set(gradients(model).values()) == {None}


def test_below_what_trains_nothing_is_tracked():
    model = make(Tuple)
    model.blocks[0].requires_grad_(False)
    parts = split(model)
    with Boundaries(parts.modules) as boundaries:
        run = MicrobatchRun(model, {"x": torch.ones(1, 4)}, (False, True, True), nothing)
        for unit in range(2):
            run.forward(unit, boundaries.forwards[unit])
        run.drop(0)
        assert run.stored(1) == []  # its input carries no gradient
        run.forward_backward(2, boundaries.forwards[2], 1.0)
        run.backward(1, boundaries.forwards[1])
        run.close()
    got = gradients(model)
    assert got["blocks.0.weight"] is None
    assert got["blocks.1.weight"] is not None


def test_activations_are_gone_when_their_backward_has_run():
    """What a unit was called with lives from its forward to its backward, and no longer."""
    model = make(Tuple)
    parts = split(model)
    kept: list[weakref.ref[Any]] = []
    with Boundaries(parts.modules) as boundaries:

        def spy(unit: int) -> Callable[..., Any]:
            def forward(x: Tensor) -> Tensor:
                kept.append(weakref.ref(x.untyped_storage()))
                return boundaries.forwards[unit](x)

            return forward

        run = MicrobatchRun(model, {"x": torch.ones(1, 4)}, (True,) * 3, nothing)
        run.forward(0, spy(0))
        run.forward(1, spy(1))
        assert [len(run.stored(unit)) for unit in (0, 1)] == [0, 1]
        run.forward_backward(2, spy(2), 1.0)
        run.backward(1, spy(1))
        run.backward(0, spy(0))
        run.close()
    gc.collect()
    inputs = [ref() for ref in kept[1:4]]
    assert inputs == [None, None, None]


class InPlace(Tuple):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.linear(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))


def test_a_unit_that_changes_its_input_in_place_is_refused():
    with pytest.raises(ModelError, match="unit 0 changes its input in place"):
        run_in_units(make(InPlace), [{"x": torch.ones(1, 4)}])


class Twice(Tuple):
    def forward(self, x: Tensor, **options: Any) -> Any:
        for block in (self.blocks[0], self.blocks[0], self.blocks[1], self.blocks[2]):
            x = block(x)
        return (x.sum(),)


class Backwards(Tuple):
    def forward(self, x: Tensor, **options: Any) -> Any:
        for block in reversed(self.blocks):
            x = block(x)
        return (x.sum(),)


class Skips(Tuple):
    def forward(self, x: Tensor, **options: Any) -> Any:
        return (self.blocks[0](x).sum(),)


class OnceMore(Tuple):
    def forward(self, x: Tensor, **options: Any) -> Any:
        (loss,) = super().forward(x)
        return (self.blocks[0](x).sum() + loss,)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, "came to unit 0 where unit 1 was next"),
        (Backwards, "calls unit 1 after its last unit 2"),
        (Skips, "does not call its last unit, 2"),
        (OnceMore, "calls unit 0 after its last unit 2"),
    ],
)
def test_a_model_that_calls_its_units_otherwise_is_refused(kind: type[nn.Module], message: str):
    with pytest.raises(ModelError, match=message):
        run_in_units(make(kind), [{"x": torch.ones(1, 4)}])


def test_the_head_s_input_can_be_taken_and_its_gradient_given_back():
    plain, cut = make(Tuple), make(Tuple)
    x = torch.ones(2, 4)
    plain(x)[0].backward()
    parts = split(cut)
    with Boundaries(parts.modules) as boundaries:
        run = MicrobatchRun(cut, {"x": x}, (True,) * 3, nothing)
        for unit in range(2):
            run.forward(unit, boundaries.forwards[unit])
        hidden = run.head_input(2)
        assert not hidden.requires_grad
        leaf = hidden.requires_grad_()
        boundaries.forwards[2](leaf).sum().backward()
        run.backward_from_head_input(2, leaf.grad)
        for unit in (1, 0):
            run.backward(unit, boundaries.forwards[unit])
        run.close()
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(cut)[name], gradient), name


class TwoInputs(Tuple):
    class Head(nn.LayerNorm):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList((nn.Linear(4, 4), self.Head(4)))

    def forward(self, x: Tensor, **options: Any) -> Any:
        return (self.blocks[1](self.blocks[0](x), x).sum(),)


def test_a_head_with_several_inputs_has_no_input_to_take():
    model = make(TwoInputs)
    parts = split(model)
    with Boundaries(parts.modules) as boundaries:
        run = MicrobatchRun(model, {"x": torch.ones(1, 4)}, (True,) * 2, nothing)
        run.forward(0, boundaries.forwards[0])
        with pytest.raises(ModelError, match=r"called with 2 tensors; set train\.loss=model"):
            run.head_input(1)
        run.close()


class Bare:
    loss = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("output", "expected"),
    [({"loss": torch.tensor(1.0)}, 1.0), (Bare(), 2.0), ((torch.tensor([3.0]), 7), 3.0)],
)
def test_a_loss_is_found_where_models_put_it(output: object, expected: float):
    assert loss_of(output).item() == expected


@pytest.mark.parametrize("output", [{}, {"loss": None}, (), (torch.ones(2),), torch.ones(3), None])
def test_an_output_without_a_loss_is_an_error_that_says_what_to_try(output: object):
    with pytest.raises(ModelError, match=r"no scalar loss.*labels"):
        loss_of(output)
