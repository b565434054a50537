"""Section parallel: how several processes train one model."""

from typing import Annotated, Literal

from pydantic import Field

from outsize.choices import Handover
from outsize.codecs.codec_spec import WireGradients, WireWeights
from outsize.config.section import Section
from outsize.config.without_effect import ALONE, ONLY_DDP, REPLICATED, TRAINERS, Idle


class ParallelConfig(Section):
    """How several processes train one model together, where torchrun or its like starts them; see docs/nodes.md.

    train.tokens_per_step is what all of them train together; train.microbatches are those of each.
    """

    mode: Annotated[Literal["auto", "stream", "ddp"], Idle(*ALONE)] = Field(
        default="auto",
        description="stream: every rank streams the model from a home of its own, which holds all weights and a share "
        "of the optimizer's state; ddp: every rank holds the whole training state on its device, and torch's "
        "DistributedDataParallel averages gradients; auto is stream.",
    )
    gradients: Annotated[WireGradients, Idle(*ALONE, *REPLICATED)] = Field(
        default="fp32",
        description="stream: how gradients are written between ranks; fp32 is exact, and -ef adds what was lost to the "
        "next step's, which takes 2 bytes of host memory for each parameter that trains.",
    )
    weights: Annotated[WireWeights, Idle(*ALONE, *REPLICATED)] = Field(
        default="raw",
        description="stream: how weights that have stepped are written between ranks, both lossless; delta sends the "
        "bits of 16-bit weights that have changed, about a tenth at fine-tuning rates.",
    )
    timeout_s: Annotated[float, Idle(*ALONE)] = Field(
        default=60.0,
        gt=0,
        description="Seconds without a heartbeat after which a rank is taken to be lost, and to wait for all to come.",
    )
    handover: Annotated[
        Handover,
        Idle(
            ("one device hands nothing over", lambda case: not case.has_several_workers()),
            *REPLICATED,
            *TRAINERS,
        ),
    ] = Field(
        default="auto",
        description="Several devices in one process: how a stage hands over what it makes for the next one. host: by "
        "way of host memory; peer: from device to device, an error where a pair cannot; auto: peer where a pair can "
        "and there is room for what arrives.",
    )
    ddp_bucket_mib: Annotated[float, Idle(*ONLY_DDP)] = Field(
        default=25.0, gt=0, description="MiB of gradients that are averaged with one call."
    )
    ddp_static_graph: Annotated[bool, Idle(*ONLY_DDP)] = Field(
        default=False,
        description="Whether every step goes through the same parameters in the same order, so that torch looks once.",
    )
    ddp_find_unused: Annotated[bool, Idle(*ONLY_DDP)] = Field(
        default=False,
        description="Whether torch looks, in every forward, for parameters that it does not use; for models that have "
        "such.",
    )
    ddp_compress: Annotated[Literal["none", "bf16", "fp16", "powersgd"], Idle(*ONLY_DDP)] = Field(
        default="none",
        description="How gradients are written between ranks; all but none lose, and bf16 and powersgd are for GPUs.",
    )
    ddp_powersgd_rank: Annotated[
        int,
        Idle(
            *ONLY_DDP,
            (
                "parallel.ddp_compress is not powersgd",
                lambda case: case.config.parallel.ddp_compress != "powersgd",
            ),
        ),
    ] = Field(default=4, ge=1, description="Rank of the factors that PowerSGD sends in place of a matrix.")
