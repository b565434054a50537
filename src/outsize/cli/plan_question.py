"""From the options of ``outsize plan`` to a question for the planner, and from its answer to a ``train.yaml``."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

from outsize.cli.model_config import read_config
from outsize.cli.plan_largest import Scaled, largest
from outsize.codecs.wire import EXACT, Wire
from outsize.config import Config, dump_config, load_config
from outsize.errors import ConfigError
from outsize.hardware.from_probe import read_machine
from outsize.hardware.presets import parse_gpus
from outsize.hardware.spec import CUBLAS_BYTES, DEVICE_SHARE, DISK_SHARE, HOST_SHARE, Figure, Machine
from outsize.model.lora_from_config import ALL_LINEAR, adapted_workload, parse_modules, with_adapters
from outsize.model.spec import ModelSpec, Workload
from outsize.model.spec_from_config import read_shape, spec_from_config
from outsize.model.workload import count_workload
from outsize.optim.spec import StateLayout, masters_for, num_moments_of
from outsize.planner.plan import Budgets
from outsize.planner.prediction import Prediction
from outsize.planner.question import Question
from outsize.planner.search import fits_at_all
from outsize.units import parse_bytes, parse_count

# Sequences of a step, the most and the least, and tokens of a sequence, where the user names none.
DEFAULT_SEQUENCES, FEWEST_SEQUENCES = 64, 8
DEFAULT_SEQ_LEN = 2048
_MIB = 2**20
# Rank and modules.
Adapters = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked, in the planner's words and in those of a run.

    Attributes:
        name: the model, as the user wrote it.
        question: for the planner.
        config: of the run that is asked about; its microbatches are those given, or one.
        tokens: to train on; None where the user named none.
        method: what trains, for people.
        hf_config: of the model.
        adapters: rank and modules; None for full training.
    """

    name: str
    question: Question
    config: Config
    tokens: float | None
    method: str
    hf_config: Mapping[str, Any]
    adapters: Adapters | None

    @property
    def steps(self) -> int | None:
        """Optimizer steps of ``tokens``."""
        return None if self.tokens is None else ceil(self.tokens / self.question.tokens_per_step)


def ask_what_fits(model: str, *, seq_len: int | None, tokens_per_step: int | None, **options: Any) -> Asked:
    """Return the question of `ask`; tokens per step that the user does not name are halved while nothing fits.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or of a family whose sizes its config does not tell.
    """
    asked = ask(model, seq_len=seq_len, tokens_per_step=tokens_per_step, **options)
    nodes = asked.question.nodes
    sequences = asked.question.sequences * nodes
    while tokens_per_step is None and not _fits(asked) and sequences >= 2 * FEWEST_SEQUENCES * nodes:
        sequences //= 2
        tokens = sequences * asked.question.seq_len
        asked = ask(model, seq_len=seq_len, tokens_per_step=tokens, **options)
    return asked


def _fits(asked: Asked) -> bool:
    """Whether any plan fits, of microbatches of one sequence where the user names none."""
    question = asked.question
    return fits_at_all(replace(question, microbatches=question.microbatches or question.sequences))


def ask(
    model: str,
    *,
    gpus: str | None,
    machine: Path | None,
    method: str,
    lora_r: int,
    lora_modules: str | None,
    nodes: int,
    net: str | None,
    wire: tuple[str, str],
    dtype: str,
    seq_len: int | None,
    tokens_per_step: int | None,
    microbatches: int | None,
    home: str,
    ram: str | None,
    device_memory: str | None,
    host_memory: str | None,
    max_grad_norm: float,
    clip: str,
    optimizer: str,
    optimizer_state: str,
    masters: str,
    tokens: str | None,
    data: str,
) -> Asked:
    """Return the question that the options of the command make.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or of a family whose sizes its config does not tell.
    """
    if nodes > 1 and clip == "unit":
        raise ConfigError("--clip unit: several nodes clip by the norm of all gradients; use global, or none")
    if nodes > 1 and (optimizer_state, masters) not in (("fp32", "auto"), ("fp32", "separate")):
        raise ConfigError(
            "--optimizer-state, --masters: several nodes share a state of separate masters and fp32 moments; leave "
            "them as they are by default"
        )
    box = _with_ram(_machine(gpus, machine), ram)
    path, hf_config = read_config(model)
    adapters = (lora_r, parse_modules(lora_modules)) if method == "lora" else None
    spec, workload_of = model_of(hf_config, dtype, adapters)
    limit = hf_config.get("max_position_embeddings")
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN)
    elif limit is not None and seq_len > limit:
        raise ConfigError(f"--seq-len: {seq_len} is longer than the {limit} positions of the model; lower it")
    config = load_config(
        flags={
            "model.path": path,
            "model.dtype": dtype,
            "data.path": data,
            "data.seq_len": seq_len,
            "train.tokens_per_step": DEFAULT_SEQUENCES * seq_len
            if tokens_per_step is None
            else tokens_per_step,
            "train.microbatches": microbatches,
            "optimizer.max_grad_norm": max_grad_norm,
            "optimizer.clip": clip,
            "optimizer.name": optimizer,
            "optimizer.state": optimizer_state,
            "optimizer.masters": masters,
            "memory.device": "cuda",
            "memory.device_memory": device_memory,
            "memory.host_memory": host_memory,
            "memory.home": home,
            "parallel.gradients": wire[0],
            "parallel.weights": wire[1],
            **({"train.method": "lora", "lora.r": lora_r} if adapters else {}),
            **({"lora.target_modules": _named(lora_modules)} if adapters and lora_modules else {}),
        },
        environ={},
    )
    question = Question(
        model=spec,
        machine=box,
        budgets=_budgets(box, config),
        home=cast(Literal["auto", "host", "disk"], home),
        sequences=_share_of(config.sequences_per_step, nodes),
        seq_len=seq_len,
        microbatches=microbatches,
        clip=dtype == "fp16" or (max_grad_norm > 0 and clip == "global"),
        unit_clip=max_grad_norm > 0 and clip == "unit",
        state=_state(config, spec, nodes),
        workload_of=lambda sequences: workload_of(sequences, seq_len),
        nodes=nodes,
        net_bytes_per_s=_net(nodes, net),
        wire=_wire(nodes, wire, dtype),
        # A probed machine without a GPU computes on its processor, which hangs on no PCIe.
        fixed_bytes=CUBLAS_BYTES if any(gpu.pcie_generation for gpu in box.gpus) else 0,
    )
    return Asked(
        name=model,
        question=question,
        config=config,
        tokens=_tokens(tokens),
        method="full training" if adapters is None else f"LoRA of rank {lora_r} on {', '.join(adapters[1])}",
        hf_config=hf_config,
        adapters=adapters,
    )


def model_of(
    hf_config: Mapping[str, Any], dtype: str, adapters: Adapters | None
) -> tuple[ModelSpec, Callable[[int, int], Workload]]:
    """Return the units of a model, and what a microbatch of so many sequences of so many tokens takes.

    Raises:
        ModelError: a family whose sizes its config does not tell.
        ConfigError: adapters for layers that it does not have.
    """
    shape, spec = read_shape(hf_config), spec_from_config(hf_config, dtype)

    def plain(sequences: int, seq_len: int) -> Workload:
        return count_workload(shape, dtype, sequences=sequences, seq_len=seq_len)

    if adapters is None:
        return spec, plain
    adapted = with_adapters(spec, *adapters)
    return adapted, lambda sequences, seq_len: adapted_workload(plain(sequences, seq_len), adapted)


def largest_models(asked: Asked) -> tuple[Scaled, ...]:
    """Return the largest models of the family that fit the same budgets, with microbatches of one sequence."""
    question = replace(asked.question, microbatches=asked.question.sequences)

    def fits(hf_config: Mapping[str, Any]) -> int | None:
        spec, workload_of = model_of(hf_config, asked.config.model.dtype, asked.adapters)
        other = replace(
            question, model=spec, workload_of=lambda sequences: workload_of(sequences, question.seq_len)
        )
        return spec.num_parameters if fits_at_all(other) else None

    return largest(asked.hf_config, fits)


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


def _named(modules: str) -> str | tuple[str, ...]:
    """Return adapted modules as a configuration names them, where a text by itself is a regular expression."""
    return modules.strip() if modules.strip() == ALL_LINEAR else parse_modules(modules)


def _state(config: Config, spec: ModelSpec, nodes: int) -> StateLayout:
    """Return how a trained unit lies at home, its gradient aside."""
    optimizer = config.optimizer
    if optimizer.masters == "split" and spec.dtype != "bf16":
        raise ConfigError(
            f"--masters: only those of bf16 weights can be split, and {spec.dtype} is trained here"
        )
    if optimizer.clip == "unit" and spec.compute_dtype == "fp16":
        raise ConfigError(
            "--clip: fp16 may have to skip a step, for which all its gradients are to be known; use bf16"
        )
    num_moments = num_moments_of(optimizer.name, optimizer.momentum)
    moments = optimizer.state if num_moments else "fp32"
    # Several nodes share separate masters; a machine is taken to have the kernels that come with an install.
    masters = masters_for(optimizer.masters, spec.dtype, moments, kernels=nodes == 1)
    return StateLayout(dtype=spec.dtype, masters=masters, moments=moments, num_moments=num_moments)


def _share_of(sequences: int, nodes: int) -> int:
    if nodes < 1:
        raise ConfigError(f"--nodes: {nodes} machines train nothing")
    if sequences % nodes:
        raise ConfigError(f"--nodes: {sequences} sequences of a step are not shared evenly by {nodes} nodes")
    return sequences // nodes


def _wire(nodes: int, wire: tuple[str, str], dtype: str) -> Wire:
    found = Wire(gradients=wire[0], weights=wire[1])
    if nodes == 1 and found != EXACT:
        raise ConfigError(
            "--net-gradients and --net-weights have no effect with one node; say how many with --nodes"
        )
    if found.weights == "delta" and dtype == "fp32":
        raise ConfigError("--net-weights: delta is of 16-bit weights; leave it raw, or choose --dtype bf16")
    return found


def _net(nodes: int, text: str | None) -> Figure | None:
    """Return the rate of a network, in bits per second where it ends in ``b`` or in bytes where in ``B``."""
    if nodes == 1:
        if text is not None:
            raise ConfigError("--net has no effect with one node; say how many with --nodes")
        return None
    if text is None:
        raise ConfigError("--nodes needs the rate of the network: --net 25Gb")
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kMGT])(b|bit|B)(?:/s|ps)?\s*", text)
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--net: not a rate: {text!r}; write 25Gb for gigabits or 3GB for gigabytes per second"
        )
    rate = float(match[1]) * {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return Figure(value=rate if match[3] == "B" else rate / 8, source=f"--net {text.strip()}")


def _machine(gpus: str | None, file: Path | None) -> Machine:
    if (gpus is None) == (file is None):
        raise ConfigError("say which machine, once: --gpus 8x4090, or --machine machine.json")
    if gpus is not None:
        return parse_gpus(gpus)
    assert file is not None
    return read_machine(file)


def _with_ram(machine: Machine, ram: str | None) -> Machine:
    """Return ``machine`` with that much host memory."""
    if ram is None:
        return machine
    try:
        num_bytes = parse_bytes(ram)
    except ValueError as error:
        raise ConfigError(f"--ram: {error}") from error
    if num_bytes <= 0:
        raise ConfigError("--ram: a machine has some; write for example 64GB")
    return replace(machine, host=replace(machine.host, memory_bytes=num_bytes))


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
