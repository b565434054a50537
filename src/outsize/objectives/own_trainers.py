"""Losses that neither TRL nor transformers has a trainer for: of a batch of pairs, and of a teacher.

Sources: InfoNCE with the other pairs of the batch as negatives, van den Oord et al., arXiv:1807.03748; the loss on soft
targets, Hinton et al., arXiv:1503.02531.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize
from transformers import Trainer

from outsize.data.batch import IGNORED


class EmbeddingTrainer(Trainer):  # type: ignore[misc]
    """Has each text nearer to its partner than to the partners of the others, by the cosine of their means.

    Batches hold the anchors first, then the positives, as many.

    Attributes:
        temperature: that similarities are divided by.
    """

    temperature: float = 0.05
    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """See `transformers.Trainer.compute_loss`."""
        outputs = model(**inputs)
        mask = inputs["attention_mask"].unsqueeze(-1).to(outputs.last_hidden_state.dtype)
        means = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)
        anchors, positives = normalize(means.float(), dim=-1).chunk(2)
        similarities = anchors @ positives.T / self.temperature
        loss = cross_entropy(similarities, torch.arange(len(anchors), device=similarities.device))
        return (loss, outputs) if return_outputs else loss


class DistillTrainer(Trainer):  # type: ignore[misc]
    """Has the model predict what a teacher does, besides the tokens of the data.

    Attributes:
        teacher: frozen, of the same vocabulary.
        beta: share of the teacher in the loss.
        temperature: that the logits of both are divided by.
    """

    teacher: nn.Module
    beta: float = 0.5
    temperature: float = 1.0
    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """See `transformers.Trainer.compute_loss`."""
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teacher(
                **{name: value for name, value in inputs.items() if name != "labels"}
            ).logits
        trained = inputs["labels"][:, 1:] != IGNORED
        distance = self._distance(outputs.logits[:, :-1][trained], taught[:, :-1][trained])
        loss = (1 - self.beta) * outputs.loss + self.beta * distance
        return (loss, outputs) if return_outputs else loss

    def _distance(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Return the KL divergence from the teacher, the mean over targets, times the square of the temperature."""
        ours, theirs = (log_softmax(x.float() / self.temperature, dim=-1) for x in (logits, taught))
        return kl_div(ours, theirs, reduction="batchmean", log_target=True) * self.temperature**2
