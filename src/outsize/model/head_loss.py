"""Cross-entropy of a head over chunks of tokens: the logits of the whole microbatch never exist.

For vocabulary V, width d and chunks of C tokens the working set is C × V logits and their gradient instead of
B × S × V. Each chunk's backward runs inside the forward and leaves gradients in the head's parameters. Written as a
loop over the model's own head module, so a bias or a quantised head is served alike, and torch 2.10 suffices;
`torch.nn.functional.linear_cross_entropy` (2.13) does the same for plain linear heads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.errors import ModelError

IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Return for each position of ``labels`` [B, S] the token that a causal model predicts there, flat [B × S]."""
    targets = labels.new_full(labels.shape, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    return targets.reshape(-1)


def chunked_loss_alone(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, divisor: float, chunk_tokens: int
) -> Tensor:
    """Return the loss of `chunked_head_loss`, to the bit, without its backward."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        for start in range(0, rows.shape[0], chunk_tokens):
            logits = head(rows[start : start + chunk_tokens]).float()
            wanted = targets[start : start + chunk_tokens]
            loss += F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
    return loss


def chunked_head_loss(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, divisor: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over all targets and divided by ``divisor``, with its backward.

    Args:
        head: maps [C, d] to logits [C, V]; gradients of its parameters accumulate.
        hidden: [B, S, d] or [B × S, d], without history.
        targets: [B × S], `IGNORE_INDEX` where nothing is predicted.
        divisor: the number of targets in the whole batch, so that microbatches add up to a token-weighted mean.
        chunk_tokens: C, tokens per chunk.

    Returns:
        The loss, an fp32 scalar, and the gradient of ``hidden``, of its shape and dtype.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    gradient = torch.empty_like(rows)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, rows.shape[0], chunk_tokens):
        piece = rows[start : start + chunk_tokens].detach().requires_grad_()
        wanted = targets[start : start + chunk_tokens]
        with torch.enable_grad():
            logits = head(piece).float()
            total = F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
        del logits  # the backward needs their softmax only, and makes two more of that size
        total.backward()  # type: ignore[no-untyped-call]
        loss += total.detach()
        assert piece.grad is not None
        gradient[start : start + chunk_tokens] = piece.grad
    return loss, gradient.reshape(hidden.shape)


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output: its ``loss``, or its first element.

    Raises:
        ModelError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError("the model returned no scalar loss; give it labels, or set train.loss=chunked")
    return loss
