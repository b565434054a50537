"""Recipes of objectives and the trainers that run them.

What each objective takes: a class that opens the model, fields of records, a trainer; one row for each.

Losses that neither TRL nor transformers has a trainer for: of a batch of pairs, and of a teacher.

Sources: InfoNCE with the other pairs of the batch as negatives, van den Oord et al., arXiv:1807.03748; the loss on soft
targets, Hinton et al., arXiv:1503.02531.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize
from transformers import Trainer

from outsize.config import Config
from outsize.config.config_rules import refused_by_trainers
from outsize.data.batch import IGNORED
from outsize.errors import ConfigError, DataError, OutsizeError
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
        takes_texts: whether the trainer puts the texts of a template where the messages stood, in columns whose
            type datasets keeps: a text in a column of lists of JSON is cut into its characters.
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
    takes_texts: bool = False

    @property
    def by_trl(self) -> bool:
        """Whether the trainer is TRL's, which makes tokens of texts itself."""
        return self.trainer.startswith("trl")


_CLASSES: Final[dict[str, Any]] = {"auto": "AutoModelForSequenceClassification", "task": "SEQ_CLS"}
_OFFERED: Final = ("tools", "chat_template_kwargs")
_PAIRS: Final[dict[str, Any]] = {"fields": ("chosen", "rejected"), "optional": ("prompt", *_OFFERED)}

RECIPES: Final[Mapping[str, Recipe]] = {
    "dpo": Recipe(
        trainer="trl:DPOTrainer", arguments="trl:DPOConfig", takes_head=True, compares=True, **_PAIRS
    ),
    "orpo": Recipe(
        trainer="trl.experimental.orpo:ORPOTrainer",
        arguments="trl.experimental.orpo:ORPOConfig",
        takes_texts=True,
        **_PAIRS,
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
        teacher: frozen, of the same vocabulary; or what it said of the sequences.
        beta: share of the teacher in the loss.
        temperature: that the logits of both are divided by.
    """

    teacher: "nn.Module | TeacherLogits"
    beta: float = 0.5
    temperature: float = 1.0
    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """See `transformers.Trainer.compute_loss`."""
        rows, inputs = inputs.get(ROW), {name: value for name, value in inputs.items() if name != ROW}
        outputs = model(**inputs)
        trained = inputs["labels"][:, 1:] != IGNORED
        tokens: Tensor | None = None
        if isinstance(self.teacher, TeacherLogits):
            taught, tokens = self.teacher.of(rows, inputs, outputs.logits.shape[-1])
        else:
            with torch.no_grad():
                others = {name: value for name, value in inputs.items() if name != "labels"}
                taught = self.teacher(**others).logits[:, :-1][trained]
        from_teacher = distance(outputs.logits[:, :-1][trained], taught, tokens, self.temperature)
        loss = (1 - self.beta) * outputs.loss + self.beta * from_teacher
        return (loss, outputs) if return_outputs else loss


def distance(logits: Tensor, taught: Tensor, tokens: Tensor | None, temperature: float) -> Tensor:
    """Return the KL divergence from a teacher [N, V], the mean over N, times the square of the temperature.

    Of the teacher's largest logits alone, those of ``tokens`` [N, k], the other tokens have no probability.
    """
    ours, theirs = (log_softmax(x.float() / temperature, dim=-1) for x in (logits, taught))
    ours = ours if tokens is None else ours.gather(-1, tokens)
    return kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


ROW: Final = "row"  # of a batch: the numbers of its sequences, by which a teacher's logits are kept


def teacher_logits_of(config: Config) -> Path | None:
    """Return the directory of a teacher's logits that a run learns from; None where its teacher is a model."""
    place = Path(config.train.teacher or "")
    return place if config.train.teacher and logits_file(place, 0).is_file() else None


def logits_file(directory: Path, number: int) -> Path:
    """Return where the logits of a sequence lie."""
    return directory / f"{number:08}.safetensors"


class TeacherLogits:
    """Logits of a teacher, written once by ``outsize score``: a file for each sequence of a run.

    Args:
        directory: the files.
        num_rows: sequences of the run, those that it is measured on among them.

    Raises:
        ConfigError: there are fewer files.
    """

    def __init__(self, directory: Path, num_rows: int) -> None:
        self._directory = directory
        missing = next((n for n in range(num_rows) if not logits_file(directory, n).is_file()), None)
        if missing is not None:
            raise ConfigError(
                f"train.teacher: {directory} has the logits of {missing:,} of {num_rows:,} sequences; {self._remedy}"
            )
        self._num_rows = num_rows

    def describe(self) -> str:
        """Return what is learnt from, and what of it was left out."""
        parts = [self._read(n) for n in sorted({n * self._num_rows // 16 for n in range(16)})]
        line = f"teacher: the logits of {self._num_rows:,} sequences in {self._directory}"
        if "indices" not in parts[0]:
            return line
        mass = torch.cat([part["mass"] for part in parts]).mean()
        return (
            f"{line}, of each token the {parts[0]['indices'].shape[-1]:,} largest: {mass:.1%} of the teacher's "
            "probability. The others count as impossible, so the loss is another than that of the whole teacher "
            "(docs/objectives.md)"
        )

    def check(self, *datasets: Any) -> None:
        """Hold the tokens and targets of every file against the sequences of datasets; of logits no byte is read.

        Raises:
            DataError: one is of another sequence, or cannot be read.
        """
        for number, row in enumerate(dataset[n] for dataset in datasets for n in range(len(dataset))):
            inputs = {name: value for name, value in row.items() if name != ROW}
            self._check(number, self._read(number, ("logits", "indices", "mass")), inputs)

    def _check(self, number: int, part: Mapping[str, Tensor], row: Mapping[str, Tensor]) -> None:
        if not _is_of(part, row):
            raise DataError(
                f"train.teacher: {logits_file(self._directory, number)} is of another sequence than the run's of that "
                f"number; the data, how they are cut or what of them is trained has changed. {self._remedy}"
            )

    def of(self, rows: Any, inputs: Mapping[str, Tensor], vocab_size: int) -> tuple[Tensor, Tensor | None]:
        """Return the logits [N, V] of the targets of sequences, or the largest of them [N, k] with their tokens.

        Args:
            rows: the numbers of the sequences [B].
            inputs: of the sequences, labels among them, each [B, S].
            vocab_size: logits of the model that learns.

        Raises:
            ConfigError, DataError: they are of other sequences, or of another vocabulary.
        """
        parts = []
        for index, number in enumerate(rows.tolist()):
            part = self._read(number)
            self._check(number, part, {name: value[index].cpu() for name, value in inputs.items()})
            if int(part["vocab_size"]) != vocab_size:
                raise ConfigError(
                    f"train.teacher: {self._directory} has logits of {int(part['vocab_size']):,} tokens, and the "
                    f"model's are {vocab_size:,}; predictions can be compared over the same tokens alone"
                )
            parts.append(part)
        device = inputs["input_ids"].device
        logits = torch.cat([part["logits"] for part in parts]).to(device)
        if "indices" not in parts[0]:
            return logits, None
        return logits, torch.cat([part["indices"] for part in parts]).long().to(device)

    @property
    def _remedy(self) -> str:
        return f"make them: outsize score TEACHER --data RUN.yaml --want logits --out {self._directory}"

    def _read(self, number: int, leave_out: Collection[str] = ()) -> dict[str, Tensor]:
        path = logits_file(self._directory, number)
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                part = {name: file.get_tensor(name) for name in names.difference(leave_out)}
        except (OSError, SafetensorError) as error:
            raise DataError(f"train.teacher: {path} cannot be read: {error}; {self._remedy}") from error
        lacks = {"input_ids", "counts", "vocab_size", "logits"} - names
        if lacks:
            raise DataError(f"train.teacher: {path} has no {', '.join(sorted(lacks))}; {self._remedy}")
        return part


def _is_of(part: Mapping[str, Tensor], row: Mapping[str, Tensor]) -> bool:
    """Return whether logits are of a sequence: its tokens, positions and mask, and the targets that count."""
    all_ones = torch.ones_like(row["input_ids"])  # a mask is left out if it is that
    names = (row.keys() - {"labels"}) | (part.keys() & {"attention_mask", "position_ids"})
    same = all(torch.equal(part.get(n, all_ones).long(), row.get(n, all_ones)) for n in names)
    return same and torch.equal(part["counts"][1:], row["labels"][1:] != IGNORED)
