"""Section telemetry: who is told what a run does."""

from typing import Literal

from pydantic import Field

from outsize.config.section import Section


class TelemetryConfig(Section):
    """Who is told what a run does, besides its own directory."""

    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        strict=False,
        description="Trackers that are told of steps too, e.g. `[tensorboard]`; each is an extra of the same name. "
        "One that fails is left out, and the run goes on.",
    )
    project: str = Field(
        default="outsize", min_length=1, description="Project that wandb and trackio keep the run in."
    )
    every: int = Field(default=1, ge=1, description="Steps between two that trackers are told of.")
