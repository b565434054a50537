"""Section transport: how bytes are written on the link."""

from typing import Annotated

from pydantic import Field

from outsize.codecs.codec_spec import TransportActivations, TransportGradients, TransportWeights
from outsize.config.section import Section
from outsize.config.without_effect import REPLICATED, Idle


class TransportConfig(Section):
    """How bytes are written on the link between a device and host memory.

    lossless4 and lossless3 keep every bit; all others lose, within a bound that docs/codecs.md states.
    """

    weights: Annotated[TransportWeights, Idle(*REPLICATED)] = Field(
        default="raw",
        description="Weights on their way up, encoded once at home (those that train, after each of their steps) and "
        "decoded on the device. auto: encoded if that is predicted to shorten a step, which it does where the link is "
        "what a step waits for.",
    )
    activations: Annotated[
        TransportActivations,
        Idle(
            (
                "memory.offload is false",
                lambda case: case.config.memory.offload is False and not case.has_several_workers(),
            ),
            *REPLICATED,
        ),
    ] = Field(
        default="raw",
        description="Inputs of units that leave the device between passes. auto: as of weights, by a codec that keeps "
        "every bit; raw on a GPU, which does not encode so.",
    )
    gradients: Annotated[TransportGradients, Idle(*REPLICATED)] = Field(
        default="raw",
        description="Gradients on their way home. auto: as of activations. -ef adds what was lost to the next step's, "
        "and keeps it on the device, 2 bytes for each parameter that trains.",
    )
