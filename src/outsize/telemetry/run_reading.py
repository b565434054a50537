"""Read the files of a run directory, whatever a crash or somebody else has left there; a heartbeat by its schema.

A run that goes on may be writing them, one that was cut off may have left half a line, and a directory may be
anybody's. What a file holds is checked here, once: a line of a heartbeat is a step with all of its fields of the right
kind, or it is left out and counted. `as_a_run` is the boundary around what is made of them.

`Line` is a line of ``heartbeat.jsonl``: every field, its unit and its meaning, without torch. ``docs/run-directory.md``
has the same table, ``docs/heartbeat.schema.json`` is made from this model, and a test holds both and the lines of a
real run to it. A change that an older reader would misread raises `SCHEMA_VERSION`.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field

from outsize import files
from outsize.config.config_rules import parse_yaml
from outsize.errors import ConfigError, OutsizeError

_MOST_LINE = 2**26
# Beyond what a float tells apart there are no steps.
_MOST_STEPS = 2**53

Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ByName = dict[str, Amount]


class _Tier(BaseModel):
    model_config = ConfigDict(strict=True)

    used_bytes: Amount
    high_water_bytes: Amount | None = None
    budget_bytes: Amount | None = None


class _Host(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Amount | None]

    span_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    cpu_s_by_thread: ByName | None = None


class _Step(BaseModel):
    """What every reader takes for granted of a line of any version, where it has the field at all."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=1, le=_MOST_STEPS)
    seconds: Amount
    schema_version: int | None = Field(default=None, alias="schema")
    time: Number | None = None
    loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    tokens: Amount = 0
    tokens_per_s: Number | None = None
    mfu: Number | None = None
    eval_loss: Number | None = None
    skipped_steps: Amount | None = None
    rss_bytes: Amount | None = None
    peak_rss_bytes: Amount | None = None
    bytes_up: Amount | None = None
    bytes_down: Amount | None = None
    bytes_read: Amount | None = None
    bytes_written: Amount | None = None
    data_s: Amount | None = None
    between_s: Amount | None = None
    cpu_s: Amount | None = None
    busy_s: ByName = {}
    stall_s: ByName = {}
    idle_s: ByName = {}
    waits_s: dict[str, dict[str, ByName]] = {}
    wire_bytes: ByName = {}
    logical_bytes: ByName = {}
    tiers: dict[str, _Tier] = {}
    device_bytes: ByName = {}
    gpus: list[dict[str, Number | str | None]] = []
    host: _Host | None = None
    fallbacks: dict[str, int] = {}


def step_of(line: bytes) -> Mapping[str, Any] | None:
    """Return the step that a line of a heartbeat tells of; None of half a line, or of one that tells of none."""
    try:
        fields = json.loads(line)
        _Step.model_validate(fields)
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", fields)


def lines_of(heartbeat: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the lines of a heartbeat from a byte on, the last one as far as it is written.

    Raises:
        ConfigError: it cannot be read, or a line is longer than one of a step.
    """
    try:
        with files.open_binary(heartbeat, "r") as file:
            file.seek(offset)
            while line := file.readline(_MOST_LINE):
                if len(line) == _MOST_LINE:
                    raise ConfigError(f"{heartbeat}: a line longer than any step of a run; take it out")
                yield line
    except OSError as error:
        raise ConfigError(
            f"cannot read {heartbeat}: {error.strerror}; name the directory of a run"
        ) from error


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Return what a JSON or YAML file of a run holds; empty where there is none, or one of no bytes.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        if not path.exists():
            return {}
        text = files.read_text(path)
        if not text:
            return {}  # what a loss of power left of a file of an older version
        # JSON is YAML too, but its own reader is faster and stricter.
        if path.suffix == ".json":
            fields = json.loads(text)
        else:
            fields = parse_yaml(text, str(path))
            json.dumps(fields)  # YAML has dates, sets and bytes, and a page none of them
    except (OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"cannot read {path}: {error}; without the file the rest is told") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: not what a run writes; without the file the rest is told")
    return fields


@contextlib.contextmanager
def as_a_run(directory: Path) -> Iterator[None]:
    """Have whatever fails over the files of ``directory`` say that they are not what a run writes.

    Raises:
        ConfigError: anything but an error on purpose was raised.
    """
    try:
        yield
    except OutsizeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{directory}: its files are not what a run writes, or contradict each other "
            f"({type(error).__name__}: {error}); without plan.json, run.json, prediction.json and timeline.json the "
            "heartbeat alone is told"
        ) from error


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
        description="`idle_s` by compute lane, cause and owner; adds up to it; of the first three "
        "steps and one in four, else empty"
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
