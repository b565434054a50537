"""Recipes of objectives and the trainers that run them.

What each objective takes: a class that opens the model, fields of records, a trainer; one row for each.

Losses that neither TRL nor transformers has a trainer for: of a batch of pairs, and of a teacher.

Sources: InfoNCE with the other pairs of the batch as negatives, van den Oord et al., arXiv:1807.03748; the loss on soft
targets, Hinton et al., arXiv:1503.02531.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize
from transformers import Trainer

from outsize.config import Config
from outsize.config.config_rules import refused_by_trainers
from outsize.data.batch import IGNORED
from outsize.errors import ConfigError, OutsizeError
from outsize.model.build import load_hf_config
from outsize.training.records import TrainResult

SEQ2SEQ: Final = "seq2seq"
_OWN = "outsize.objectives.recipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an objective is trained.

    Attributes:
        auto: class of transformers that opens the model.
        fields: of a record; none where sequences are those of sft.
        optional: further fields that a record may have.
        trainer: ``module:class``.
        arguments: ``module:class`` of its settings.
        task: what PEFT calls it.
        takes_head: whether the forward takes the weight of the head itself, as those of some of TRL's trainers do.
        compares: whether the model is held to what it was: to itself without adapters, or to a frozen one.
        has_perplexity: whether the loss is one of tokens.
    """

    auto: str = "AutoModelForCausalLM"
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    trainer: str = "transformers:Trainer"
    arguments: str = "transformers:TrainingArguments"
    task: str = "CAUSAL_LM"
    takes_head: bool = False
    compares: bool = False
    has_perplexity: bool = False

    @property
    def by_trl(self) -> bool:
        """Whether the trainer is TRL's, which makes tokens of texts itself."""
        return self.trainer.startswith("trl")


_CLASSES: Final[dict[str, Any]] = {"auto": "AutoModelForSequenceClassification", "task": "SEQ_CLS"}
_PAIRS: Final[dict[str, Any]] = {"fields": ("chosen", "rejected"), "optional": ("prompt",)}
_OFFERED: Final = ("tools", "chat_template_kwargs")
_PAIRS_OFFERED: Final = {**_PAIRS, "optional": ("prompt", *_OFFERED)}

RECIPES: Final[Mapping[str, Recipe]] = {
    "dpo": Recipe(
        trainer="trl:DPOTrainer", arguments="trl:DPOConfig", takes_head=True, compares=True, **_PAIRS_OFFERED
    ),
    "orpo": Recipe(
        trainer="trl.experimental.orpo:ORPOTrainer", arguments="trl.experimental.orpo:ORPOConfig", **_PAIRS
    ),
    "kto": Recipe(
        fields=("prompt", "completion", "label"),
        optional=_OFFERED,
        trainer="trl:KTOTrainer",
        arguments="trl:KTOConfig",
        takes_head=True,
        compares=True,
    ),
    "reward": Recipe(
        trainer="trl:RewardTrainer",
        arguments="trl:RewardConfig",
        fields=("chosen", "rejected"),
        optional=("prompt", *_OFFERED, "margin"),
        **_CLASSES,
    ),
    "classify": Recipe(fields=("text", "label"), **_CLASSES),
    "embed": Recipe(
        auto="AutoModel",
        fields=("anchor", "positive"),
        trainer=f"{_OWN}:EmbeddingTrainer",
        task="FEATURE_EXTRACTION",
    ),
    "distill": Recipe(trainer=f"{_OWN}:DistillTrainer", has_perplexity=True),
    SEQ2SEQ: Recipe(
        auto="AutoModelForSeq2SeqLM",
        fields=("prompt", "completion"),
        task="SEQ_2_SEQ_LM",
        has_perplexity=True,
    ),
}


def objective_of(config: Config) -> str | None:
    """Return the row of `RECIPES` that a run goes by; None where the engine trains it without any.

    Raises:
        ConfigError: a setting that an encoder-decoder cannot be trained with.
    """
    if config.train.objective != "sft":
        return config.train.objective
    try:
        hf_config = load_hf_config(config.model.path, config.model.trust_remote_code)
    except OutsizeError:  # of which the run itself speaks
        return None
    if not getattr(hf_config, "is_encoder_decoder", False):
        return None
    refused = refused_by_trainers(
        config, f"a {hf_config.model_type} goes to a trainer of transformers, and there"
    )
    if refused:
        raise ConfigError("\n".join(refused))
    return SEQ2SEQ


def training_of(config: Config) -> Callable[..., TrainResult]:
    """Return what trains a run: the engine alone, or a trainer over a streamed model.

    Raises:
        ConfigError: see `objective_of`.
    """
    if objective_of(config) is None:
        from outsize.training import run

        return run.train
    from outsize.objectives import objective_run

    return objective_run.train


def imported(place: str, objective: str) -> Any:
    """Return the class at ``module:class``.

    Raises:
        ConfigError: its library is not installed, or has none.
    """
    module, _, name = place.partition(":")
    library = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"train.objective={objective} is trained by {name} of {library}: {error}; install it with: "
            f"pip install -U {library} datasets"
        ) from error


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
