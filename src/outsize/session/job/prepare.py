"""Everything that must be known before the first step: the model's units, their sizes, the plan that fits them.

`demand_of_run` builds, splits and measures the model; `decision_for` plans it; `planned` makes a job of the two.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.compat.transformers_private import attention_of
from outsize.detail import Detail
from outsize.errors import ConfigError, ModelError
from outsize.model.adapters import Adapters
from outsize.model.build import load_hf_config
from outsize.model.compiled import as_they_are
from outsize.model.products import error_of
from outsize.model.sizes.model_spec import ModelSpec
from outsize.model.split import Split, UnitChoice
from outsize.model.walk import Boundaries
from outsize.optim.shares import own_elements, shares
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.passes.slots import validate
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.heap import resident_bytes, trim
from outsize.runtime.trial.border_trial import check_borders
from outsize.runtime.trial.calibrate import calibrate
from outsize.runtime.trial.measured import KnownRows, Measured
from outsize.runtime.trial.trial_pass import in_turn
from outsize.runtime.trial.unit_clock import compile_units
from outsize.session.job.demand import DemandTrial, RunDemand, Trials, made_up_inputs
from outsize.session.job.job_options import named_transport
from outsize.session.job.known_models import KnownTrials, has_unversioned_code
from outsize.session.job.machine import (
    check_directory,
    check_transport,
    describe_machine,
    determinism_said,
    home_file,
)
from outsize.session.job.model_setup import change_blocks, check_length, skeleton_of, sourced, split_model
from outsize.session.job.optimizer_layout import layout_for, with_masters_of
from outsize.session.job.own_code import check_loss
from outsize.session.job.planning import decision_for
from outsize.streamed.spec import RunSpec, check_shares, dtype_chosen
from outsize.units import format_bytes, format_count

Announce = Callable[[str], None]
# Variables of the environment that choose kernels of torch.
_TORCH_READS = ("TORCH_", "PYTORCH_", "ATEN_", "NVIDIA_", "DNNL_", "ONEDNN_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(RunDemand):
    """A run that is known to fit; its config has as many microbatches as the plan.

    Attributes:
        measured: what a microbatch needs on the device.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        plan: memory sizes and the program of a step.
    """

    measured: Measured
    chunk_tokens: int | None
    plan: Plan

    @property
    def heap(self) -> bool:
        """Whether the plan has room for what the C allocator keeps of freed memory."""
        return self.plan.heap

    @property
    def whole(self) -> tuple[str, ...]:
        """State planes that every rank stores in full (not sharded)."""
        return self.plan.layout.whole_planes

    @property
    def own(self) -> tuple[range, ...] | None:
        """The elements of each unit that this rank steps; None for all of a single process."""
        group = self.group
        if group.size == 1:
            return None
        return tuple(ranges[group.rank] for ranges in shares(self.split.spec, group.size))


def prepare(
    run: RunSpec, announce: Announce, source: WeightSource | None = None, adapters_from: Path | None = None
) -> Job:
    """Read the model's config, split it, measure it, and plan a step by data sheets of the machine.

    Args:
        run: what it is; nothing is written.
        announce: called with lines for people.
        source: where weights come from; None for the checkpoint that ``model.path`` names.
        adapters_from: directory that adapters come from, a checkpoint's, say; None for fresh ones.

    Raises:
        OutsizeError: anything that a run could not be started with; nothing has been written yet.
    """
    demand = demand_of_run(run, announce, source, adapters_from)
    if (unpacked := _unpacked(demand, announce)) is not None:
        return prepare(unpacked, announce, source, adapters_from)
    plan = decision_for(demand).plan
    for line in _facts_of(demand, plan):
        announce(Detail(line))
    return planned(demand, plan)


def demand_of_run(
    run: RunSpec, announce: Announce, source: WeightSource | None = None, adapters_from: Path | None = None
) -> RunDemand:
    """Build the model of a run, split it, and find what it needs; see `prepare`."""
    _check_objective(run)
    _say_of_devices(run, announce)
    hf_config = load_hf_config(run.model_path, run.config.model.trust_remote_code)
    check_length(run.config.data.seq_len, hf_config)
    model = skeleton_of(run, hf_config, announce)
    before_bytes = resident_bytes()  # the model's own module is imported, and nothing else is done
    directory, source, adapters = sourced(run, model, source, adapters_from)
    parts = split_model(model, run.dtype, run.config, adapters)
    change_blocks(parts, run.blocks, run.devices, announce, announce)
    if run.blocks.products != "native":
        announce(f"products: {error_of(parts, lambda name, into: source.read(name, 0, into.numel(), into))}")
    announce(Detail(_described(model, parts.spec, adapters, run.dtype)))

    def demand_of(choice: UnitChoice) -> RunDemand:
        parts = split_model(model, run.dtype, run.config, adapters, choice)
        home = home_file(run.config.memory, run.run_dir)
        own_run = with_masters_of(home, run, parts.spec)
        demand = RunDemand(
            run=own_run,
            machine=describe_machine(run.memory, run.devices, _state_bytes(own_run, parts.spec), home),
            directory=directory,
            hf_config=hf_config,
            split=parts,
            source=source,
            trials=_trials(own_run, hf_config, parts, announce, adapters_from),
            before_bytes=before_bytes,
            adapters=adapters,
        )
        demand.trials(own_run.config.microbatches)
        return demand

    demand = in_turn(demand_of)
    if len(demand.split.layers) > 1:
        announce(demand.split.said())
    return demand


def planned(demand: RunDemand, plan: Plan) -> Job:
    """Return a run with ``plan``: its microbatches, its home, and what the microbatches need.

    Raises:
        ConfigError: codecs that the user has named do not go with the home.
    """
    count, machine = plan.layout.num_microbatches, demand.machine
    demand = replace(demand, run=demand.run.in_microbatches(count))
    config = demand.config
    check_transport(named_transport(config.transport), machine.devices, plan.home)
    for program in plan.programs:
        validate(program, plan.layout)
    if plan.home == "disk":
        check_directory(home_file(config.memory, demand.run_dir))
    measured, chunk_tokens = demand.trials(count)
    facts: dict[str, Any] = {field.name: getattr(demand, field.name) for field in fields(RunDemand)}
    facts |= {"machine": replace(machine, home=plan.home, below=plan.below)}
    job = Job(**facts, measured=measured, chunk_tokens=chunk_tokens, plan=plan)
    if config.model.compile != "blocks":
        return job
    least, rest = divmod(job.num_sequences, config.microbatches)
    for rows in range(max(least, 1), least + (2 if rest else 1)):
        inputs = made_up_inputs(config.data.pack, job.hf_config, rows, config.data.seq_len)
        compile_units(job.split, inputs, machine.devices.torch_device)
    trim()  # what is left of it was there before the run, as imports were
    return replace(job, before_bytes=max(job.before_bytes, resident_bytes()))


def _unpacked(demand: RunDemand, announce: Announce) -> RunSpec | None:
    """Return the run with a sequence for each document where the model does not keep them apart; None where it does."""
    try:
        _check_packing(demand)
    except ModelError as error:
        if not demand.run.may_unpack:
            raise
        announce(f"data.pack is none: {error}")
        return demand.run.unpacked()
    return None


def _check_packing(demand: RunDemand) -> None:
    """Check that documents are kept apart where they share sequences."""
    parts, text_config = demand.split, demand.hf_config.get_text_config()
    if demand.config.data.pack == "documents":
        # Compiled backwards run once, and what a block sees is its code's choice.
        with as_they_are(parts.model), Boundaries(parts.modules) as boundaries:
            check_borders(parts, boundaries.forwards, text_config.vocab_size)
        trim()


def _say_of_devices(run: RunSpec, announce: Announce) -> None:
    lines = (
        dtype_chosen(run.config.model.dtype, run.dtype, run.devices),
        determinism_said(run.config.train.deterministic, run.devices),
    )
    for line in filter(None, lines):
        announce(line)


def _state_bytes(run: RunSpec, spec: ModelSpec) -> int:
    """Return what the training state of this rank takes at home."""
    elements = own_elements(spec, run.group.size, run.group.rank)
    state = layout_for(run.config, spec, run.group.size, num_workers=run.num_workers)
    return sum(home_bytes(unit, state, elements[unit.index]) for unit in spec.units)


def _facts_of(demand: RunDemand, plan: Plan) -> Iterator[str]:
    """Say what a plan makes of a run."""
    count, machine, spec = plan.layout.num_microbatches, demand.machine, demand.split.spec
    if demand.config.train.microbatches is None and count > 1:
        yield f"steps of {demand.num_sequences} sequences are cut into {count} microbatches"
    if plan.layout.stages is None and plan.layout.num_rounds > 1:
        yield f"steps go in {plan.layout.num_rounds} rounds of up to {plan.layout.round_size} microbatches"
    yield (
        f"training state {format_bytes(_state_bytes(demand.run, spec))}{_encoded(plan)} on {plan.home}; device budget "
        f"{format_bytes(machine.device_bytes)} on {machine.devices}"
        + (", part of the RAM that it shares with the host" if machine.is_shared else "")
    )


def _encoded(plan: Plan) -> str:
    codec = plan.transport.weights
    return "" if plan.transport.is_raw("weights") else f", weights that do not train as {codec},"


def _described(model: nn.Module, spec: ModelSpec, adapters: Adapters | None, dtype: str) -> str:
    trained = f"{format_count(spec.num_trainable)} of them trained (LoRA), " if adapters else ""
    return (
        f"{type(model).__name__}: {format_count(spec.num_parameters)} parameters in {spec.num_streamed} units, "
        f"{trained}{dtype}, attention {attention_of(model)}"
    )


def _check_objective(run: RunSpec) -> None:
    check_shares(run.config, run.group.size)
    objective = run.config.train.objective
    if objective != "sft":
        raise ConfigError(
            f"train.objective: {objective} is for outsize train (and its --dry-run) alone, which has a trainer of "
            "another library do it"
        )


def _trials(
    run: RunSpec, hf_config: Any, parts: Split, announce: Announce, adapters_from: Path | None = None
) -> Trials:
    """Return what tries microbatches on the model, each number of them once."""
    rows = _known_rows(run, hf_config, parts, adapters_from)

    @cache
    def trial(microbatches: int) -> DemandTrial:
        with Boundaries(parts.modules) as boundaries:
            done = _measure(run, microbatches, hf_config, parts, boundaries, rows, announce)
        trim()
        return done

    return trial


def _known_rows(run: RunSpec, hf_config: Any, parts: Split, adapters_from: Path | None) -> KnownRows:
    """Return what trials have noted of a model before; nothing of one whose code or adapters are the user's own."""
    config = run.config
    named = config.model.trust_remote_code or config.train.loss_function
    begun = adapters_from or config.lora.begins_with or config.model.compile == "blocks"
    if named or begun or has_unversioned_code(parts.model):
        return KnownRows()
    described = {name: value for name, value in hf_config.to_dict().items() if name != "_name_or_path"}
    classes = {type(module) for module in parts.model.modules()}
    replaced = ((name, vars(module).get("forward")) for name, module in parts.model.named_modules())
    threads_and_kernels = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    model = [
        json.dumps(described, sort_keys=True, default=str),
        [attention_of(parts.model), str(parts.spec), str(run.blocks), run.dtype],
        sorted(f"{each.__module__}.{each.__qualname__} {_name_of(each.forward)}" for each in classes),
        [f"{name} {_name_of(forward)}" for name, forward in replaced if forward is not None],
        [
            config.data.pack,
            config.model.kernels,
            config.train.head_chunk_tokens,
            config.train.loss,
            config.train.neftune_noise_alpha,
            str(config.lora),
            str(config.model.freeze),
        ],
        [
            str(run.devices),
            run.devices.titles,
            threads_and_kernels,
            torch.are_deterministic_algorithms_enabled(),
        ],
        sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_TORCH_READS)),
    ]
    return KnownTrials(model, parts.spec.num_streamed)


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _measure(
    run: RunSpec,
    microbatches: int,
    hf_config: Any,
    parts: Split,
    boundaries: Boundaries,
    rows: KnownRows,
    announce: Announce,
) -> DemandTrial:
    config, train = run.config.in_microbatches(microbatches), run.config.train
    share = -(-config.sequences_per_step // run.group.size)
    wanted = None if train.loss == "model" or train.loss_function is not None else train.head_chunk_tokens
    measured = calibrate(
        parts,
        boundaries.forwards,
        partial(made_up_inputs, config.data.pack, hf_config),
        num_sequences=-(-share // microbatches),
        seq_len=config.data.seq_len,
        chunk_tokens=wanted,
        devices=run.devices,
        rows=rows,
        announce=announce,
    )
    check_loss(parts.model)
    if wanted is not None and not measured.plain_head:
        if train.loss == "chunked":
            raise ModelError(
                "train.loss=chunked needs a model whose loss is the shifted cross-entropy of its head's output; this "
                "one does something else after the head, so use train.loss=model"
            )
        announce(
            "loss: the model's own, with all logits of a microbatch, since more than cross-entropy follows its head"
        )
        wanted = None
    return DemandTrial(measured, wanted)
