"""What a forward leaves on a model is that of the batch, however it is cut; what crosses a layer there is its own."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wrapped.loops import gradients, planned_in, wrapped
from wrapped.test_side_effects import Net, X, square

Body = Callable[["Leaving", Tensor], Tensor]


class Leaving(Net):
    """A net whose forward is ``body``."""

    def __init__(self, body: Body):
        super().__init__()
        self.body, self.norm = body, nn.LayerNorm(16)
        self.seen: list[Any] = []
        self.named: dict[str, Any] = {}
        self.calls, self.skip = 0, None
        self.register_buffer("mean", torch.zeros(16))

    def trunk(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def attribute(net: Any, x: Tensor) -> Tensor:
    hidden = net.trunk(net.embed(x))
    net.last = hidden.detach()
    return net.head(hidden)


def appended(net: Any, x: Tensor) -> Tensor:
    hidden = net.trunk(net.embed(x))
    net.seen.append(hidden.detach())
    return net.head(hidden)


def in_dict(net: Any, x: Tensor) -> Tensor:
    hidden = net.trunk(net.embed(x))
    net.named["hidden"] = hidden.detach()
    return net.head(hidden)


def counted(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return net.head(net.trunk(net.embed(x)))


def buffer_replaced(net: Any, x: Tensor) -> Tensor:
    hidden = net.trunk(net.embed(x))
    net.mean = hidden.detach().mean((0, 1))
    return net.head(hidden)


def buffer_written(net: Any, x: Tensor) -> Tensor:
    hidden = net.trunk(net.embed(x))
    net.mean.copy_(hidden.detach().mean((0, 1)))
    return net.head(hidden)


def buffer_crosses(net: Any, x: Tensor) -> Tensor:
    hidden = net.embed(x)
    net.mean.copy_(hidden.detach().mean((0, 1)))
    return net.head(net.trunk(hidden) + net.mean.clone())


def attribute_crosses(net: Any, x: Tensor) -> Tensor:
    net.skip = net.embed(x)
    return net.head(net.trunk(net.skip) + net.skip)


def attribute_crosses_and_goes(net: Any, x: Tensor) -> Tensor:
    net.skip = net.embed(x)
    output = net.head(net.trunk(net.skip) + net.skip)
    net.skip = None
    return output


def attribute_crosses_without_history(net: Any, x: Tensor) -> Tensor:
    net.skip = net.embed(x).detach()
    output = net.head(net.trunk(net.skip) + (0 if net.skip is None else net.skip))
    net.skip = None
    return output


def pushed_and_popped(net: Any, x: Tensor) -> Tensor:
    net.seen.append(net.embed(x))
    return net.head(net.trunk(net.seen[-1]) + net.seen.pop())


def hung_on_layers(net: Any, x: Tensor) -> Tensor:
    """Hooks for the call, with a value a row in them, as PEFT's for activated LoRA."""
    rows = x.detach().amax((1, 2), keepdim=True)
    hooks = [layer.register_forward_pre_hook(lambda m, given: (given[0] * rows,)) for layer in net.layers]
    output = net.head(net.trunk(net.embed(x)))
    for hook in hooks:
        hook.remove()
    return output


def put_on_layers(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        layer.rows = x.detach().amax((1, 2), keepdim=True)
    output = net.head(net.trunk(net.embed(x)))
    for layer in net.layers:
        del layer.rows
    return output


def reading() -> Leaving:
    net = Leaving(put_on_layers)
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda module, given: (given[0] * module.rows,))
    return net


def made_once(net: Any, x: Tensor) -> Tensor:
    if not hasattr(net, "table"):
        net.table = torch.full((16,), 0.5)
    return net.head(net.trunk(net.embed(x) * net.table))


def plainly(net: Any, x: Tensor) -> Tensor:
    return net.head(net.trunk(net.embed(x)))


def of_norm(net: Any) -> nn.Module:
    return net.norm


def of_layer(net: Any) -> nn.Module:
    return net.layers[1]


def of_inner(net: Any) -> nn.Module:
    return net.layers[1].up


def hooked(where: Callable[[Any], nn.Module], *, appends: bool) -> Callable[[], Leaving]:
    def make() -> Leaving:
        net = Leaving(plainly)
        seen, named = net.seen, net.named
        if appends:
            where(net).register_forward_hook(lambda module, given, output: seen.append(output.detach()))
        else:
            where(net).register_forward_hook(lambda module, given, output: named.update(it=output.detach()))
        return net

    return make


BODIES = [
    *(
        attribute,
        appended,
        in_dict,
        counted,
        buffer_replaced,
        buffer_written,
        buffer_crosses,
        attribute_crosses,
    ),
    *(attribute_crosses_and_goes, attribute_crosses_without_history, pushed_and_popped, hung_on_layers),
]
MEMBERS: dict[str, Callable[[], Leaving]] = {
    **{body.__name__: (lambda body=body: Leaving(body)) for body in BODIES},
    "put_on_layers": reading,
    **{f"appended_{w.__name__}": hooked(w, appends=True) for w in (of_norm, of_layer, of_inner)},
    **{f"named_{w.__name__}": hooked(w, appends=False) for w in (of_norm, of_layer, of_inner)},
}


def leavings(net: nn.Module) -> dict[str, Any]:
    names = ("last", "seen", "named", "calls", "skip", "mean", "table")
    return {name: getattr(net, name) for name in names if hasattr(net, name)}


def assert_alike(one: Any, other: Any) -> None:
    if isinstance(other, Tensor):
        assert torch.equal(one.detach(), other.detach())
    elif isinstance(other, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_alike(one[key], value)
    else:
        assert one == other


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("settings", [{}, {"activations": "recompute", "slots": 2, "device": "emulated:1"}])
@pytest.mark.parametrize("member", MEMBERS)
def test_leavings_are_those_of_the_batch(
    member: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, streamed = made(MEMBERS[member]), made(MEMBERS[member])
    with wrapped(streamed, microbatches=3, **settings), caplog.at_level(logging.WARNING, "outsize"):
        for scale in (1, 2):
            square(plain(X * scale)).backward()
            square(streamed(X * scale)).backward()
            assert_alike(leavings(streamed), leavings(plain))
        assert_alike(gradients(streamed), gradients(plain))
    assert sum("batches go whole" in record.message for record in caplog.records) == 1


def test_what_is_left_from_a_later_call_on_is_that_of_the_batch() -> None:
    plain, streamed = made(lambda: Leaving(plainly)), made(lambda: Leaving(plainly))
    with wrapped(streamed, microbatches=2):
        square(streamed(X)).backward()
        for net in (plain, streamed):
            seen = net.seen
            net.layers[2].register_forward_hook(
                lambda m, given, output, seen=seen: seen.append(output.detach())
            )
        streamed(X), plain(X)
        assert_alike(leavings(streamed), leavings(plain))


def test_what_is_made_once_leaves_batches_cut(caplog: pytest.LogCaptureFixture) -> None:
    net = made(lambda: Leaving(made_once))
    with wrapped(net, microbatches=2), caplog.at_level(logging.WARNING, "outsize"):
        square(net(X)).backward()
        square(net(X)).backward()
    assert not [record for record in caplog.records if "batches go whole" in record.message]


class Counting(Net):
    """With a norm that counts, behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("size", [1, 2])
def test_running_statistics_are_those_of_a_loop_over_microbatches(size: int) -> None:
    plain, streamed = made(Counting), made(Counting)
    with planned_in(size), wrapped(streamed, microbatches=2):
        for _ in range(2):
            for part in X.split(2):
                (square(plain(part)) / 2).backward()
            square(streamed(X)).backward()
        assert_alike(dict(streamed.named_buffers()), dict(plain.named_buffers()))
