"""A call of a wrapped model: its batch in microbatches, what it may ask for, and gradients of its inputs.

The batch size is the first dimension of the main input (``model.main_input_name``, else the first tensor). Every tensor
that begins with a dimension of that size, however deep it is nested, is cut along it; everything else goes to every
microbatch as it is.

A loss is taken to be a mean over targets, as Hugging Face models compute it. The losses of microbatches are added after
a division by ``targets of the batch / targets of the microbatch``, which is the token-weighted mean, and the loss of
the full batch. Where the caller passes ``num_items_in_batch`` the model divides by that itself, and losses only add up.

What a call may not ask for is refused before anything is computed. The caller's graph ends at the call: each microbatch
gets leaves of its own for tensors that train (vectors in the place of tokens, a prompt), and what arrives there is put
together for the node behind the outputs, which hands it on.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.errors import ConfigError, DataError

_log = logging.getLogger(__name__)
IGNORED = -100
# Where tokens stand: [B, S], or [3, B, S] in models that take images.
POSITIONS, POSITIONS_OF_IMAGES = "position_ids", 3
# What transformers calls main inputs, where a model does not say which one is its own.
_MAIN = ("input_ids", "inputs_embeds", "input_values", "pixel_values", "inputs")


def main_input(inputs: Mapping[str, Any], name: str | None) -> Tensor:
    """Return the tensor whose first dimension is the batch.

    Raises:
        DataError: there is no tensor with a dimension, or an empty batch.
    """
    named = [inputs.get(candidate) for candidate in (name, *_MAIN) if candidate is not None]
    for leaf in (*named, *torch_private.leaves_of(dict(inputs))):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            if not len(leaf):
                raise DataError("the batch is empty; leave the call out")
            return leaf
    raise DataError("the model is called without any tensor that has a batch dimension")


def sizes_of(num_rows: int, count: int) -> tuple[int, ...]:
    """Rows of at most ``count`` microbatches, as even as can be, the larger ones first."""
    count = min(count, num_rows)
    return tuple(num_rows // count + (index < num_rows % count) for index in range(count))


def cut(inputs: Mapping[str, Any], num_rows: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the inputs of each microbatch; tensors are views."""
    if len(sizes) == 1:
        return [dict(inputs)]
    parts = []
    start = 0
    for size in sizes:

        def rows(name: str, leaf: Tensor, start: int = start, size: int = size) -> Tensor:
            across = rows_dim(name, leaf, num_rows)
            return leaf if across is None else leaf.narrow(across, start, size)

        parts.append(
            {n: torch_private.map_only(Tensor, partial(rows, n), value) for n, value in inputs.items()}
        )
        start += size
    return parts


def rows_dim(name: str, tensor: Tensor, num_rows: int) -> int | None:
    """Return the dimension of an input of that name that counts the rows of the batch; None where it has none.

    It is the first, but for positions in several directions, [directions, B, S].
    """
    dim = 1 if name == POSITIONS and tensor.dim() == POSITIONS_OF_IMAGES else 0
    return dim if tensor.dim() > dim and tensor.shape[dim] == num_rows else None


def divisors(parts: Sequence[Mapping[str, Any]], sizes: Sequence[int], shifted: bool) -> tuple[float, ...]:
    """Return what the loss of each microbatch is divided by before they are added.

    A microbatch without a single target weighs nothing: infinity. Where the whole batch has none, its loss is what the
    model makes of it, usually NaN.

    Args:
        parts: inputs of the microbatches.
        sizes: their rows, which count where there are no integer labels.
        shifted: whether the first label of a sequence is no target, as where the next token is predicted.
    """
    if len(parts) == 1 or parts[0].get("num_items_in_batch") is not None:
        return (1.0,) * len(parts)
    counts = _targets(parts, sizes, shifted)
    total = sum(counts)
    if not total:
        return (1.0,) * len(parts)
    return tuple(total / count if count else float("inf") for count in counts)


def num_targets(parts: Sequence[Mapping[str, Any]], sizes: Sequence[int], shifted: bool) -> int:
    """Return the targets of all microbatches, see `divisors`."""
    return sum(_targets(parts, sizes, shifted))


def _targets(parts: Sequence[Mapping[str, Any]], sizes: Sequence[int], shifted: bool) -> list[int]:
    return [_num_targets(part, size, shifted) for part, size in zip(parts, sizes, strict=True)]


def _num_targets(part: Mapping[str, Any], num_rows: int, shifted: bool) -> int:
    already = part.get("shift_labels")
    labels = part.get("labels") if already is None else already
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return num_rows
    if shifted and already is None and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())


# What models of transformers are asked for with all that goes from unit to unit.
HIDDEN = "output_hidden_states"


def check_call(model: nn.Module, inputs: Mapping[str, Any], *, cached: bool, keeps: bool) -> None:
    """Check that a call is given values, and that a backward can follow where one may.

    Raises:
        ConfigError: neither is so.
    """
    if empty := [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_meta]:
        raise ConfigError(f"{empty[0]} is on meta, a shape without values; call the model with values")
    hooks = torch_private.has_saving_hooks() and "saved_tensors_hooks (save_on_cpu, a checkpoint)"
    mode = torch_private.is_watched() and "a TorchDispatchMode (a counter of FLOPs)"
    for each in filter(None, (hooks, mode)):
        say_once(
            f"{each} around a call of a wrapped model sees nothing of its layers, which compute in other threads; what "
            "is kept for their backward, and where, is `activations` of outsize.wrap"
        )
    if keeps and getattr(inputs.get("attention_mask"), "requires_grad", False):
        say_once(
            "a mask that trains has attention take another kernel with a graph than without one: where layers are "
            "recomputed, outputs differ from the plain model's in last bits; activations=keep has its bits"
        )
    if keeps and cached:
        raise ConfigError(
            "a cache of keys and values would be filled again in the recompute of a backward: use torch.no_grad() "
            "with use_cache or past_key_values"
        )


def check_thread() -> None:
    """Check that the calling thread does nothing to operations that layers, in other threads, would not have.

    Raises:
        ConfigError: it does.
    """
    if what := torch_private.transforming():
        raise ConfigError(
            f"{what} around a call of a wrapped model does not reach its layers, which compute in other threads: use "
            "it over the model before outsize.wrap, or within the forward of a layer"
        )


@cache
def say_once(text: str) -> None:
    """Warn of something once in a process."""
    _log.warning(text)


def check_returns(model: nn.Module, inputs: Mapping[str, Any], *, into_inputs: bool) -> None:
    """Check that a call on several workers asks for nothing that they move.

    Raises:
        ConfigError: it asks for hidden states, or for gradients of its inputs.
    """
    if into_inputs:
        raise ConfigError(
            "gradients of inputs (a tensor with requires_grad, such as inputs_embeds) are not had from several "
            "workers; use one device, or detach() the input"
        )
    asked = inputs.get(HIDDEN)
    config = getattr(model, "config", None)
    if getattr(config, HIDDEN, False) if asked is None else asked:
        raise ConfigError(
            "output_hidden_states: what units hand on moves from worker to worker, and is gone when the model returns; "
            "use one device"
        )


def inputs_that_train(inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors in the inputs of a model whose gradients the caller wants."""
    return [leaf for leaf in torch_private.leaves_of(dict(inputs)) if _trains(leaf)]


class InputGradients:
    """The inputs of a call whose gradients the caller wants.

    Attributes:
        given: the tensors, as the caller has them.
        parts: the microbatches, with leaves in the place of these tensors.
    """

    def __init__(self, inputs: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        positions = [at for at, leaf in enumerate(torch_private.leaves_of(dict(inputs))) if _trains(leaf)]
        self.given = inputs_that_train(inputs)
        self.parts: list[dict[str, Any]] = []
        self._leaves: list[list[Tensor]] = [[] for _ in positions]
        for part in parts:
            leaves, structure = torch_private.flatten(dict(part))
            for made, at in zip(self._leaves, positions, strict=True):
                leaves[at] = leaves[at].detach().requires_grad_()
                made.append(leaves[at])
            self.parts.append(torch_private.unflatten(leaves, structure))
        self._across = [
            next((d for d in range(whole.dim()) if whole.shape[d] != made[0].shape[d]), None)
            for whole, made in zip(self.given, self._leaves, strict=True)
        ]

    def let_go(self) -> None:
        """Hold no longer what the caller has given."""
        self.given = []

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of each of them, where one has arrived."""
        return [_joined(made, across) for made, across in zip(self._leaves, self._across, strict=True)]


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _joined(leaves: Sequence[Tensor], across: int | None) -> Tensor | None:
    """The gradient of a tensor from those of its parts: rows one behind the other, else the sum."""
    arrived = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not arrived:
        return None
    if across is not None:
        return torch.cat(
            [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], across
        )
    total = arrived[0]
    for gradient in arrived[1:]:
        total = total + gradient
    return total
