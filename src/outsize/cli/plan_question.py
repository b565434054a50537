"""From the options of ``outsize plan`` to a question for the planner, and from its answer to a ``train.yaml``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

from outsize.config import Config, dump_config, load_config
from outsize.errors import CheckpointError, ConfigError, ModelError
from outsize.hardware.from_probe import read_machine
from outsize.hardware.presets import parse_gpus
from outsize.hardware.spec import CUBLAS_BYTES, DEVICE_SHARE, DISK_SHARE, HOST_SHARE, Machine
from outsize.model.spec_from_config import read_shape, spec_from_config
from outsize.model.workload import count_workload
from outsize.planner.plan import Budgets
from outsize.planner.prediction import Prediction
from outsize.planner.question import Question
from outsize.units import parse_count

# Sequences of a step, and tokens of a sequence, where the user names none.
DEFAULT_SEQUENCES = 64
DEFAULT_SEQ_LEN = 2048
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked, in the planner's words and in those of a run.

    Attributes:
        name: the model, as the user wrote it.
        question: for the planner.
        config: of the run that is asked about; its microbatches are those given, or one.
        tokens: to train on; None where the user named none.
    """

    name: str
    question: Question
    config: Config
    tokens: float | None

    @property
    def steps(self) -> int | None:
        """Optimizer steps of ``tokens``."""
        return None if self.tokens is None else ceil(self.tokens / self.question.tokens_per_step)


def ask(
    model: str,
    *,
    gpus: str | None,
    machine: Path | None,
    dtype: str,
    seq_len: int | None,
    tokens_per_step: int | None,
    microbatches: int | None,
    home: str,
    device_memory: str | None,
    host_memory: str | None,
    max_grad_norm: float,
    tokens: str | None,
    data: str,
) -> Asked:
    """Return the question that the options of the command make.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or of a family whose sizes its config does not tell.
    """
    box = _machine(gpus, machine)
    directory, hf_config = _read_config(model)
    shape, spec = read_shape(hf_config), spec_from_config(hf_config, dtype)
    limit = hf_config.get("max_position_embeddings")
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN)
    elif limit is not None and seq_len > limit:
        raise ConfigError(f"--seq-len: {seq_len} is longer than the {limit} positions of the model; lower it")
    config = load_config(
        flags={
            "model.path": str(directory),
            "model.dtype": dtype,
            "data.path": data,
            "data.seq_len": seq_len,
            "train.tokens_per_step": DEFAULT_SEQUENCES * seq_len
            if tokens_per_step is None
            else tokens_per_step,
            "train.microbatches": microbatches,
            "optimizer.max_grad_norm": max_grad_norm,
            "memory.device": "cuda",
            "memory.device_memory": device_memory,
            "memory.host_memory": host_memory,
            "memory.home": home,
        },
        environ={},
    )
    question = Question(
        model=spec,
        machine=box,
        budgets=_budgets(box, config),
        home=cast(Literal["auto", "host", "disk"], home),
        sequences=config.sequences_per_step,
        seq_len=seq_len,
        microbatches=microbatches,
        clip=max_grad_norm > 0 or dtype == "fp16",
        workload_of=lambda sequences: count_workload(shape, dtype, sequences=sequences, seq_len=seq_len),
        # A probed machine without a GPU computes on its processor, which hangs on no PCIe.
        fixed_bytes=CUBLAS_BYTES if any(gpu.pcie_generation for gpu in box.gpus) else 0,
    )
    return Asked(name=model, question=question, config=config, tokens=_tokens(tokens))


def train_yaml(asked: Asked, prediction: Prediction) -> str:
    """Return the configuration of the predicted run, as YAML."""
    config, budgets = asked.config, asked.question.budgets
    steps = config.train.steps if asked.steps is None else asked.steps
    run = config.model_copy(
        update={
            "train": config.train.model_copy(
                update={"steps": steps, "microbatches": prediction.microbatches}
            ),
            "memory": config.memory.model_copy(
                update={
                    "device": _devices(len(asked.question.machine.gpus), config.memory.device),
                    "device_memory": budgets.device,
                    "host_memory": budgets.host,
                    "home": prediction.home,
                }
            ),
        }
    )
    return dump_config(run)


def _devices(count: int, device: str) -> str:
    """Return the first ``count`` GPUs as a configuration names them; of one, what was asked for."""
    return "cuda:" + ",".join(map(str, range(count))) if count > 1 else device


def _read_config(model: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the directory of a model and its config."""
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"{model}: no such file or directory; give a model directory or its config.json")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{model} has no config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file} as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not the config of a model: expected an object")
    return file.parent, found


def _machine(gpus: str | None, file: Path | None) -> Machine:
    if (gpus is None) == (file is None):
        raise ConfigError("say which machine, once: --gpus 8x4090, or --machine machine.json")
    if gpus is not None:
        return parse_gpus(gpus)
    assert file is not None
    return read_machine(file)


def _budgets(machine: Machine, config: Config) -> Budgets:
    """Return the budgets: what the user names, or the shares that a run would take of the machine."""
    memory, disk = config.memory, machine.disk
    smallest = min(gpu.memory_bytes for gpu in machine.gpus)
    return Budgets(
        device=memory.device_memory or _whole_mib(DEVICE_SHARE * smallest),
        host=memory.host_memory or _whole_mib(HOST_SHARE * machine.host.memory_bytes),
        disk=None if disk is None else _whole_mib(DISK_SHARE * disk.capacity_bytes),
    )


def _whole_mib(num_bytes: float) -> int:
    return int(num_bytes) // _MIB * _MIB


def _tokens(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        count = parse_count(text)
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}") from error
    if count < 1:
        raise ConfigError("--tokens: zero tokens take no time; write for example 500M or 10B")
    return count
