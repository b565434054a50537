"""Everything that must be known before the first step: the model's units, their sizes, the plan that fits them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from outsize.accelerators import Devices
from outsize.checkpoint.files.checkpoint_files import has_tokenizer, locate_checkpoint
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader, WeightSource
from outsize.compat.transformers_private import attention_of
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError, InfeasiblePlanError, ModelError
from outsize.group.group import Group, SingleGroup
from outsize.model.adapters import Adapters, AdapterSource, peft_config, put_in
from outsize.model.build import build_skeleton, load_hf_config
from outsize.model.compiled import as_they_are, compile_blocks, take_kernels
from outsize.model.products import error_of, take_products
from outsize.model.sizes.config_sizes import num_positions
from outsize.model.sizes.model_spec import ModelSpec
from outsize.model.split import Split, split
from outsize.model.stored_adapters import read_weights
from outsize.model.tiled_mlp import take_in_parts
from outsize.model.walk import Boundaries
from outsize.optim.learning_rates import RateGroup, decay_parameter_names, with_rates
from outsize.optim.shares import shares
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.passes.slots import validate
from outsize.planner.predict.decision_search import decide
from outsize.planner.search.sizing import own_elements
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.allocator import resident_bytes
from outsize.runtime.device.heap import trim
from outsize.runtime.trial.border_trial import check_borders
from outsize.runtime.trial.calibrate import calibrate
from outsize.runtime.trial.compile_units import compile_units
from outsize.runtime.trial.measured import Measured
from outsize.session.job.job_options import named_transport
from outsize.session.job.machine import (
    RunMachine,
    check_directory,
    check_transport,
    describe_machine,
    determinism_said,
    home_file,
)
from outsize.session.job.model_inputs import check_loss, made_up_inputs, take_loss
from outsize.session.job.optimizer_layout import layout_for, with_masters_of
from outsize.session.job.planning import DemandTrial, Tried, question_of, why_whole
from outsize.streamed.spec import RunSpec, dtype_chosen
from outsize.units import format_bytes, format_count

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
        tried: what microbatches need, of any number of them.
        run_dir: directory of the run, or of this rank in it.
        adapters: that train beside a frozen model; None where the model itself trains.
        group: the ranks that share the steps; of one, where none do.
        template: the chat template that it trains with; None for the tokenizer's.
    """

    config: Config
    machine: RunMachine
    directory: Path
    hf_config: Any
    dtype: str
    split: Split
    source: WeightSource
    measured: Measured
    chunk_tokens: int | None
    plan: Plan
    before_bytes: int
    tried: Tried
    run_dir: Path
    adapters: Adapters | None = None
    group: Group = field(default_factory=SingleGroup)
    template: str | None = None

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

    @property
    def num_sequences(self) -> int:
        """Sequences of a step that this rank trains, at most."""
        return -(-self.config.sequences_per_step // self.group.size)


def prepare(
    run: RunSpec,
    announce: Announce,
    source: WeightSource | None = None,
    adapters_from: Path | None = None,
    *,
    replica: bool = False,
) -> Job:
    """Read the model's config, split it, measure it, and plan a step.

    Args:
        run: what it is; nothing is written.
        announce: called with lines for people.
        source: where weights come from; None for the checkpoint that ``model.path`` names.
        adapters_from: directory that adapters come from, a checkpoint's, say; None for fresh ones.
        replica: whether it trains as a plain replica, see `question_of`.

    Raises:
        OutsizeError: anything that a run could not be started with; nothing has been written yet.
    """
    config, group, num_workers = run.config, run.group, len(run.devices.each)
    _check_asked(config, group.size)
    _say_of_devices(run, announce)
    hf_config = load_hf_config(run.model_path, config.model.trust_remote_code)
    check_length(config, hf_config)
    model = _skeleton(run, hf_config, announce)
    before_bytes = resident_bytes()  # the model's own module is imported, and nothing else is done
    directory, source, adapters = _sourced(run, model, source, adapters_from)
    parts = split_model(model, run.dtype, config, adapters)
    _change_blocks(parts, config, run.devices, source, announce)
    spec, home = parts.spec, home_file(config.memory, run.run_dir)
    if group.size == 1:
        config = with_masters_of(home, config, spec, num_workers)
    state_bytes = _state_bytes(config, spec, group, num_workers)
    machine = describe_machine(run.memory, run.devices, state_bytes, home)
    announce(_described(model, spec, adapters, run.dtype))
    tried = _tried(config, hf_config, parts, announce, group.size)
    plan = _planned(config, parts, machine, tried, group, replica=replica)
    _check_packing(config, hf_config, parts)
    for line in _told(config, plan, machine, state_bytes, group.size):
        announce(line)
    measured, chunk_tokens = tried(plan.layout.num_microbatches)
    prepared = Job(
        config=config,
        machine=machine,
        directory=directory,
        hf_config=hf_config,
        dtype=run.dtype,
        split=parts,
        source=source,
        measured=measured,
        chunk_tokens=chunk_tokens,
        plan=plan,
        before_bytes=before_bytes,
        tried=tried,
        run_dir=run.run_dir,
        adapters=adapters,
        group=group,
    )
    return planned_so(prepared, plan)


def _planned(
    config: Config, parts: Split, machine: RunMachine, tried: Tried, group: Group, *, replica: bool = False
) -> Plan:
    """Ask for the plan of a run.

    Raises:
        InfeasiblePlanError: none fits; says why steps were not cut, where they cannot be.
    """
    question = question_of(config, parts, machine, tried, group, replica=replica)
    try:
        return decide(question).plan
    except InfeasiblePlanError as error:
        is_open = config.train.microbatches is None and config.sequences_per_step > 1 and not replica
        reason = why_whole(parts, tried(1).measured) if is_open else ""
        if not reason:
            raise
        raise InfeasiblePlanError(
            f"{error.message}; steps are not cut into microbatches: {reason}", error.short_by
        ) from None


def _check_packing(config: Config, hf_config: Any, parts: Split) -> None:
    """Check that documents are kept apart where they share sequences.

    Raises:
        ModelError: the model cannot be shown to do that.
    """
    if config.data.pack == "documents":
        # Compiled backwards run once, and what a block sees is its code's choice.
        with as_they_are(parts.model), Boundaries(parts.modules) as boundaries:
            check_borders(parts, boundaries.forwards, hf_config.get_text_config().vocab_size)
        trim()


def planned_so(prepared: Job, plan: Plan) -> Job:
    """Return the run with ``plan``: its microbatches, its home, and what the microbatches need.

    Raises:
        ConfigError: codecs that the user has named do not go with the home.
    """
    config, machine = prepared.config.in_microbatches(plan.layout.num_microbatches), prepared.machine
    check_transport(named_transport(config), machine.devices, plan.home)
    for program in plan.programs:
        validate(program, plan.layout)
    if plan.home == "disk":
        check_directory(home_file(config.memory, prepared.run_dir))
    measured, chunk_tokens = prepared.tried(config.microbatches)
    chosen = replace(
        prepared,
        config=config,
        machine=replace(machine, home=plan.home, below=plan.below),
        measured=measured,
        chunk_tokens=chunk_tokens,
        plan=plan,
    )
    if config.model.compile != "blocks":
        return chosen
    least, rest = divmod(chosen.num_sequences, config.microbatches)
    for rows in range(max(least, 1), least + (2 if rest else 1)):
        inputs = made_up_inputs(config, chosen.hf_config, rows, config.data.seq_len)
        compile_units(chosen.split, inputs, machine.devices.torch_device)
    trim()  # what is left of it was there before the run, as imports were
    return replace(chosen, before_bytes=max(chosen.before_bytes, resident_bytes()))


def compiled_so(prepared: Job, announce: Announce) -> Job:
    """Return the run with its blocks compiled, which they are from now on; measured and planned anew as it is cut.

    Raises:
        ConfigError: settings that do not go with compiled blocks.
        InfeasiblePlanError: compiled blocks do not fit.
    """
    config, parts, group = prepared.config.compiling("blocks"), prepared.split, prepared.group
    compile_blocks(parts, announce)
    tried = _tried(config, prepared.hf_config, parts, lambda _: None, group.size)
    plan = _planned(config, parts, prepared.machine, tried, group)
    return planned_so(replace(prepared, config=config, tried=tried), plan)


def _say_of_devices(run: RunSpec, announce: Announce) -> None:
    said = (
        dtype_chosen(run.config.model.dtype, run.dtype, run.devices),
        determinism_said(run.config.train.deterministic, run.devices),
    )
    for line in filter(None, said):
        announce(line)


def _skeleton(run: RunSpec, hf_config: Any, announce: Announce) -> nn.Module:
    config, model, frozen = run.config, run.config.model, run.config.train.method == "lora"
    built = build_skeleton(hf_config, run.dtype, model.attention, model.trust_remote_code, frozen=frozen)
    trim()  # building a model takes its weights for a moment, one after the other
    _add_noise(built, config.train.neftune_noise_alpha)
    take_loss(built, config.train.loss_function)
    take_kernels(built, model.kernels, run.devices, announce)
    return built


def _add_noise(model: nn.Module, alpha: float | None) -> None:
    """Have the embedding of ``model`` add NEFTune's noise while it trains (arXiv 2310.05914).

    Noise is drawn within the embedding's own forward, where streamed and resident runs seed alike, not by a hook.

    Raises:
        ModelError: transformers does not tell which of its modules embeds tokens.
    """
    if alpha is not None:
        try:
            table = cast(Any, model).get_input_embeddings()
        except NotImplementedError:
            raise ModelError(
                f"train.neftune_noise_alpha: {type(model).__name__} names no embedding to add noise to; leave it out"
            ) from None
        table.neftune_noise_alpha = alpha
        table.forward = MethodType(_noisy, table)  # a method, so that a copy of the embedding has its own


def _noisy(table: nn.Module, ids: Tensor) -> Tensor:
    from transformers.integrations.neftune import neftune_post_forward_hook

    return cast(Tensor, neftune_post_forward_hook(table, ids, type(table).forward(table, ids)))


def _change_blocks(
    parts: Split, config: Config, devices: Devices, source: WeightSource, announce: Announce
) -> None:
    """Have blocks compute as the run asks."""
    take_in_parts(parts, config.train.mlp_parts)
    products = config.model.products
    if products != "native":
        told = take_products(parts, products, devices)
        error = error_of(parts, lambda name, into: source.read(name, 0, into.numel(), into))
        announce(f"products: {told}; {error}")
    if config.model.compile == "blocks":
        compile_blocks(parts, announce)


def _state_bytes(config: Config, spec: ModelSpec, group: Group, num_workers: int) -> int:
    """Return what the training state of this rank takes at home."""
    own = own_elements(spec, group.size, group.rank)
    state = layout_for(config, spec, group.size, num_workers=num_workers)
    return sum(home_bytes(unit, state, own[unit.index]) for unit in spec.units)


def _told(config: Config, plan: Plan, machine: RunMachine, state_bytes: int, num_ranks: int) -> Iterator[str]:
    """Say what a plan makes of a run."""
    count = plan.layout.num_microbatches
    if config.train.microbatches is None and count > 1:
        sequences = -(-config.sequences_per_step // num_ranks)
        yield f"steps of {sequences} sequences are cut into {count} microbatches"
    if plan.layout.stages is None and plan.layout.num_rounds > 1:
        yield f"steps go in {plan.layout.num_rounds} rounds of up to {plan.layout.round_size} microbatches"
    yield (
        f"training state {format_bytes(state_bytes)}{_encoded(plan)} on {plan.home}; device budget "
        f"{format_bytes(machine.device_bytes)} on {machine.devices}"
        + (", part of the RAM that it shares with the host" if machine.is_shared else "")
    )


def _sourced(
    run: RunSpec, model: nn.Module, source: WeightSource | None, adapters_from: Path | None
) -> tuple[Path, WeightSource, Adapters | None]:
    """Return the model's directory, where its weights come from, and the adapters that were put in."""
    config, path = run.config, run.model_path
    directory = Path(path) if source is not None else locate_checkpoint(path)
    if source is None:
        source = CheckpointReader(directory, model)
        source.load_buffers(model)
    if config.train.method != "lora":
        return directory, source, None
    lora = lora_of(config, model)
    if adapters_from is None:
        adapters = put_in(model, lora, config.train.seed)
    else:
        adapters = _stored(model, lora, adapters_from)
        if has_tokenizer(adapters_from):
            directory = adapters_from
    return directory, AdapterSource(source, adapters), adapters


def _stored(model: nn.Module, lora: Any, directory: Path) -> Adapters:
    """Put adapters that begin with those in ``directory`` into a skeleton."""
    weights = read_weights(directory)
    try:
        adapters = put_in(model, lora, 0, weights=weights)
    except CheckpointError as error:
        raise CheckpointError(
            f"{directory}: {error}; go on with the section lora that they were made with, and with their model"
        ) from error
    more = sorted(weights.keys() - set(adapters.names.values()))
    if more:
        raise CheckpointError(
            f"{directory} holds more than adapters that train ({more[0]}), which train.method=lora would not save "
            "again; train them on with outsize.wrap around PEFT's model"
        )
    return adapters


def lora_of(config: Config, model: nn.Module) -> Any:
    """Return PEFT's configuration of the adapters that ``config`` names."""
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    settings = config.lora.for_peft()
    return peft_config(settings, config.model.path, causal)


def _encoded(plan: Plan) -> str:
    codec = plan.transport.weights
    return "" if plan.transport.is_raw("weights") else f", weights that do not train as {codec},"


def _described(model: nn.Module, spec: ModelSpec, adapters: Adapters | None, dtype: str) -> str:
    trained = f"{format_count(spec.num_trainable)} of them trained (LoRA), " if adapters else ""
    return (
        f"{type(model).__name__}: {format_count(spec.num_parameters)} parameters in {spec.num_streamed} units, "
        f"{trained}{dtype}, attention {attention_of(model)}"
    )


def _check_asked(config: Config, num_ranks: int) -> None:
    check_shares(config, num_ranks)
    if config.train.objective != "sft":
        raise ConfigError(
            f"train.objective: {config.train.objective} is for outsize train (and its --dry-run) alone, which has a "
            "trainer of another library do it"
        )


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
    limit = num_positions(hf_config.get_text_config().to_dict())
    if limit is not None and config.data.seq_len > limit:
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is longer than the {limit} positions of the model; lower it"
        )


def split_model(model: nn.Module, dtype: str, config: Config, adapters: Adapters | None = None) -> Split:
    """Split a model with the rates, weight-decay groups and frozen parameters of ``config``.

    With ``adapters`` these train, in fp32, and all else lies apart.

    Raises:
        ModelError: nothing is left to train.
    """
    decaying = decay_parameter_names(model)
    if adapters is not None:
        lora = config.lora
        apart = adapters.apart(model, dtype, lora.base_codec, lora.table_codec)
        parts = split(model, "fp32", decays=decaying.__contains__, apart=apart)
    else:
        parts = split(model, dtype, decays=decaying.__contains__, freeze=config.model.freeze)
    if not parts.spec.num_trainable:
        raise ModelError("model.freeze leaves no parameter to train")
    optimizer = config.optimizer
    groups = [RateGroup(**group.model_dump()) for group in optimizer.groups]
    return replace(parts, spec=with_rates(parts.spec, optimizer.layer_decay, groups))


def _tried(config: Config, hf_config: Any, parts: Split, announce: Announce, num_ranks: int) -> Tried:
    """Return what tries microbatches on the model, each number of them once."""

    @cache
    def tried(microbatches: int) -> DemandTrial:
        chosen = config.in_microbatches(microbatches)
        with Boundaries(parts.modules) as boundaries:
            found = _measure(chosen, hf_config, parts, boundaries, announce, num_ranks)
        trim()
        return found

    return tried


def _measure(
    config: Config,
    hf_config: Any,
    parts: Split,
    boundaries: Boundaries,
    announce: Announce,
    num_ranks: int,
) -> DemandTrial:
    share = -(-config.sequences_per_step // num_ranks)
    sequences = -(-share // config.microbatches)

    own = config.train.loss == "model" or config.train.loss_function is not None
    wanted = None if own else config.train.head_chunk_tokens
    measured = calibrate(
        parts,
        boundaries.forwards,
        partial(made_up_inputs, config, hf_config),
        num_sequences=sequences,
        seq_len=config.data.seq_len,
        chunk_tokens=wanted,
    )
    check_loss(parts.model)
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
    return DemandTrial(measured, wanted)
