"""One line of ``heartbeat.jsonl``: every field, its unit and its meaning. No torch.

``docs/run-directory.md`` has the same table, ``docs/heartbeat.schema.json`` is made from this model, and a test holds
both and the lines of a real run to it. A change that an older reader would misread raises `SCHEMA_VERSION`.
"""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Final = 4
# The versions whose lines tell the time of each lane.
READABLE: Final = (2, 3, 4)

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
ByLane = dict[str, Seconds]


class Part(BaseModel):
    """Base: frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Tier(Part):
    """What the ledger says of one tier."""

    used_bytes: Bytes = Field(description="reserved when the step was known")
    high_water_bytes: Bytes = Field(description="the most that was ever reserved at once")
    budget_bytes: Bytes | None = Field(description="what may be reserved; null is no limit")


class GpuSample(Part):
    """What the driver says of one GPU when a step is known; null for what it does not tell."""

    index: int = Field(ge=0, description="as torch counts: cuda:index")
    sm_clock_hz: int | None = Field(description="of its multiprocessors")
    utilisation_share: float | None = Field(
        description="share of the driver's last sampling period, 1/6 s to 1 s, in which any kernel ran"
    )
    memory_used_bytes: int | None = Field(description="held by all processes")
    power_w: float | None = Field(description="drawn")
    temperature_c: int | None = Field(description="of the chip")
    pcie_sent_bytes: int | None = Field(description="by the GPU over PCIe since the line before")
    pcie_received_bytes: int | None = Field(description="by the GPU over PCIe since the line before")
    clock_limits: str | None = Field(
        description="what keeps its clock down, in NVML's words; empty for nothing"
    )


class HostSample(Part):
    """What the kernel counted of a host that may be short of something; null for what it does not tell."""

    span_s: Seconds = Field(description="s that it was counted over: since the line before that has it")
    cpu_s_by_thread: ByLane | None = Field(
        default=None,
        description="processor s of the threads of this process by name; those of lanes have the lane's, and "
        "those that libraries started for kernels are `native` together",
    )
    kernel_cpu_s: Seconds | None = Field(
        default=None, description="processor s of this process that the system's kernel took for it"
    )
    queued_s: Seconds | None = Field(
        description="s that threads of this process were ready to run and had no processor, added up over threads"
    )
    others_cpu_s: Seconds | None = Field(
        description="processor s that other processes had of the processors that this one may use"
    )
    stolen_cpu_s: Seconds | None = Field(
        description="s that a hypervisor kept those processors from this machine"
    )
    throttled_s: Seconds | None = Field(
        description="s that the quota of the control group stopped it, added up over processors"
    )
    memory_pressure_s: Seconds | None = Field(
        description="s in which some task of the machine stood still for want of memory"
    )
    swapped_in_bytes: Bytes | None = Field(description="read back from swap, by all processes")
    major_faults: int = Field(
        ge=0, description="pages of this process that had to be read from a disk, a network or swap"
    )
    minor_faults: int | None = Field(
        default=None,
        ge=0,
        description="pages of this process that were handed out, or mapped, without reading",
    )


class Line(Part):
    """One step."""

    schema_version: int = Field(alias="schema", description="4; changes with the meaning of the fields")
    time: float = Field(description="s since 1970, when the step was known")
    step: int = Field(ge=1, description="from 1")
    loss: float | None = Field(description="nats, mean over trained tokens")
    lr: float = Field(description="learning rate of the step")
    grad_norm: float | None = Field(description="global 2-norm before clipping; null without clipping")
    tokens: int = Field(
        ge=0,
        description="trained: neither padding, nor masked prompts, nor the first token of a sequence",
    )
    seconds: Seconds = Field(description="s of wall clock since the step before was known")
    tokens_per_s: float = Field(description="`tokens / seconds`")
    mfu: float | None = Field(
        description="FLOPs of forward and backward, without recompute, over what the device promises in that time "
        "(`peak_flops_per_s` in run.json); null where either is not known"
    )
    bytes_up: Bytes = Field(description="to the device, over all workers")
    bytes_down: Bytes = Field(description="from the device, over all workers")
    bytes_read: Bytes = Field(description="from disk, but for what a checkpoint reads")
    bytes_written: Bytes = Field(description="to disk, but for checkpoints and commit records")
    wire_bytes: dict[str, Bytes] = Field(
        description="bytes that the ops of this step moved, as they crossed, by lane: `up:w0`, `down:w0`, …, what was "
        "sent to other ranks by `net:reduce` and `net:gather`, matrices of Muon by `up:products` and `down:products`, "
        "and `disk:read`, `disk:write`"
    )
    logical_bytes: dict[str, Bytes] = Field(
        description="the same bytes as they are used, that is before a codec wrote them smaller"
    )
    stall_share: float = Field(ge=0, le=1, description="sum of `stall_s` over `seconds`, at most 1")
    stall_owner: str | None = Field(
        description="lane that most of `stall_s` is booked on; null if there was none"
    )
    skipped: bool = Field(description="whether the update was left out because something was not finite")
    skipped_steps: int = Field(
        ge=0, description="how many updates were left out so far, in all runs of this directory"
    )
    busy_s: ByLane = Field(
        description="s that each lane spent on ops; lanes overlap, so this adds up to more than `seconds`"
    )
    stall_s: ByLane = Field(
        description="s that the compute lane of worker 0 stood still between its ops, by the lane of the op that it "
        "waited for last; `dispatch`: no op accounts for it"
    )
    idle_s: ByLane = Field(description="s of the step in which each compute lane ran nothing")
    waits_s: dict[str, dict[str, ByLane]] = Field(
        description="`idle_s` by compute lane, cause and owner; adds up to it"
    )
    forward_s: Seconds = Field(description="s of compute lanes in forwards, but for the last unit")
    backward_s: Seconds = Field(
        description="s of compute lanes in backwards, recompute and the forward of the last unit included"
    )
    update_s: Seconds = Field(description="s of the optimizer, on its lane")
    data_s: Seconds = Field(
        description="s of the step in which it waited for its batch; what loaders make ahead is not in it"
    )
    between_s: Seconds = Field(
        description="s of the step before it asked for its batch: progress, telemetry, what a checkpoint needs"
    )
    cpu_s: Seconds = Field(description="s of processor time of the process, over all threads")
    slowed_s: Seconds | None = Field(
        default=None,
        description="s that compute lanes took longer than their units did alone, before the first step; null where "
        "these were not timed",
    )
    num_compute_ops: int = Field(ge=0, description="ops that compute, over all workers")
    tiers: dict[str, Tier] = Field(
        description="`used_bytes`, `high_water_bytes` and `budget_bytes` of each tier, by the ledger"
    )
    rss_bytes: Bytes = Field(description="resident memory of the process when the step was known")
    peak_rss_bytes: Bytes = Field(
        description="largest resident memory of the process so far, imports included"
    )
    device_bytes: dict[str, Bytes] = Field(
        description="what torch's allocator holds on each CUDA device; empty elsewhere"
    )
    gpus: tuple[GpuSample, ...] = Field(
        strict=False, description="clocks, use, PCIe counters by NVML, one for each GPU; empty without NVML"
    )
    host: HostSample | None = Field(
        default=None,
        description="what other work and limits of the host took; null in steps that are too short to tell",
    )
    num_steps: int = Field(
        default=0, ge=0, description="that the run is to have in all; 0 where that is not known"
    )
    epoch: float | None = Field(
        default=None, description="how often the data have been used, e.g. 1.5; null unknown"
    )
    eval_loss: float | None = Field(
        default=None,
        description="nats, mean over the tokens of an evaluation after the step; null without one",
    )
    eval_perplexity: float | None = Field(default=None, description="its exponential")
    eval_tokens: int | None = Field(default=None, ge=0, description="tokens that it predicted")
    fallbacks: dict[str, int] = Field(
        description="what did not go as asked so far, and how often: `pageable` memory instead of pinned, `buffered` "
        "files instead of direct I/O, `recomputed` activations that found no room below the device, "
        "`allocator_retries` of torch, which gave cached device memory back and waited, `failed_saves`, "
        "`failed_writers`, and `failed_writes` of lines and files like this one"
    )


def json_schema() -> dict[str, Any]:
    """Return the schema of a line, for readers in other languages."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Line.model_json_schema(by_alias=True),
    }
