"""Say in plain words which checks of a configuration failed, and give the schema of all keys.

The descriptions in the sections are the documentation: `docs/configuration.md` and the help of the flags are made from
them. Sections hold what the user said and decide nothing; ``auto`` and null are resolved by the code that knows the
machine.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import ValidationError, model_validator
from pydantic_core import ErrorDetails

from outsize.choices import NewtonSchulz
from outsize.codecs.codec_spec import EXACT_WEIGHTS
from outsize.config.config_rules import contradictions
from outsize.config.data_section import DataConfig, EvalConfig
from outsize.config.memory_section import MemoryConfig, ParallelConfig, TransportConfig
from outsize.config.model_section import ModelConfig, OptimizerConfig
from outsize.config.section import Section, Surroundings, settings_without_effect
from outsize.config.train_section import LoraConfig, TelemetryConfig, TrainConfig
from outsize.errors import ConfigError


class Config(Section):
    """One training run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    transport: TransportConfig = TransportConfig()
    parallel: ParallelConfig = ParallelConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        mistakes = contradictions(self)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, padding included."""
        sequences = self.train.batch_size or self.microbatches
        return self.train.tokens_per_step or self.data.seq_len * sequences

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; one where nobody has chosen yet."""
        return self.train.microbatches or 1

    def in_microbatches(self, count: int, in_a_round: int | None = None) -> Self:
        """Return the same run with steps cut into ``count`` microbatches, at most one for each sequence.

        Args:
            count: of a step.
            in_a_round: of them, those of a round; None leaves that as it is.
        """
        rounds = {} if in_a_round is None else {"round_microbatches": in_a_round}
        train = self.train.model_copy(update={"microbatches": count, **rounds})
        return self.model_copy(update={"train": train})

    def multiplying(self, place: NewtonSchulz) -> Self:
        """Return the same run with ``place`` as ``optimizer.ns_on``."""
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"ns_on": place})})

    def over(self, num_sequences: int) -> Self:
        """Return the same run with the steps that ``train.epochs`` come to over so many sequences.

        Raises:
            ConfigError: the warm-up is longer than that.
        """
        if self.train.epochs is None:
            return self
        steps = max(1, math.ceil(self.train.epochs * num_sequences / self.sequences_per_step))
        config = self.model_copy(update={"train": self.train.model_copy(update={"steps": steps})})
        if config.warmup_steps >= steps:
            raise ConfigError(
                f"optimizer.warmup_steps: {config.warmup_steps} steps of warm-up do not fit before the end of the "
                f"{steps} steps that train.epochs={self.train.epochs:g} comes to; lower it, or train for more epochs"
            )
        return config

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, over all microbatches."""
        return self.tokens_per_step // self.data.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, from whichever of the two keys was given, a fraction of a step counting as one."""
        return self.optimizer.warmup_steps or math.ceil(self.train.steps * self.optimizer.warmup_ratio)

    def notes(self, around: Surroundings | None = None) -> list[str]:
        """Return one sentence for every setting that has no effect on this run.

        Args:
            around: what is known of the run besides; None for nothing, and a single process.
        """
        return settings_without_effect(self, around or Surroundings())


# What other trainers call the same thing; the nearest spelling would lead elsewhere.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "beta1": "optimizer.betas",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "max_steps": "train.steps",
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.microbatches",
    "output_dir": "train.run_dir",
    "save_steps": "train.save_every",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "dataset": "data.path",
    "packing": "data.pack",
    "precision": "model.dtype",
    "gradient_checkpointing": "memory.activations",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "accumulate_grad_batches": "train.microbatches",
    "use_flash": "model.attention",
    "runtime": "memory",
    "model_name_or_path": "model.path",
}
# What PEFT has and section lora has not; the nearest spelling would be something else altogether.
_NOT_HERE = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
    "loftq_config": "LoftQ is not supported; lora.base_codec quantises the frozen model",
    "trainable_token_indices": "single tokens cannot be trained; lora.modules_to_save trains the whole embedding",
}
_NOT_HERE |= dict.fromkeys(
    ("whole_word_mask", "mlm_whole_word", "whole_word_masking"),
    "whole words are not masked as one, since kept tokens do not say where words begin; wrap the model (outsize.wrap) "
    "under transformers' Trainer, whose DataCollatorForLanguageModeling(whole_word_mask=True) masks them",
)
_NOT_HERE |= {
    "parallel.mode": "plain data parallel is no more: ranks stream (docs/nodes.md)",
    "parallel.weights": "weights between ranks are sent as they are; leave it out",
    "ddp_compress": "gradients between ranks are written as parallel.gradients says: bf16, int8, int4-stochastic, ...",
}
_FLAGS = {
    "model.path": "pass --model DIR or ",
    "data.path": "pass --data PATH or ",
}


def all_keys() -> list[str]:
    """Return every key of the configuration, dotted, in the order of the schema."""
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    ]


def suggest(path: str) -> str | None:
    """Return the key or section that ``path`` was probably meant to be, or None."""
    keys = all_keys()
    leaf = path.rpartition(".")[2]
    in_other_section = [key for key in keys if key.endswith(f".{leaf}")]
    if len(in_other_section) == 1:
        return in_other_section[0]
    if leaf in _OTHER_NAMES:
        return _OTHER_NAMES[leaf]
    spelled_alike = difflib.get_close_matches(
        path, keys if "." in path else [*Config.model_fields, *keys], n=1
    )
    leaf_alike = difflib.get_close_matches(leaf, [key.rpartition(".")[2] for key in keys], n=1)
    candidates = spelled_alike or [key for key in keys if leaf_alike and key.endswith(f".{leaf_alike[0]}")]
    return candidates[0] if candidates else None


def unknown_key(path: str) -> str:
    """Return what to say about a key that does not exist, without the key itself."""
    absent = _NOT_HERE.get(path) or _NOT_HERE.get(path.rpartition(".")[2])
    if absent is not None:
        return f"no such key: {absent}"
    meant = suggest(path)
    return f"no such key; did you mean {meant}?" if meant else "no such key; see docs/configuration.md"


def as_config_error(
    error: ValidationError, origins: Mapping[str, str], file: str = "the config file"
) -> ConfigError:
    """Return ``error`` in plain words.

    Args:
        error: what pydantic found.
        origins: for each dotted key, where its value was written, e.g. ``"run.yaml"``.
        file: where to write what is missing.
    """
    lines = [line for detail in error.errors(include_url=False) for line in _lines(detail, origins, file)]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(
        f"{len(lines)} mistakes in the configuration:\n" + "\n".join(f"  {line}" for line in lines)
    )


def _lines(detail: ErrorDetails, origins: Mapping[str, str], file: str) -> list[str]:
    path = ".".join(str(part) for part in detail["loc"])
    if not path:  # a combination of keys, which `config_rules` has already put into words
        return str(detail["ctx"]["error"]).split("\n")
    key = ".".join(path.split(".")[:2])
    origin = origins.get(path) or origins.get(key)
    where = f" (from {origin})" if origin else ""
    return [f"{path}: {_what(path, detail, file)}{where}"]


def _what(path: str, detail: ErrorDetails, file: str) -> str:
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx") or {}
    if kind == "missing" and path.count(".") > 1:
        return "is missing: the list is too short"
    if kind == "missing":
        return f"is required; {_FLAGS.get(path, '')}write it in {file}"
    if kind == "extra_forbidden":
        return unknown_key(path)
    if kind == "model_type":
        return f"is a section: write its keys below it, not {_shown(value)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        expected = re.sub("True|False", lambda word: word[0].lower(), context["expected"]).replace("'", "")
        other = f"; {EXACT_WEIGHTS}" if path == "transport.weights" else ""
        if "zstd" in str(value):
            other += "; `outsize probe --tensors F` tells what zstd makes of yours (of others: bench_packed_claims.py)"
        return f"must be {expected}, not {_shown(value)}{other}"
    phrase = _PHRASES.get(kind)
    return phrase(context, value) if phrase else f"{detail['msg'].lower()}: {_shown(value)}"


def _shown(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


_PHRASES: dict[str, Callable[[dict[str, Any], Any], str]] = {
    "int_type": lambda _, value: f"must be a whole number, not {_shown(value)}",
    "int_from_float": lambda _, value: f"must be a whole number, not {_shown(value)}",
    "float_type": lambda _, value: f"must be a number, not {_shown(value)}",
    "finite_number": lambda _, value: f"must be a finite number, not {_shown(value)}",
    "bool_type": lambda _, value: f"must be true or false, not {_shown(value)}",
    "string_type": lambda _, value: f"must be text, not {_shown(value)}",
    "tuple_type": lambda _, value: f"must be a list, not {_shown(value)}",
    "string_too_short": lambda _, _value: "must not be empty",
    "too_long": lambda context, _: (
        f"must hold {context['max_length']} values, not {context['actual_length']}"
    ),
    "greater_than": lambda context, value: f"must be above {context['gt']:g}, not {_shown(value)}",
    "greater_than_equal": lambda context, value: f"must be at least {context['ge']:g}, not {_shown(value)}",
    "less_than": lambda context, value: f"must be below {context['lt']:g}, not {_shown(value)}",
    "multiple_of": lambda context, value: (
        f"must be a multiple of {context['multiple_of']}, not {_shown(value)}"
    ),
}
