from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.runtime.forward.short_recompute import Shortcuts, Trial
from outsize.runtime.forward.unit_facts import Needed
from outsize.runtime.forward.unit_visit import Roots, roots_of
from outsize.runtime.trial.live_bytes import LiveBytes

WIDTH = 8


class Block(nn.Module):
    """Ends as today's blocks do, or in another way."""

    def __init__(self, ending: str = "product") -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=ending == "bias")
        self.norm = nn.LayerNorm(WIDTH)
        self.ending = ending

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(silu(self.up(self.norm(x))))
        if self.ending == "norm":
            hidden = self.norm(hidden)
        if self.ending == "choice" and bool(hidden.isinf().any()):
            hidden = hidden.clamp(-1, 1)
        return x + hidden * 0.5


class Products(TorchDispatchMode):
    """Counts products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        computes = all(arg.device.type == "cpu" for arg in args if isinstance(arg, Tensor))
        self.count += computes and func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def tried(call: Callable[[], Tensor]) -> Needed | None:
    trial = Trial([], [])
    live = LiveBytes(torch.empty(1).untyped_storage())
    live.ops = trial.ops
    with live, trial.hooks():
        call()
    return trial.needed()


def rooted(block: nn.Module, x: Tensor) -> Roots:
    """Run it, and hold no output."""
    return roots_of([block(x)])


def gradients(block: nn.Module, roots: Roots, x: Tensor) -> list[Tensor]:
    (root,) = roots
    assert root is not None
    torch.autograd.backward([root], [torch.ones_like(x)])
    found = [*(parameter.grad for parameter in block.parameters()), x.grad]
    for tensor in (*block.parameters(), x):
        tensor.grad = None
    return found


def look() -> None:
    pass


@pytest.mark.parametrize("ending", ["product", "bias"])
def test_what_follows_the_last_saved_tensor_is_not_computed_and_no_gradient_changes(ending: str):
    torch.manual_seed(0)
    block, x = Block(ending), torch.randn(2, 3, WIDTH, requires_grad=True)
    want = gradients(block, rooted(block, x), x)
    needed = tried(partial(block, x))
    assert needed is not None
    with Products() as products:
        roots = Shortcuts({5: needed}, look).run(5, partial(rooted, block, x))
    assert products.count == 1  # `up`, not `down`
    assert all(map(torch.equal, gradients(block, roots, x), want))


@pytest.mark.parametrize("ending", ["norm", "choice"])
def test_a_forward_that_ends_in_another_way_is_run_in_full(ending: str):
    assert tried(partial(Block(ending), torch.randn(2, WIDTH, requires_grad=True))) is None


class Restless(Block):
    """Runs what no trial has seen when told to."""

    more = ""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.more == "saves":
            return out * torch.sigmoid(out)
        if self.more == "looks":
            return out if bool(out.sum() > 0) else out + 0
        if self.more == "less":
            return x + 1.0
        return out


@pytest.mark.parametrize("more", ["saves", "looks", "less"])
def test_what_was_not_in_the_trial_is_run_again_in_full(more: str):
    """Even then the gradients are those of a plain run; and no second time is lost on it."""
    torch.manual_seed(0)
    block, x = Restless(), torch.randn(3, WIDTH, requires_grad=True)
    needed = tried(partial(block, x))
    assert needed is not None
    block.more = more
    want = gradients(block, rooted(block, x), x)
    shortcuts = Shortcuts({0: needed}, look)
    calls = []

    def call() -> Roots:
        calls.append(None)
        return rooted(block, x)

    for _ in range(2):
        got = gradients(block, shortcuts.run(0, call), x)
        assert [g is None for g in got] == [w is None for w in want]
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True) if g is not None)
    assert len(calls) == (2 if more == "less" else 3)


class Keeper(Block):
    """Keeps what a part of it returned, as code does that looks at activations."""

    def keep(self, *seen: Any) -> None:
        self.seen = seen[-1].detach()


@pytest.mark.parametrize("part", ["down", ""])
def test_what_someone_keeps_of_a_recompute_has_been_computed(part: str):
    torch.manual_seed(0)
    block, x = Keeper(), torch.randn(3, WIDTH, requires_grad=True)
    needed = tried(partial(block, x))
    assert needed is not None
    block.get_submodule(part).register_forward_hook(block.keep)
    want = gradients(block, rooted(block, x), x)
    kept = block.seen
    del block.seen
    torch.full((3, WIDTH), float("nan"))  # what memory that nobody has written to may well hold
    shortcuts = Shortcuts({0: needed}, look)
    assert all(map(torch.equal, gradients(block, shortcuts.run(0, partial(rooted, block, x)), x), want))
    assert torch.equal(block.seen, kept)


def test_a_unit_that_was_not_tried_is_run_in_full():
    weight = torch.randn(2, 2, requires_grad=True)
    x = torch.randn(2, 2)
    assert torch.equal(Shortcuts({}, look).run(0, lambda: linear(x, weight)), linear(x, weight))


def test_an_error_of_the_unit_leaves_no_hook_and_no_mode_behind():
    block, x = Block(), torch.randn(2, WIDTH, requires_grad=True)
    needed = tried(partial(block, x))
    assert needed is not None

    def fails() -> Tensor:
        block(x)
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        Shortcuts({0: needed}, look).run(0, fails)
    assert not block(x).isnan().any()
