"""Section telemetry: who is told what a run does."""

from typing import Annotated, Literal

from pydantic import Field

from outsize.config.section import Section
from outsize.config.without_effect import NO_WRITERS, Idle


class TelemetryConfig(Section):
    """Who is told what a run does, besides its own directory."""

    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        strict=False,
        description="Trackers that are told of steps too, e.g. `[tensorboard]`; each is an extra of the same name. "
        "One that fails is left out, and the run goes on.",
    )
    project: Annotated[
        str,
        Idle(
            *NO_WRITERS,
            (
                "neither wandb nor trackio is among telemetry.writers",
                lambda case: not {"wandb", "trackio"} & set(case.config.telemetry.writers),
            ),
        ),
    ] = Field(default="outsize", min_length=1, description="Project that wandb and trackio keep the run in.")
    every: Annotated[int, Idle(*NO_WRITERS)] = Field(
        default=1, ge=1, description="Steps between two that trackers are told of."
    )
