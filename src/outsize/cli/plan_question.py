"""From the options of ``outsize plan`` to a question for the planner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from outsize.cli.model_config import read_config
from outsize.cli.plan_nodes import check_nodes, net_of, share_of, wire_of
from outsize.cli.plan_options import PlanFlags
from outsize.config import Config, load_config
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import CUBLAS_BYTES, DEVICE_SHARE, DISK_SHARE, HOST_SHARE, Machine
from outsize.hardware.presets import parse_gpus
from outsize.model.sizes.lora_from_config import ALL_LINEAR, adapted_workload, parse_modules, with_adapters
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.model.sizes.spec_from_config import in_mlp_parts, read_shape, spec_from_config
from outsize.model.sizes.workload import count_workload
from outsize.planner.predict.decision import fits_at_all, fits_encoded
from outsize.planner.predict.question import Question
from outsize.planner.search.step_plan import Budgets
from outsize.session.job.job_options import options_for, question_for
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


def ask_what_fits(options: PlanFlags) -> Asked:
    """Return the question of `ask`; tokens per step that the user does not name are halved while nothing fits.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or of a family whose sizes its config does not tell.
    """
    asked = ask(options)
    nodes = asked.question.nodes
    sequences = asked.question.sequences * nodes
    while options.tokens_per_step is None and not _fits(asked) and sequences >= 2 * FEWEST_SEQUENCES * nodes:
        sequences //= 2
        asked = ask(replace(options, tokens_per_step=sequences * asked.question.seq_len))
    return asked


def _fits(asked: Asked) -> bool:
    """Whether any plan fits: of microbatches of one sequence, and of encoded weights, where the user names neither."""
    question = asked.question
    plain = replace(question, microbatches=question.microbatches or question.sequences)
    return fits_at_all(plain) or (asked.config.transport.weights == "auto" and fits_encoded(plain))


def ask(options: PlanFlags) -> Asked:
    """Return the question that the options of the command make.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or of a family whose sizes its config does not tell.
    """
    check_nodes(options)
    machine = _with_ram(_machine(options.gpus, options.machine), options.ram)
    path, hf_config = read_config(options.model)
    adapters = (options.lora_r, parse_modules(options.lora_modules)) if options.method == "lora" else None
    spec, workload_of = model_of(hf_config, options.dtype, adapters, options.mlp_parts)
    seq_len = _seq_len(options.seq_len, hf_config.get("max_position_embeddings"))
    config = _config(options, path, seq_len)
    in_parts = _in_parts(hf_config, options.dtype, adapters, seq_len) if options.mlp_parts == 1 else None
    share_of(config.sequences_per_step, options.nodes)
    question = question_for(
        config,
        spec,
        machine,
        _budgets(machine, config),
        # A machine is taken to have the kernels that come with an install.
        options_for(
            config,
            spec,
            num_workers=len(machine.gpus),
            num_ranks=options.nodes,
            can_part=in_parts is not None,
            wire=wire_of(options),
        ),
        workload_of=lambda sequences: workload_of(sequences, seq_len),
        in_mlp_parts=in_parts,
        net_bytes_per_s=net_of(options),
        # A probed machine without a GPU computes on its processor, which hangs on no PCIe.
        fixed_bytes=CUBLAS_BYTES if any(gpu.pcie_generation for gpu in machine.gpus) else 0,
    )
    return Asked(
        name=options.model,
        question=question,
        config=config,
        tokens=_tokens(options.tokens),
        method=_method(adapters),
        hf_config=hf_config,
        adapters=adapters,
    )


def _method(adapters: Adapters | None) -> str:
    if adapters is None:
        return "full training"
    rank, modules = adapters
    return f"LoRA of rank {rank} on {', '.join(modules)}"


def _seq_len(wanted: int | None, limit: int | None) -> int:
    """Return the tokens of a sequence; ``limit`` is how many positions the model has, where it has a limit."""
    if wanted is None:
        return min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN)
    if limit is not None and wanted > limit:
        raise ConfigError(f"--seq-len: {wanted} is longer than the {limit} positions of the model; lower it")
    return wanted


def _config(options: PlanFlags, path: str, seq_len: int) -> Config:
    """Return the configuration of the run that is asked about."""
    tokens_per_step = options.tokens_per_step
    flags: dict[str, Any] = {
        "model.path": path,
        "model.dtype": options.dtype,
        "data.path": options.data,
        "data.seq_len": seq_len,
        "train.tokens_per_step": DEFAULT_SEQUENCES * seq_len if tokens_per_step is None else tokens_per_step,
        "train.microbatches": options.microbatches,
        "train.mlp_parts": options.mlp_parts,
        "optimizer.max_grad_norm": options.max_grad_norm,
        "optimizer.clip": options.clip,
        "optimizer.name": options.optimizer,
        "optimizer.state": options.optimizer_state,
        "optimizer.masters": options.masters,
        "memory.device": "cuda",
        "memory.device_memory": options.device_memory,
        "memory.host_memory": options.host_memory,
        "memory.home": options.home,
        "transport.weights": options.transport_weights,
        "parallel.gradients": options.net_gradients,
        "parallel.weights": options.net_weights,
    }
    if options.method == "lora":
        flags |= {"train.method": "lora", "lora.r": options.lora_r}
        if options.lora_modules:
            flags["lora.target_modules"] = _named(options.lora_modules)
    return load_config(flags=flags, environ={})


def model_of(
    hf_config: Mapping[str, Any], dtype: str, adapters: Adapters | None, mlp_parts: int = 1
) -> tuple[ModelSpec, Callable[[int, int], Workload]]:
    """Return the units of a model, and what a microbatch of so many sequences of so many tokens takes.

    Raises:
        ModelError: a family whose sizes its config does not tell, or a mixture whose MLPs are to go in parts.
        ConfigError: adapters for layers that it does not have.
    """
    shape, spec = in_mlp_parts(read_shape(hf_config), mlp_parts), spec_from_config(hf_config, dtype)

    def plain(sequences: int, seq_len: int) -> Workload:
        return count_workload(shape, dtype, sequences=sequences, seq_len=seq_len)

    if adapters is None:
        return spec, plain
    adapted = with_adapters(spec, *adapters)
    return adapted, lambda sequences, seq_len: adapted_workload(plain(sequences, seq_len), adapted)


def _in_parts(
    hf_config: Mapping[str, Any], dtype: str, adapters: Adapters | None, seq_len: int
) -> Callable[[int], Callable[[int], Workload]] | None:
    """Return what a microbatch takes with MLPs in so many parts; None for mixtures of experts."""
    if read_shape(hf_config).experts:
        return None

    def workload_of(mlp_parts: int) -> Callable[[int], Workload]:
        _, found = model_of(hf_config, dtype, adapters, mlp_parts)
        return lambda sequences: found(sequences, seq_len)

    return workload_of


def _named(modules: str) -> str | tuple[str, ...]:
    """Return adapted modules as a configuration names them, where a text by itself is a regular expression."""
    return modules.strip() if modules.strip() == ALL_LINEAR else parse_modules(modules)


def _machine(gpus: str | None, file: Path | None) -> Machine:
    if (gpus is None) == (file is None):
        raise ConfigError("say which machine, once: --gpus 8x4090, or --machine machine.json")
    if gpus is not None:
        return parse_gpus(gpus)
    assert file is not None
    from outsize.hardware.from_probe import read_machine  # the form of a probe's file takes a while to load

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
