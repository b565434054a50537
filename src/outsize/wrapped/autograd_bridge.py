"""From the caller's autograd graph into the streamed backward, and no further.

What a wrapped model returns has one node for its history. When the caller's backward reaches it, the gradients of the
outputs are dealt out to the microbatches and the backward program runs; gradients of parameters come home by
themselves. Nothing but this node holds the activations of a forward: if it goes, because no backward follows or an
error is in the air, they go.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import wants_gradient, will_run
from outsize.errors import ConfigError
from outsize.wrapped.batching import InputGradients
from outsize.wrapped.outputs import Joined, Roots, loss_of

Backward = Callable[[Roots, Tensor | None], None]


class AutogradBridge:
    """One forward that a backward may follow.

    Args:
        joined: the output.
        backward: runs the backward from roots and their gradients, and is given the model's loss where nothing else of
            the output has one.
        abandon: called when no backward will follow.
        parameters: that train.
        inputs: tensors whose gradients the caller wants as well.
    """

    _backward: Backward | None = None  # of a bridge that was not made whole, which tracers leave behind

    def __init__(
        self,
        joined: Joined,
        backward: Backward,
        abandon: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        inputs: InputGradients,
    ) -> None:
        self._joined = joined
        self._inputs = inputs
        self._shown: list[weakref.ref[Tensor]] = []
        self._losses: list[Tensor | None] = []  # the model's loss among the outputs, without history
        self._parameters = parameters
        self._backward = backward
        self._abandon = abandon

    @property
    def pending(self) -> bool:
        """Whether a backward may still follow."""
        return self._backward is not None

    def output(self) -> Any:
        """Return the output with its history."""
        positions = self._joined.differentiable
        values = tuple(self._joined.leaves[position] for position in positions)
        anchor = torch.zeros((), requires_grad=True)
        tensors = (*self._inputs.given, *self._parameters)
        made = _Node.apply(anchor, self, values, *tensors) if values else ()  # type: ignore[no-untyped-call]
        self._parameters = ()
        self._inputs.let_go()
        self._shown = [weakref.ref(tensor) for tensor in made]
        output = self._joined.build(dict(zip(positions, made, strict=True)))
        loss = loss_of(output)
        self._losses = [loss.detach() if loss is tensor else None for tensor in made]
        self._joined.forget_values()
        return output

    def descend(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Go backward from the gradients of the outputs that have a history; returns those of the inputs.

        Raises:
            RuntimeError: for the second time; activations are gone after the first.
            ConfigError: the gradient of another output is waited for.
        """
        if self._backward is None:
            raise RuntimeError(
                "backward through a wrapped model for the second time: its activations are gone. Add the losses up "
                "and call backward once, or run the forward again"
            )
        for tensor, gradient in zip((each() for each in self._shown), gradients, strict=True):
            if tensor is not None and gradient is None and wants_gradient(tensor):
                raise ConfigError(
                    "retain_grad() or a hook asks for the gradient of an output (logits, hidden states) from which the "
                    "model itself took the loss: call it without labels, and take the loss of that output"
                )
        backward, self._backward = self._backward, None
        used = [loss for loss, gradient in zip(self._losses, gradients, strict=True) if gradient is not None]
        backward(self._joined.roots(gradients), used[0] if len(used) == 1 else None)
        return self._inputs.gradients()

    def __del__(self) -> None:
        if self._backward is not None:
            self._abandon()


class _Node(torch.autograd.Function):
    """The history of what a wrapped model returns. Values come in a tuple, so that results are no views of them.

    After them come the inputs of the model that have a history of their own, and its parameters: these only so that
    whoever asks for their gradients comes by here, and is told.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        passage: AutogradBridge,
        values: tuple[Tensor, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "backward(create_graph=True) asks for gradients of gradients, for which a wrapped model keeps no "
                "graph: leave it out, or take such a loss of the model before outsize.wrap"
            )
        anchor, *others = ctx.next_functions
        if not will_run(anchor[0]):  # nobody can ask for that by itself
            raise ConfigError(
                "torch.autograd.grad and backward(inputs=...) ask for gradients of some tensors alone, and those of a "
                "wrapped model come home all together: use loss.backward(), which leaves them in parameter.grad"
            )
        found = ctx.passage.descend(gradients)
        return (None, None, None, *found, *(None for _ in others[len(found) :]))


def is_pending(passage: "weakref.ref[AutogradBridge] | None") -> bool:
    """Return whether a forward is still referred to, and its backward may still come."""
    bridge = passage() if passage is not None else None
    return bridge is not None and bridge.pending
