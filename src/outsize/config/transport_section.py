"""Section transport: how bytes are written on the link."""

from typing import Literal

from pydantic import Field

from outsize.choices import TransportWeights
from outsize.config.section import Section


class TransportConfig(Section):
    """How bytes are written on the link between a device and host memory.

    lossless4 and lossless3 keep every bit; all others lose, within a bound that docs/codecs.md states.
    """

    weights: TransportWeights = Field(
        default="raw",
        description="Weights on their way up, encoded once at home (those that train, after each of their steps) and "
        "decoded on the device. auto: encoded if that is predicted to shorten a step, which it does where the link is "
        "what a step waits for.",
    )
    activations: Literal[
        "raw",
        "auto",
        "lossless4",
        "lossless3",
        "int8",
        "int8-asymmetric",
        "int8-hadamard",
        "int4",
        "int4-asymmetric",
        "int4-hadamard",
    ] = Field(
        default="raw",
        description="Inputs of units that leave the device between passes. auto: as of weights, by a codec that keeps "
        "every bit; raw on a GPU, which does not encode so.",
    )
    gradients: Literal[
        "raw",
        "auto",
        "lossless4",
        "lossless3",
        "int8",
        "int8-stochastic",
        "int8-ef",
        "int8-hadamard",
        "int8-hadamard-stochastic",
        "int8-hadamard-ef",
        "int4",
        "int4-stochastic",
        "int4-ef",
        "int4-hadamard",
        "int4-hadamard-stochastic",
        "int4-hadamard-ef",
    ] = Field(
        default="raw",
        description="Gradients on their way home. auto: as of activations. -ef adds what was lost to the next step's, "
        "and keeps it on the device, 2 bytes for each parameter that trains.",
    )
