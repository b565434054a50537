"""What a model's own loss is, judged on what it made of made-up logits."""

from typing import Any

import torch
from torch import Tensor

from outsize.runtime.forward.head_loss import shift_labels
from outsize.runtime.forward.microbatch import loss_of


def is_plain(head_output: Any, output: Any, labels: Tensor | None) -> bool:
    """Whether nothing but a shifted mean cross-entropy follows the head, judged on made-up logits."""
    logits = getattr(output, "logits", None)
    if not isinstance(head_output, Tensor) or not isinstance(logits, Tensor) or labels is None:
        return False
    if logits.shape[:-1] != labels.shape or labels.dim() < 2:  # a label for each row, say
        return False
    if logits.shape != head_output.shape or not torch.equal(logits, head_output):
        return False
    ours = _cross_entropy(logits, shift_labels(labels))
    return bool(torch.isclose(ours, loss_of(output).float(), rtol=1e-4, atol=1e-5))


def is_shifted(output: Any, labels: Tensor | None) -> bool:
    """Whether the loss is nearer to that of the next token than to that of the token in its place.

    Where virtual tokens stand before the others, the first label follows one of them and is a target, shifted or not.
    """
    logits = getattr(output, "logits", None)
    if labels is None or not isinstance(logits, Tensor) or labels.dim() < 2:
        return True
    if logits.shape[:-1] != labels.shape:
        return logits.dim() < 3 or logits.shape[1] <= labels.shape[1]
    loss = loss_of(output).float()
    here, following = _cross_entropy(logits, labels), _cross_entropy(logits, shift_labels(labels))
    return bool((loss - following).abs() <= (loss - here).abs())


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    )
