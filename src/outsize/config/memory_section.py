"""Section memory: devices, budgets, and where the training state lives."""

from typing import Annotated, Literal

from pydantic import Field

from outsize.choices import Activations, Home
from outsize.config.section import Device, PathText, Section, Size
from outsize.config.without_effect import HOST_HOME, OF_A_RANK, REPLICATED, STAGES, TRAINERS, Idle


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
    host_memory: Annotated[Size | None, Idle(*REPLICATED), OF_A_RANK] = Field(
        default=None, description="Budget in host memory, a size; null is what is free, less a margin."
    )
    disk_memory: Annotated[Size | None, Idle(*HOST_HOME)] = Field(
        default=None, description="Budget on disk, a size; null is what is free, less a margin."
    )
    home: Annotated[Home, Idle(*REPLICATED)] = Field(
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
    prefetch: Annotated[int | None, Idle(*STAGES)] = Field(
        default=None,
        ge=0,
        description="Units loaded ahead of the one that computes; null lets the planner choose.",
    )
    offload: Annotated[bool | None, Idle(*STAGES)] = Field(
        default=None,
        description="Whether activations leave the device between passes; null: if they do not fit.",
    )
    activations: Annotated[Activations, Idle(*REPLICATED)] = Field(
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
            *REPLICATED,
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
        Idle(
            ("only emulated devices have a throttled link", lambda case: not case.is_emulated()), *REPLICATED
        ),
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
            *REPLICATED,
        ),
    ] = Field(
        default=None,
        gt=0,
        description="Speed of copies between two emulated devices, GB/s; null: they have no way between them but host "
        "memory.",
    )
