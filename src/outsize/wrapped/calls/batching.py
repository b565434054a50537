"""A batch cut into microbatches, and the weight of each in the loss of the whole.

The batch size is the first dimension of the main input (``model.main_input_name``, else the first tensor). Every tensor
that begins with a dimension of that size, however deep it is nested, is cut along it; everything else goes to every
microbatch as it is.

A loss is taken to be a mean over targets, as Hugging Face models compute it. The losses of microbatches are added after
a division by ``targets of the batch / targets of the microbatch``, which is the token-weighted mean, and the loss of
the full batch. Where the caller passes ``num_items_in_batch`` the model divides by that itself, and losses only add up.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from outsize.compat import torch_private
from outsize.errors import DataError

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
