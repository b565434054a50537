"""What can be configured: ten sections, every key with its default, its unit and its meaning.

The descriptions in the sections are the documentation: `docs/configuration.md` and the help of the flags are made from
them. Sections hold what the user said and decide nothing; ``auto`` and null are resolved by the code that knows the
machine.
"""

import math
from typing import Self

from pydantic import model_validator

from outsize.choices import CompileOrAuto, NewtonSchulz
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
        found = contradictions(self)
        if found:
            raise ValueError("\n".join(found))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, padding included."""
        return self.train.tokens_per_step or self.data.seq_len * self.microbatches

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

    def compiling(self, choice: CompileOrAuto) -> Self:
        """Return the same run with ``choice`` as ``model.compile``."""
        return self.model_copy(update={"model": self.model.model_copy(update={"compile": choice})})

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
        found = self.model_copy(update={"train": self.train.model_copy(update={"steps": steps})})
        if found.warmup_steps >= steps:
            raise ConfigError(
                f"optimizer.warmup_steps: {found.warmup_steps} steps of warm-up do not fit before the end of the "
                f"{steps} steps that train.epochs={self.train.epochs:g} comes to; lower it, or train for more epochs"
            )
        return found

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, over all microbatches."""
        return self.tokens_per_step // self.data.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, from whichever of the two keys was given."""
        return self.optimizer.warmup_steps or round(self.optimizer.warmup_ratio * self.train.steps)

    def notes(self, around: Surroundings | None = None) -> list[str]:
        """Return one sentence for every setting that has no effect on this run.

        Args:
            around: what is known of the run besides; None for nothing, and a single process.
        """
        return settings_without_effect(self, around or Surroundings())
