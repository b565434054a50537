"""Make the planner's question of the flags of ``outsize plan``, and a ``train.yaml`` of its answer."""

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from outsize.accelerators import kind_of
from outsize.choices import BlockKernels, Home
from outsize.cli.plan.plan_machine import machine_from, net_of, share_of, size_of, wire_of
from outsize.cli.plan.plan_model import (
    ALSO,
    SETTINGS,
    AskedModel,
    ModelFigures,
    adapted_modules,
    is_run,
    read_config,
    read_run,
)
from outsize.cli.plan.plan_options import PlanFlags, sized_by_records
from outsize.config import Config, SourceConfig, dump_config, load_config
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import (
    CUBLAS_BYTES,
    DEVICE_SHARE,
    DISK_SHARE,
    HOST_SHARE,
    STREAM_BYTES,
    Figure,
    Machine,
)
from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.memory.memory_table import by_class
from outsize.planner.predict.prediction import Prediction
from outsize.planner.predict.question import Question, fits_at_all, fits_encoded
from outsize.planner.search.step_plan import Budgets
from outsize.session.job.job_options import options_for, question_for
from outsize.units import format_bytes, parse_count

# Sequences of a step, the most and the least, where the user names none.
DEFAULT_SEQUENCES, FEWEST_SEQUENCES = 64, 8
# Up and down, of memory that is not pinned: bench/results/gpu_h200_2026-11.json.
_PAGEABLE_BYTES_PER_S = (8.3e9, 15.5e9)
_MIB = 2**20
_OF_ADAPTERS = {"lora.target_modules": "lora_modules", "lora.target_parameters": "lora_parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked, in the planner's words and in those of a run.

    Attributes:
        name: the model, as the user wrote it.
        question: for the planner.
        machines: the same about whole nodes, where each process has one GPU of several.
        config: of the run that is asked about; its microbatches are those given, or one.
        tokens: to train on; None where the user named none.
        note: what their number rests on, for people; empty of one that the user named.
        method: what trains, for people.
        model: that it is about.
        figures: of that model.
        of_records: whether sequences and steps are those that a run chooses by its chats and prompts.
    """

    name: str
    question: Question
    machines: Question
    config: Config
    tokens: float | None
    note: str
    method: str
    model: AskedModel
    figures: ModelFigures
    of_records: bool = False


def ask_what_fits(options: PlanFlags, model: AskedModel | None = None) -> Asked:
    """Return the question of `ask`; tokens per step that the user does not name are halved while nothing fits.

    Gradients that wait for no norm have no memory to be summed in, so that activations of a step are all there at once:
    a home that may be anywhere is then in host memory where one of these sizes fits there, else on disk.

    Args:
        options: of the command.
        model: that they name, where its config was read already.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or none that can be counted.
    """
    model = model or asked_model(options)
    sized = options if model.run is not None else sized_by_records(options, model.path, model.positions)
    request = ask(sized, model)
    if sized.tokens_per_step is not None:
        return request if sized is options else replace(request, of_records=True)
    home, summed = request.question.home, request.config.optimizer.clip == "global"
    homes: tuple[Home, ...] = (home,) if summed or home != "auto" else ("host", "auto")
    share = request.question.tokens_per_step // DEFAULT_SEQUENCES
    sizes = [DEFAULT_SEQUENCES * share]
    while sizes[-1] >= 2 * FEWEST_SEQUENCES * share and sizes[-1] // 2 // share % request.question.nodes == 0:
        sizes.append(sizes[-1] // 2)
    for fitting, tokens in product(homes, sizes):
        request = ask(replace(options, tokens_per_step=tokens), model, request.figures)
        if _fits(request.question, fitting, request.config):
            break
    return request


def asked_model(options: PlanFlags) -> AskedModel:
    """Return the model that options name, or that the run does whose file they name.

    Raises:
        ConfigError: the file of the run cannot be read, or is wrong.
        ModelError: no model there.
    """
    if not is_run(options.model):
        return AskedModel(*read_config(options.model))
    run = read_run(options.model)
    is_named = "seq_len" in options.named | run.data.model_fields_set
    lengths = (
        f"sequences of {run.data.seq_len} tokens, for {options.model} has no data.seq_len: of chats and prompts a "
        f"run chooses it by the data (outsize train {options.model} --dry-run); name it with --seq-len",
    )
    program = (
        "train.program: the plan's own is predicted; outsize.predict(...).simulate(text) predicts another"
    )
    notes = (*(() if is_named else lengths), *(() if run.train.program is None else (program,)))
    return AskedModel(*read_config(run.model.path), run=options.model, notes=notes)


def _fits(question: Question, home: Home, config: Config) -> bool:
    """Whether any plan fits: of microbatches of one sequence, and of encoded weights, where the user names neither."""
    plain = replace(question, home=home, microbatches=question.microbatches or question.sequences)
    return fits_at_all(plain) or (config.transport.weights == "auto" and fits_encoded(plain))


def ask(options: PlanFlags, model: AskedModel | None = None, figures: ModelFigures | None = None) -> Asked:
    """Return the question that the options of the command make.

    Args:
        options: of the command.
        model: that they name, where its config was read already.
        figures: of that model, where it was asked about with other tokens per step.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
        ModelError: no model there, or none that can be counted.
    """
    machines = machine_from(options)
    in_each = 1 if options.nodes == 1 else len(machines.gpus)  # processes of nodes have one GPU
    machine, num_ranks = machines if in_each == 1 else machines.of_each_gpu(), options.nodes * in_each
    model = model or asked_model(options)
    model, seq_len = model.with_samples(options)
    config = _config(options, model, seq_len, adapted_modules(options.lora_modules))
    figures = figures or _figures(model, config)
    spec = figures.spec
    share_of(config.sequences_per_step, num_ranks)
    fields = () if model.run is None else SourceConfig.model_fields
    tokens, note = _tokens(options, model.path, {name: getattr(config.data, name) for name in fields})
    own_processor = not all(gpu.is_host for gpu in machine.gpus)
    net = net_of(options)
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
            num_ranks=num_ranks,
            can_part=figures.in_mlp_parts is not None,
            wire=wire_of(options),
        ),
        own_processor=own_processor,
        workload_of=figures.workload_of,
        in_mlp_parts=figures.in_mlp_parts,
        net_bytes_per_s=net and replace(net, value=net.value / in_each),
        fixed_bytes=CUBLAS_BYTES * own_processor,
        stream_bytes=STREAM_BYTES * own_processor,
    )
    question = replace(question, machine=_as_pinned(question, config, options.generate))
    return Asked(
        name=options.model,
        question=question,
        machines=question if in_each == 1 else _of_machines(question, machines, net),
        config=config,
        tokens=tokens,
        note=note,
        method=_method(config, spec),
        model=model,
        figures=figures,
    )


def _figures(model: AskedModel, config: Config) -> ModelFigures:
    try:
        return model.figures(config)
    except ConfigError as error:
        raise ConfigError(in_options(str(error))) from None


def _of_machines(question: Question, machine: Machine, net: Figure | None) -> Question:
    """Return ``question``, of processes with a GPU each, about the machines that they share."""
    count, budgets = len(machine.gpus), question.budgets
    return replace(
        question.deciding(nodes=question.nodes // count),
        machine=machine,
        budgets=replace(budgets, host=budgets.host and budgets.host * count),
        sequences=question.sequences * count,
        net_bytes_per_s=net,
    )


def _as_pinned(question: Question, config: Config, reads_only: bool) -> Machine:
    """Return the machine with what its links reach of a home in host memory of which its driver pins a part."""
    model, machine = question.model, question.machine
    most = machine.host.pinned_bytes
    # A home on disk crosses by way of buffers, which are pinned first.
    if most is None or question.home == "disk" or not (reads_only or _fits(question, "host", config)):
        return replace(machine, host=replace(machine.host, pinned_bytes=None))
    parts = by_class(model, question.options.state or model.dtype)
    names = ("weights", "frozen weights") if reads_only else ("weights", "frozen weights", "gradients")
    crossing = sum(parts.get(name, 0) for name in names)
    share = min(1.0, most / crossing)
    source = (
        f"{format_bytes(min(most, crossing))} of the {format_bytes(crossing)} that cross from a home in host memory "
        "are pinned; assumed: the rest goes up at 8.3 and down at 15.5 GB/s, as measured beside an H200"
    )
    links = tuple(link.partly_pinned(share, *_PAGEABLE_BYTES_PER_S, source, False) for link in machine.links)
    return replace(machine, links=links)


def _method(config: Config, spec: ModelSpec) -> str:
    if config.train.method != "lora":
        return "full training"
    experts = config.lora.target_parameters or ()
    adapted = (
        tensor.name.partition(".lora_A")[0]
        for unit in spec.units
        for tensor in unit.tensors
        if ".lora_A" in tensor.name
    )
    modules = dict.fromkeys(name.replace(".base_layer", "").rpartition(".")[2] for name in adapted)
    named = [name for name in modules if not any(name in stack.split(".") for stack in experts)]
    return f"LoRA of rank {config.lora.r} on {', '.join((*named, *experts))}"


def _config(
    options: PlanFlags, model: AskedModel, seq_len: int, modules: str | tuple[str, ...] | None
) -> Config:
    """Return the configuration of the run that is asked about."""
    tokens_per_step = options.tokens_per_step
    flags: dict[str, Any] = {
        **{setting: getattr(options, name) for setting, name in SETTINGS.items()},
        "data.path": options.data or "data",
        "memory.resident": int(options.resident) if options.resident.isdigit() else options.resident,
        "model.path": model.path,
        "train.method": options.method,
        "model.kernels": options.kernels if options.kernels in get_args(BlockKernels) else "none",
        "data.seq_len": seq_len,
        "train.tokens_per_step": DEFAULT_SEQUENCES * seq_len if tokens_per_step is None else tokens_per_step,
        "memory.device": "cuda",
        "memory.device_memory": _budget("--device-memory", options.device_memory),
        "memory.host_memory": _budget("--host-memory", options.host_memory),
    }
    if options.base_codec != "raw" and options.method != "lora" and model.run is None:
        raise ConfigError(
            "--base-codec is how a frozen model is held, and full training freezes none; add --method lora"
        )
    adapters = [
        f"--{name.replace('_', '-')}"
        for name in ("lora_r", "lora_modules", "lora_parameters")
        if name in options.named
    ]
    if adapters and options.method != "lora":
        raise ConfigError(
            f"{', '.join(adapters)}: full training has no adapters; add --method lora, or leave it out"
        )
    if options.epochs is not None:
        flags["train.epochs"] = float(options.epochs)
    if options.method == "lora":
        flags |= {"lora.r": options.lora_r, "lora.base_codec": options.base_codec}
        if options.lora_parameters is not None:
            flags["lora.target_parameters"] = tuple(options.lora_parameters.replace(" ", "").split(","))
        if modules is not None:
            flags["lora.target_modules"] = modules
    return load_config(model.run, flags=flags, environ={})


def in_options(text: str) -> str:
    """Return ``text`` with settings of a run, such as ``train.mlp_parts=4``, as options of this command."""

    def as_option(match: re.Match[str]) -> str:
        name = (SETTINGS | ALSO | _OF_ADAPTERS).get(match[1])
        return match[0] if name is None else f"--{name.replace('_', '-')} {match[2] or ''}".rstrip()

    return re.sub(r"\b(\w+\.\w+)(?:=(\w+))?", as_option, text)


def _budget(option: str, text: str | None) -> int | None:
    return None if text is None else size_of(option, text)


def _budgets(machine: Machine, config: Config) -> Budgets:
    """Return the budgets: what the user names, or the shares that a run would take of the machine."""
    memory, disk = config.memory, machine.disk
    smallest = min(gpu.memory_bytes for gpu in machine.gpus)
    for option, budget, present, instead in (
        ("--device-memory", memory.device_memory, smallest, "--what-if vram=+8GB, or --gpu-spec"),
        ("--host-memory", memory.host_memory, machine.host.memory_bytes, "--ram"),
    ):
        if budget is not None and budget > present:
            raise ConfigError(
                f"{option}: {format_bytes(budget)} is more than the {format_bytes(present)} of this machine; lower it, "
                f"or ask about a larger machine with {instead}"
            )
    return Budgets(
        device=memory.device_memory or _whole_mib(DEVICE_SHARE * smallest),
        host=memory.host_memory or _whole_mib(HOST_SHARE * machine.host.memory_bytes),
        disk=None if disk is None else _whole_mib(DISK_SHARE * disk.capacity_bytes),
    )


def _whole_mib(num_bytes: float) -> int:
    return int(num_bytes) // _MIB * _MIB


def _tokens(options: PlanFlags, model_path: str, reads: dict[str, Any]) -> tuple[float | None, str]:
    """Return the tokens to train on, named or those of the data, and what their number rests on."""
    text, data = options.tokens, Path(options.data or "")
    if options.epochs is not None and text is not None:
        raise ConfigError("--epochs says how often --data is trained on, --tokens how much: leave one out")
    if options.epochs is not None and (options.data is None or not data.exists()):
        where = "" if options.data is None else f" at {data}"
        raise ConfigError(f"--epochs: no data{where}; name them with --data")
    if text is None and (options.epochs is not None or ("data" in options.named and data.exists())):
        from outsize.data.reading.record_lengths import count_data

        counted, epochs = count_data(data, Path(model_path), reads), options.epochs or 1
        times = f", {epochs} times" if epochs > 1 else ""
        return epochs * counted.tokens, f"{data.name}{times}: {counted.note}"
    if text is None:
        return None, ""
    try:
        count = parse_count(text)
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}") from error
    if count < 1:
        raise ConfigError("--tokens: zero tokens take no time; write for example 500M or 10B")
    return count, ""


def train_yaml(request: Asked, prediction: Prediction) -> str:
    """Return the configuration of the predicted run, as YAML."""
    config, budgets = request.config, request.question.budgets
    in_epochs = prediction.steps is None or config.train.epochs is not None
    steps = config.train.steps if in_epochs else prediction.steps
    packed = {"pack": "documents"} if request.of_records else {}
    run = config.model_copy(
        update={
            "train": config.train.model_copy(
                update={"steps": steps, "microbatches": prediction.microbatches}
            ),
            "data": config.data.model_copy(update=packed),
            "memory": config.memory.model_copy(
                update={
                    "device": _devices(len(request.question.machine.gpus), config.memory.device),
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
    return f"{kind_of(device)}:" + ",".join(map(str, range(count))) if count > 1 else device
