"""Sections memory, transport and parallel: devices, budgets, links and processes."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from outsize.choices import Activations, Handover, Home
from outsize.codecs.codec_spec import (
    TransportActivations,
    TransportGradients,
    TransportWeights,
    WireGradients,
)
from outsize.config.section import (
    ALONE,
    HOST_HOME,
    OF_A_RANK,
    STAGES,
    TRAINERS,
    Device,
    Idle,
    PathText,
    Section,
    Size,
)


class MemoryConfig(Section):
    """Which device computes, how much memory each tier may use, and where the training state lives.

    Budgets are promises: a run that cannot keep them says so before it starts. Sizes are numbers of bytes, or
    texts such as 64MiB, 20GiB, 24GB.
    """

    device: Annotated[Device, OF_A_RANK] = Field(
        default="auto",
        description="cpu, cuda, cuda:N (device number N), cuda:0,1 or cuda:all (a worker on each of them), xpu and npu "
        "likewise, emulated:N (N workers on the CPU with capped memory and link), or auto: the first kind of "
        "accelerator that torch sees, otherwise cpu.",
    )
    device_memory: Annotated[Size | None, OF_A_RANK] = Field(
        default=None,
        description="Budget on the device, of each where there are several, a size; null is what is free, less a "
        "margin.",
    )
    host_memory: Annotated[Size | None, OF_A_RANK] = Field(
        default=None, description="Budget in host memory, a size; null is what is free, less a margin."
    )
    disk_memory: Annotated[Size | None, Idle(*HOST_HOME)] = Field(
        default=None, description="Budget on disk, a size; null is what is free, less a margin."
    )
    home: Home = Field(
        default="auto",
        description="Where weights and optimizer state rest between uses; "
        "auto is host if they fit its budget.",
    )
    store_dir: Annotated[PathText | None, Idle(*HOST_HOME), OF_A_RANK] = Field(
        default=None, description="Directory of the disk home, best on a local NVMe; null is run_dir/store."
    )
    commits: Annotated[Literal["step", "none"], Idle(*HOST_HOME, *TRAINERS)] = Field(
        default="step",
        description="step: a home on disk keeps what a step changes twice, so that a run goes on from the last "
        "step whatever ended it; none: it takes half the disk, and a run goes on from the last checkpoint.",
    )
    slots: Annotated[int | None, Idle(*STAGES)] = Field(
        default=None, ge=1, description="Units that the device holds at once; null lets the planner choose."
    )
    resident: Literal["auto", "none"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="Units that rest on the device with masters, moments and gradient, and step there; the others are "
        "streamed. auto: as many as are predicted to make a step shorter, on a device that a link lies below; none, or "
        "a number of units. For AdamW with its exact state, on one device over a home in host memory. auto is none of "
        "a wrapped model, and where a trainer of another library trains.",
    )
    prefetch: Annotated[int | None, Idle(*STAGES)] = Field(
        default=None,
        ge=0,
        description="Units loaded ahead of the one that computes; null lets the planner choose.",
    )
    offload: Annotated[bool | None, Idle(*STAGES)] = Field(
        default=None,
        description="Whether activations leave the device between passes; null: if they do not fit.",
    )
    activations: Activations = Field(
        default="auto",
        description="What becomes of what a backward needs of its forward. recompute: it is made again; keep: it "
        "stays on the device, keep-attention: what attention returned, keep-products: what matrix products returned as "
        "well, and the rest is made again; offload and offload-...: the same, but it waits below the device; auto: it "
        "stays as far as there is room when all else has, and on CUDA waits below the device where that is predicted "
        "to shorten a step.",
    )
    tile_elements: Annotated[
        int | None,
        Idle(
            ("the home is in host memory", lambda case: case.home == "host" and case.has_global_norm()),
        ),
    ] = Field(
        default=None,
        ge=2048,
        multiple_of=2048,
        description="Elements per tile of the optimizer step on disk, a multiple of 2048; "
        "null lets the planner choose.",
    )
    numa: Annotated[
        Literal["auto", "off"],
        Idle(
            ("this machine has one NUMA node", lambda case: (case.around.num_numa_nodes or 2) < 2), *TRAINERS
        ),
    ] = Field(
        default="auto",
        description="auto: on a machine with several NUMA nodes all threads are bound to that of the device, and so "
        "their memory lies there, if its processors and memory suffice; run.json says what was decided. off: the "
        "system decides.",
    )
    link_gb_per_s: Annotated[
        float | None,
        Idle(("only emulated devices have a throttled link", lambda case: not case.is_emulated())),
    ] = Field(
        default=None,
        gt=0,
        description="Speed of the link of emulated devices, GB/s per direction (1 GB = 1e9 bytes); null: no "
        "throttle.",
    )
    peer_gb_per_s: Annotated[
        float | None,
        Idle(
            (
                "only emulated devices copy to each other as fast as one likes",
                lambda case: not (case.is_emulated() and case.has_several_workers()),
            ),
        ),
    ] = Field(
        default=None,
        gt=0,
        description="Speed of copies between two emulated devices, GB/s; null: they have no way between them but host "
        "memory.",
    )


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
    activations: Annotated[
        TransportActivations,
        Idle(
            (
                "memory.offload is false",
                lambda case: case.config.memory.offload is False and not case.has_several_workers(),
            ),
        ),
    ] = Field(
        default="raw",
        description="Inputs of units that leave the device between passes. auto: as of weights, by a codec that keeps "
        "every bit; raw on a GPU, which does not encode so.",
    )
    gradients: TransportGradients = Field(
        default="raw",
        description="Gradients on their way home. auto: as of activations.",
    )


# Values at which keys that are no more changed nothing, as config.yaml of a run holds them; others are refused.
_FORMER: dict[str, tuple[object, ...]] = {
    "mode": ("auto", "stream"),
    "weights": ("raw",),
    "ddp_bucket_mib": (25.0,),
    "ddp_static_graph": (False,),
    "ddp_find_unused": (False,),
    "ddp_compress": ("none",),
    "ddp_powersgd_rank": (4,),
}


class ParallelConfig(Section):
    """How several processes train one model together, where torchrun or its like starts them; see docs/nodes.md.

    train.tokens_per_step is what all of them train together; train.microbatches are those of each.
    """

    gradients: Annotated[WireGradients, Idle(*ALONE)] = Field(
        default="fp32",
        description="How gradients are written between ranks; fp32 is exact.",
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
            *TRAINERS,
        ),
    ] = Field(
        default="auto",
        description="Several devices in one process: how a stage hands over what it makes for the next one. host: by "
        "way of host memory; peer: from device to device, an error where a pair cannot; auto: peer where a pair can "
        "and there is room for what arrives.",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, given: Any) -> Any:
        """Leave out keys that say what is so without them, as config.yaml of an earlier run does."""
        if not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if value not in _FORMER.get(key, ())}
