"""Files of a run directory as whoever tells of a run reads them, whatever a crash or somebody else has left there.

A run that goes on may be writing them, one that was cut off may have left half a line, and a directory may be
anybody's. What a file holds is checked here, once: a line of a heartbeat is a step with all of its fields of the right
kind, or it is left out and counted. `as_a_run` is the boundary around what is made of them.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

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
