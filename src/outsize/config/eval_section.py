"""Section eval: what a model is measured on while it trains, and what follows from it."""

from typing import Annotated

from pydantic import Field

from outsize.config.section import Fraction, PathText, Section
from outsize.config.without_effect import NO_EVALUATION, Idle


class EvalConfig(Section):
    """What the model is measured on while it trains, by a streamed forward. One device of one process measures."""

    data: PathText | None = Field(
        default=None,
        description="A file or directory of its own, read as data.path is. null: nothing, or what split holds out.",
    )
    split: Fraction = Field(
        default=0.0,
        description="Share of the sequences of each source that is held out of training, drawn by train.seed.",
    )
    every: Annotated[int, Idle(*NO_EVALUATION)] = Field(
        default=0,
        ge=0,
        description="Steps between evaluations; 0 is the end alone, where there is one in any case.",
    )
    sequences: Annotated[int | None, Idle(*NO_EVALUATION)] = Field(
        default=None,
        ge=1,
        description="Sequences that are measured at most, the same every time; null is all.",
    )
    keep_best: Annotated[bool, Idle(*NO_EVALUATION)] = Field(
        default=True,
        description="Whether the best step so far is saved, named by checkpoints/best, and kept beside those of "
        "train.save_total_limit.",
    )
    patience: Annotated[int | None, Idle(*NO_EVALUATION)] = Field(
        default=None,
        ge=1,
        description="Evaluations in a row without a better loss after which the run ends, saved; null goes on.",
    )

    @property
    def on(self) -> bool:
        """Whether anything is measured."""
        return self.data is not None or self.split > 0
