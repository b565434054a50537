"""Everything that must be known before the first step: the model's units, their sizes, the plan that fits them."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.codecs.spec import RAW
from outsize.codecs.transport import Transport
from outsize.codecs.wire import EXACT, Wire
from outsize.config import Config
from outsize.data.batch import IGNORED, Batch
from outsize.errors import ConfigError, InfeasiblePlanError, ModelError
from outsize.group.group import Group
from outsize.group.single import SingleGroup
from outsize.hardware.spec import CUBLAS_BYTES
from outsize.model.adapters import Adapters, AdapterSource, peft_config, put_in
from outsize.model.build import build_skeleton, load_hf_config
from outsize.model.checkpoint import CheckpointReader, WeightSource
from outsize.model.checkpoint_files import locate_checkpoint
from outsize.model.spec import ModelSpec
from outsize.model.spec_from_config import forward_flops, read_shape, recompute_flops
from outsize.model.split import Split, split
from outsize.model.walk import Boundaries
from outsize.optim.groups import decay_parameter_names
from outsize.optim.shares import shares
from outsize.optim.spec import StateLayout
from outsize.planner.choice import Choice, Extent, KeptBytes
from outsize.planner.memory import home_bytes
from outsize.planner.microbatches import step_cuts
from outsize.planner.plan import Budgets, Demand, Plan, PlanOptions, plan_step
from outsize.planner.plan_stages import StageOptions, plan_stages
from outsize.planner.sizing import own_elements
from outsize.planner.validate import validate
from outsize.runtime.allocator import HEAP_WORKSPACES, resident_bytes, trim
from outsize.runtime.calibrate import Measured, calibrate
from outsize.runtime.decoding import decoding_bytes
from outsize.storage.pool import DEFAULT_THREADS
from outsize.storage.scratch import DEFAULT_BOUNCE_BYTES
from outsize.train.home_masters import with_masters_of
from outsize.train.machine import Machine, choose_device, choose_dtype, describe_machine, home_file
from outsize.train.residency import settle_home
from outsize.train.state import clip_of, layout_for, may_skip
from outsize.units import format_bytes, format_count

Announce = Callable[[str], None]
# A length at which the operations of units are compared.
SAMPLE_TOKENS = 1024
# What a processor multiplies and adds while it reads a byte and writes one: 10 to 20 on a core with AVX, 250 on an RTX
# 4090. It ranks what is kept of a unit; the exact number only decides between choices that are as good.
FLOPS_PER_BYTE = 20
# Looking at each operation of a unit costs Python tens of microseconds for each. A few cores compute so much in ten
# milliseconds; less is recomputed, or kept whole.
LEAST_SELECTED_FLOPS = 1e9
# What a scratch on disk needs to move tensors that are not aligned: a buffer for each thread of the pool.
BOUNCE_BYTES = DEFAULT_THREADS * DEFAULT_BOUNCE_BYTES
# What kernels on a CPU take inside themselves, as a share of the tensors of a computation: up to a tenth was seen, and
# up to a third where oneDNN multiplies bf16 or fp16.
KERNEL_SHARE, HALF_KERNEL_SHARE = 0.125, 0.375


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is known to fit.

    Attributes:
        config: as the user gave it, with as many microbatches as the plan has.
        machine: device and budgets.
        directory: of the model, local.
        hf_config: the model's own configuration.
        dtype: in which the model computes; adapters are fp32 in any case.
        split: its units; parameters on meta.
        source: where its weights are read from.
        measured: what a microbatch needs on the device.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        plan: memory sizes and the program of a step.
        before_bytes: resident memory of the process, its imports included, before it did anything.
        heap: whether the plan has room for what the C allocator keeps of freed memory.
        adapters: that train beside a frozen model; None where the model itself trains.
        group: the ranks that share the steps; of one, where none do.
    """

    config: Config
    machine: Machine
    directory: Path
    hf_config: Any
    dtype: str
    split: Split
    source: WeightSource
    measured: Measured
    chunk_tokens: int | None
    plan: Plan
    before_bytes: int
    heap: bool
    adapters: Adapters | None = None
    group: Group = field(default_factory=SingleGroup)

    @property
    def own(self) -> tuple[range, ...] | None:
        """The elements of each unit that this rank steps; None for all of a single process."""
        group = self.group
        if group.size == 1:
            return None
        return tuple(ranges[group.rank] for ranges in shares(self.split.spec, group.size))

    @property
    def num_sequences(self) -> int:
        """Sequences of a step that this rank trains, at most."""
        return -(-self.config.sequences_per_step // self.group.size)


def prepare(
    config: Config,
    run_dir: Path,
    announce: Announce,
    source: WeightSource | None = None,
    adapters_from: Path | None = None,
    group: Group | None = None,
) -> Prepared:
    """Read the model's config, split it, measure it, and plan a step.

    Args:
        config: of the run.
        run_dir: its directory; nothing is written.
        announce: called with lines for people.
        source: where weights come from; None for the checkpoint that ``model.path`` names.
        adapters_from: checkpoint that adapters come from; None for fresh ones.
        group: the ranks that share the steps; None for a single process.

    Raises:
        OutsizeError: anything that a run could not be started with; nothing has been written yet.
    """
    group = group or SingleGroup()
    check_shares(config, group.size)
    device = choose_device(config.memory.device)
    dtype = choose_dtype(config.model.dtype, device)
    hf_config = load_hf_config(config.model.path, config.model.trust_remote_code)
    check_length(config, hf_config)
    model = build_skeleton(
        hf_config,
        dtype,
        config.model.attention,
        config.model.trust_remote_code,
        frozen=config.train.method == "lora",
    )
    trim()  # building a model takes its weights for a moment, one after the other
    before_bytes = resident_bytes()  # the model's own module is imported, and nothing else is done
    directory = Path(config.model.path) if source is not None else locate_checkpoint(config.model.path)
    if source is None:
        source = CheckpointReader(directory, model)
        source.load_buffers(model)
    adapters = None
    if config.train.method == "lora":
        adapters = put_in(model, _lora(config, model), config.train.seed)
        source = AdapterSource(source, adapters, adapters_from)
    parts = split_model(model, dtype, config, adapters)
    spec = parts.spec
    if group.size == 1:
        config = with_masters_of(home_file(config.memory, run_dir), config, spec)
    own = own_elements(spec, group.size, group.rank)
    state = layout_for(config, spec, group.size)
    state_bytes = sum(home_bytes(unit, state, own[unit.index]) for unit in spec.units)
    machine = describe_machine(config.memory, state_bytes, home_file(config.memory, run_dir))
    announce(
        f"{type(model).__name__}: {format_count(spec.num_parameters)} parameters in {spec.num_streamed} units, "
        f"{_trained(adapters, spec)}{dtype}, attention {model.config._attn_implementation}"  # type: ignore[union-attr]
    )
    machine, (config, measured, chunk_tokens, (plan, heap)) = settle_home(
        config,
        spec,
        machine,
        state_bytes,
        home_file(config.memory, run_dir),
        lambda config, machine: _measure_and_plan(config, hf_config, parts, machine, announce, group),
    )
    announce(
        f"training state {format_bytes(state_bytes)}{_encoded(plan)} on {machine.home}; device budget "
        f"{format_bytes(machine.device_bytes)} on {machine.device}"
    )
    return Prepared(
        config=config,
        machine=machine,
        directory=directory,
        hf_config=hf_config,
        dtype=dtype,
        split=parts,
        source=source,
        measured=measured,
        chunk_tokens=chunk_tokens,
        plan=plan,
        before_bytes=before_bytes,
        heap=heap,
        adapters=adapters,
        group=group,
    )


def _lora(config: Config, model: nn.Module) -> Any:
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    settings = config.lora.model_dump(exclude={"base_codec", "table_codec"})
    return peft_config(settings, config.model.path, causal)


def _encoded(plan: Plan) -> str:
    codec = plan.transport.weights
    return "" if plan.transport.is_raw("weights") else f", weights that do not train as {codec},"


def _trained(adapters: Adapters | None, spec: ModelSpec) -> str:
    return f"{format_count(spec.num_trainable)} of them trained (LoRA), " if adapters else ""


def check_shares(config: Config, num_ranks: int) -> None:
    """Check that every rank has something to do in every microbatch.

    Raises:
        ConfigError: there are fewer sequences.
    """
    least = num_ranks * config.microbatches
    if num_ranks > 1 and config.sequences_per_step < least:
        raise ConfigError(
            f"train.tokens_per_step: {config.sequences_per_step} sequences per step are fewer than {num_ranks} ranks "
            f"of {config.microbatches} microbatches; raise it to {least * config.data.seq_len}, or lower "
            "train.microbatches"
        )


def check_length(config: Config, hf_config: Any) -> None:
    """Check the length of sequences before the model sees one.

    Raises:
        ConfigError: they are longer than the model takes.
    """
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.data.seq_len > limit:
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is longer than the {limit} positions of the model; lower it"
        )


def split_model(model: nn.Module, dtype: str, config: Config, adapters: Adapters | None = None) -> Split:
    """Split a model with the weight-decay groups and frozen parameters of ``config``.

    With ``adapters`` these train, in fp32, and all else lies apart.

    Raises:
        ModelError: nothing is left to train.
    """
    decaying = decay_parameter_names(model)
    if adapters is not None:
        lora = config.lora
        apart = adapters.apart(model, dtype, lora.base_codec, lora.table_codec)
        return split(model, "fp32", decays=decaying.__contains__, apart=apart)
    parts = split(model, dtype, decays=decaying.__contains__, freeze=config.model.freeze)
    if not parts.spec.num_trainable:
        raise ModelError("model.freeze leaves no parameter to train")
    return parts


def num_targets(batch: Batch, shifted: bool) -> int:
    """Tokens that a model's loss is a mean over; a model that predicts the token in its place shifts nothing."""
    return batch.num_target_tokens if shifted else int((batch.labels != IGNORED).sum())


def model_inputs(batch: Batch) -> Mapping[str, Tensor]:
    """The keyword arguments of a model's forward for ``batch``."""
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels}
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    return inputs


def made_up_inputs(config: Config, hf_config: Any, num_sequences: int, seq_len: int) -> dict[str, Tensor]:
    """A microbatch of random tokens, such as training will see: ids and labels [num_sequences, seq_len], and a mask.

    Something is padded where anything may be: without padding models of transformers make no mask.
    """
    vocabulary = hf_config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_sequences, seq_len), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if not config.data.pack:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, max(seq_len - 1, 1) :] = 0
    return inputs


def choose_plan(
    config: Config, parts: Split, machine: Machine, measured: Measured, group: Group | None = None
) -> tuple[Plan, bool]:
    """Plan a step, and say whether the plan has room for a heap with holes, which saves page faults.

    Room for the heap comes before more slots or larger tiles; where even the smallest plan leaves none, it is given up.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    options = options_of(config, parts, machine, measured, group)
    return plan_with_heap(parts, machine, measured, options, measured.held_bytes)


def options_of(
    config: Config, parts: Split, machine: Machine, measured: Measured, group: Group | None = None
) -> PlanOptions:
    """What ``config`` and the machine decide about the plan; of several ranks in ``group``, each makes its own.

    Raises:
        ConfigError: a codec that does not go with the machine, or several devices of one of several ranks.
    """
    memory, num_ranks = config.memory, 1 if group is None else group.size
    if num_ranks > 1 and machine.num_workers > 1:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, and {num_ranks} ranks share each step; start as many "
            "ranks as there are devices, with one device each"
        )
    clip, state = clip_of(config, parts.spec, num_ranks), layout_for(config, parts.spec, num_ranks)
    return PlanOptions(
        home=machine.home,
        below=machine.below,
        clip=clip == "global",
        unit_clip=clip == "unit",
        may_skip=may_skip(config, parts.spec),
        state=state,
        microbatches=config.microbatches,
        slots=memory.slots,
        prefetch=memory.prefetch,
        tile_elements=_tile_elements(memory.tile_elements, state, machine),
        offload=False if measured.inputs_shared else memory.offload,
        commits=memory.commits == "step",
        transport=transport_of(config, machine),
        activations=memory.activations,
        nodes=num_ranks,
        rank=group.rank if group is not None else None,
        wire=wire_of(config, parts.spec, machine) if num_ranks > 1 else EXACT,
    )


def plan_with_heap(
    parts: Split, machine: Machine, measured: Measured, options: PlanOptions, held_bytes: int
) -> tuple[Plan, bool]:
    """Plan a step as `choose_plan` does.

    Args:
        parts: the model.
        machine: device and budgets.
        measured: what a microbatch needs.
        options: what is decided already.
        held_bytes: what stays on the device for each microbatch from its first unit to its last.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    if machine.device != "cpu":
        return make_plan(parts, machine, measured, options, held_bytes), True
    workspace = max(*measured.forward_bytes, *measured.backward_bytes)
    share = KERNEL_SHARE if parts.spec.dtypes == {"fp32"} else HALF_KERNEL_SHARE
    with contextlib.suppress(InfeasiblePlanError):
        roomy = int(workspace * (share + HEAP_WORKSPACES))
        return make_plan(parts, machine, measured, options, held_bytes, roomy), True
    return make_plan(parts, machine, measured, options, held_bytes, int(workspace * share)), False


def make_plan(
    parts: Split,
    machine: Machine,
    measured: Measured,
    options: PlanOptions,
    held_bytes: int,
    unseen_bytes: int = 0,
) -> Plan:
    """Plan a step within the machine's budgets, less ``unseen_bytes`` of the device's; see `plan_with_heap`.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    demand = Demand(
        boundary_bytes=measured.boundary_bytes,
        forward_workspace_bytes=by_kind(parts, measured.forward_bytes),
        backward_workspace_bytes=by_kind(parts, measured.backward_bytes),
        saved_bytes=measured.saved_bytes,
        recompute_s=_recompute_times(parts, measured, measured.num_sequences, measured.seq_len),
        **({} if options.cut else selections(measured)),
        shared_bytes=held_bytes * options.microbatches,
        fixed_bytes=unseen_bytes + fixed_bytes(parts.model, machine, options) + decoding_bytes(parts.spec),
    )
    _check_choice(options.activations, demand)
    budgets = Budgets(device=machine.device_bytes, host=machine.host_bytes, disk=machine.disk_bytes)
    if machine.num_workers > 1:
        plan = plan_stages(parts.spec, demand, budgets, options, stage_options(parts, machine, measured))
    else:
        plan = plan_step(parts.spec, demand, budgets, options)
    for program in plan.programs:
        validate(program, plan.layout)
    return plan


def _check_choice(activations: str, demand: Demand) -> None:
    """Check that there is something that a user's choice could keep.

    Raises:
        ConfigError: there is not.
    """
    extent = None if activations == "auto" else Choice(activations).extent
    if extent is not None and not any(demand.kept_bytes.get(extent, ())):
        advice = "set model.attention=sdpa" if extent is Extent.ATTENTION else "set it to auto"
        raise ConfigError(
            f"memory.activations={activations}: no unit of this model has {extent} in an operation of its own; {advice}"
        )


def wire_of(config: Config, spec: ModelSpec, machine: Machine) -> Wire:
    """Return the codecs between ranks.

    Raises:
        ConfigError: changes of weights are asked for where there are none to be had.
    """
    wire = Wire(gradients=config.parallel.gradients, weights=config.parallel.weights)
    if wire.weights == "delta" and (spec.dtype == "fp32" or machine.home == "disk"):
        raise ConfigError(
            "parallel.weights: delta is of 16-bit weights in host memory, and here "
            + ("weights are fp32" if spec.dtype == "fp32" else "the home is on disk")
            + "; leave it raw"
        )
    return wire


def _tile_elements(wanted: int | None, state: StateLayout, machine: Machine) -> int | None:
    """Return the elements of a tile, where the user gave them.

    Raises:
        ConfigError: a tile would be no whole sectors in every plane.
    """
    if wanted is not None and machine.home == "disk" and wanted % state.quantum:
        raise ConfigError(
            f"memory.tile_elements: {wanted} is not a multiple of {state.quantum}, which tiles of this optimizer state "
            f"are; try {-(-wanted // state.quantum) * state.quantum}"
        )
    return wanted


def transport_of(config: Config, machine: Machine) -> Transport:
    """Return the codecs on the link; ``auto`` is raw until `outsize.train.codec_choice` has chosen.

    Raises:
        ConfigError: there is no such link on this machine, or the codec does not run there.
    """
    named = config.transport.model_dump()
    transport = Transport(**named | ({"weights": RAW.name} if named["weights"] == "auto" else {}))
    check_transport(transport, machine)
    return transport


def check_transport(transport: Transport, machine: Machine) -> None:
    """Check that the codecs run where ``machine`` wants them.

    Raises:
        ConfigError: there is no such link on this machine, or the codec does not run there.
    """
    if transport == Transport():
        return
    if machine.device == "cpu":
        raise ConfigError("transport: a cpu computes where the host memory is, over no link; leave it raw")
    if machine.home == "disk" and not transport.is_raw("weights"):
        raise ConfigError(
            "transport.weights: encodings of weights are kept in host memory, and the home is on disk; leave it raw, "
            "or set memory.home=host"
        )
    if machine.device.startswith("cuda"):
        for crossing in ("activations", "gradients"):
            if transport.spec(crossing).lossless and not transport.is_raw(crossing):
                raise ConfigError(
                    f"transport.{crossing}: {getattr(transport, crossing)} is encoded on a CPU only; use int8 or raw"
                )


def stage_options(parts: Split, machine: Machine, measured: Measured) -> StageOptions:
    """What is to be known of a model that several workers train.

    Raises:
        ConfigError: its units share activations, which one worker can do only.
    """
    if measured.inputs_shared:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, but units of {type(parts.model).__name__} receive "
            "activations that other units receive too; use one device"
        )
    return StageOptions(
        num_workers=machine.num_workers, forward_s=_forward_times(parts), rest_users=measured.rest_users
    )


def _forward_times(parts: Split, rows: int = 1, length: int = SAMPLE_TOKENS) -> tuple[float, ...]:
    """How long the forwards of units take beside each other: by their operations, or by their parameters."""
    count = parts.spec.num_streamed
    with contextlib.suppress(ModelError, AttributeError):
        flops = forward_flops(read_shape(parts.model.config.to_dict()), rows, length)  # type: ignore[union-attr,operator]
        if len(flops) == count:
            return flops
    table = max((tensor.numel for unit in parts.spec.units for tensor in unit.all_tensors), default=1)
    numel = [
        0 if unit.kind == "embedding" else sum(tensor.numel for tensor in unit.all_tensors)
        for unit in parts.spec.units[:count]
    ]
    tokens = 2.0 * rows * length
    return tuple(tokens * (size or (table if unit + 1 == count else 1)) for unit, size in enumerate(numel))


def kept_bytes(measured: Measured) -> KeptBytes:
    """What forwards keep, by its extent."""
    found = selections(measured).get("selected_bytes", {})
    return {Extent.WHOLE: measured.saved_bytes, **found}


def selections(measured: Measured) -> dict[str, Any]:
    """What may be kept of forwards, as `Demand` wants it; what it spares is counted in FLOPs.

    Where products are kept, what lies between them is made again, each byte of it at the cost of `FLOPS_PER_BYTE`.
    """
    if not measured.products:
        return {}
    between = [
        FLOPS_PER_BYTE * max(0, whole - products.num_bytes)
        for whole, products in zip(measured.saved_bytes, measured.products, strict=True)
    ]
    spared = [max(0.0, y.flops - rest) for y, rest in zip(measured.products, between, strict=True)]
    return {
        "selected_bytes": {
            Extent.ATTENTION: tuple(y.num_bytes for y in measured.attention),
            Extent.PRODUCTS: tuple(y.num_bytes for y in measured.products),
        },
        "selected_s": {
            Extent.ATTENTION: tuple(float(y.flops) for y in measured.attention),
            Extent.PRODUCTS: tuple(spared),
        },
        "least_selected_s": LEAST_SELECTED_FLOPS,
        "num_saved": measured.num_saved,
    }


def _recompute_times(
    parts: Split, measured: Measured, rows: int = 1, length: int = SAMPLE_TOKENS
) -> tuple[float, ...]:
    """The same of recomputes, of which some end early."""
    times = _forward_times(parts, rows, length)
    with contextlib.suppress(ModelError, AttributeError):
        flops = recompute_flops(read_shape(parts.model.config.to_dict()), rows, length)  # type: ignore[union-attr,operator]
        if len(flops) == len(times):
            return tuple(flops[u] if u in measured.needed else s for u, s in enumerate(times))
    return times


def recompute_shares(parts: Split, measured: Measured) -> tuple[float, ...]:
    """Return how much of each streamed unit's forward its recompute takes, 0 to 1."""
    pairs = zip(_recompute_times(parts, measured), _forward_times(parts), strict=True)
    return tuple(recompute / forward if forward else 1.0 for recompute, forward in pairs)


def fixed_bytes(model: nn.Module, machine: Machine, options: PlanOptions) -> int:
    """What lies on the device throughout and is neither weights nor activations."""
    scratches = 1 + (options.activations != "auto" and Choice(options.activations).leaves)
    fixed = scratches * BOUNCE_BYTES if machine.below == "disk" else 0
    if machine.device.startswith("cuda"):
        fixed += CUBLAS_BYTES + sum(buffer.nbytes for buffer in model.buffers())
    return fixed


def by_kind(parts: Split, num_bytes: tuple[int, ...]) -> dict[str, int]:
    """The most of any unit of each kind."""
    most: dict[str, int] = {}
    for unit, size in zip(parts.spec.units, num_bytes, strict=False):
        most[unit.kind] = max(most.get(unit.kind, 0), size)
    return most


def _measure_and_plan(
    config: Config, hf_config: Any, parts: Split, machine: Machine, announce: Announce, group: Group
) -> tuple[Config, Measured, int | None, tuple[Plan, bool]]:
    """Measure and plan with the microbatches that ``config`` names, or else with the first that fit.

    Raises:
        InfeasiblePlanError: none fit; of the plan that is short by the least.
    """
    named = config.train.microbatches
    sequences = -(-config.sequences_per_step // group.size)
    counts = step_cuts(sequences, config.data.seq_len, machine.num_workers)
    failures: list[InfeasiblePlanError] = []
    for count in counts if named is None else (named,):
        chosen = config.in_microbatches(count)
        with Boundaries(parts.modules) as boundaries:
            measured, chunk_tokens = _measure(chosen, hf_config, parts, boundaries, announce, group.size)
        trim()
        try:
            planned = choose_plan(chosen, parts, machine, measured, group)
        except InfeasiblePlanError as error:
            failures.append(error)
            if "device" in error.short_by:
                continue  # smaller ones may fit
            break
        if named is None and count > 1:
            announce(f"steps of {sequences} sequences are cut into {count} microbatches")
        return chosen, measured, chunk_tokens, planned
    raise min(failures, key=lambda error: sum(error.short_by.values()))


def _measure(
    config: Config,
    hf_config: Any,
    parts: Split,
    boundaries: Boundaries,
    announce: Announce,
    num_ranks: int,
) -> tuple[Measured, int | None]:
    share = -(-config.sequences_per_step // num_ranks)
    sequences = -(-share // config.microbatches)

    wanted = None if config.train.loss == "model" else config.train.head_chunk_tokens
    measured = calibrate(
        parts,
        boundaries.forwards,
        partial(made_up_inputs, config, hf_config),
        num_sequences=sequences,
        seq_len=config.data.seq_len,
        chunk_tokens=wanted,
    )
    if wanted is not None and not measured.plain_head:
        if config.train.loss == "chunked":
            raise ModelError(
                "train.loss=chunked needs a model whose loss is the shifted cross-entropy of its head's output; this "
                "one does something else after the head, so use train.loss=model"
            )
        announce(
            "loss: the model's own, with all logits of a microbatch, since more than cross-entropy follows its head"
        )
        wanted = None
    return measured, wanted
