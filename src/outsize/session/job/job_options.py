"""From what a user says to what the planner is asked: the layout of a trained unit at home, options, the question.

`outsize plan` and a run use the same functions; nothing here needs torch.
"""

from typing import TYPE_CHECKING, Any

from outsize.choices import Clip, Masters
from outsize.codecs.codec_spec import RAW
from outsize.codecs.transport import EXACT, Transport, Wire
from outsize.config import Config
from outsize.config.memory_section import TransportConfig
from outsize.config.model_section import OptimizerConfig
from outsize.config.train_section import TrainConfig
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Machine
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_names import muon_matrices, named
from outsize.optim.optimizer_spec import StateLayout, masters_for
from outsize.planner.predict.question import Question
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.step_plan import Budgets

AUTO = "auto"
# The one that moves most first.
CROSSINGS = ("weights", "gradients", "activations")

if TYPE_CHECKING:
    from outsize.optim.torch_class import TorchClass


def options_for(
    config: Config,
    spec: ModelSpec,
    *,
    num_workers: int,
    num_ranks: int = 1,
    rank: int | None = None,
    kernels: bool = True,
    inputs_shared: bool = False,
    can_part: bool = False,
    wire: Wire = EXACT,
) -> PlanOptions:
    """Return what is decided about a plan before anything is searched.

    Args:
        config: of the run.
        spec: its model.
        num_workers: devices that share the step.
        num_ranks: processes that do.
        rank: of this one; None for the one that steps most.
        kernels: whether a kernel steps exact state, see `masters_for`.
        inputs_shared: whether units receive what other units receive too.
        can_part: whether MLPs could take their tokens in parts, and do not yet.
        wire: codecs between ranks.

    Raises:
        ConfigError: settings that do not go together.
    """
    memory, optimizer, skips = config.memory, config.optimizer, may_skip(config.train, spec)
    clip = clip_of(optimizer, num_ranks, may_skip=skips)
    return PlanOptions(
        home="host",
        below="host",
        clip=clip == "global",
        unit_clip=clip == "unit",
        may_skip=skips,
        state=state_layout(
            optimizer,
            spec,
            memory.tile_elements,
            num_workers=num_workers,
            num_ranks=num_ranks,
            kernels=kernels,
        ),
        can_part=can_part,
        round_microbatches=_round_of(config.train, optimizer),
        slots=memory.slots,
        prefetch=memory.prefetch,
        tile_elements=memory.tile_elements,
        offload=False if inputs_shared else memory.offload,
        commits=memory.commits == "step",
        transport=named_transport(config.transport),
        activations=memory.activations,
        nodes=num_ranks,
        rank=rank,
        wire=wire,
        handover=config.parallel.handover,
        resident=0 if memory.resident == "none" else memory.resident,
    )


def question_for(
    config: Config,
    spec: ModelSpec,
    figures: Machine,
    budgets: Budgets,
    options: PlanOptions,
    *,
    own_processor: bool = False,
    **facts: Any,
) -> Question:
    """Build the planner's question from ``config``, for runs and for plans alike.

    Args:
        config: of the run.
        spec: its model.
        figures: of the machine.
        budgets: most bytes in each tier.
        options: what is decided already, see `options_for`.
        own_processor: whether devices compute on another one than the host, where Muon may multiply if nobody says.
        facts: what else is known of model and machine, attributes of `Question`.
    """
    in_place = facts.get("shares_memory", False)  # where nothing goes over a link that could be encoded
    return Question(
        model=spec,
        machine=figures,
        budgets=budgets,
        options=options,
        home=config.memory.home,
        auto=() if in_place else open_crossings(config.transport),
        products_open=own_processor and products_open(config.optimizer),
        masters_open=config.optimizer.masters == AUTO,
        sequences=-(-config.sequences_per_step // options.nodes),
        seq_len=config.data.seq_len,
        microbatches=config.train.microbatches,
        **facts,
    )


def named_transport(transport: TransportConfig) -> Transport:
    """Return the codecs on the link that a configuration names; raw where it leaves the choice open."""
    named = transport.model_dump()
    return Transport(**{crossing: RAW.name if name == AUTO else name for crossing, name in named.items()})


def open_crossings(transport: TransportConfig) -> tuple[str, ...]:
    """Return the crossings whose codec a configuration leaves open."""
    return tuple(name for name in CROSSINGS if getattr(transport, name) == AUTO)


def products_open(optimizer: OptimizerConfig) -> bool:
    """Return whether a configuration leaves open where products of Muon run."""
    optimizer_named = named(optimizer.name)
    return optimizer_named is not None and optimizer_named.products and optimizer.ns_on == AUTO


def clip_of(optimizer: OptimizerConfig, num_ranks: int = 1, *, may_skip: bool) -> Clip:
    """Return by which norm the gradients of a run are clipped.

    To skip a step is to know all its gradients before the first unit steps: the global norm is taken, if need be to
    clip to no limit. So it is where several ranks share a step: they have to agree on what is skipped.

    Raises:
        ConfigError: units are to be clipped by their own norm, and the run may have to skip a step, or has ranks.
    """
    clip = optimizer.clip if optimizer.max_grad_norm else "none"
    if clip == "unit" and num_ranks > 1:
        raise ConfigError(
            "optimizer.clip: several ranks clip by the norm of all gradients; use global, or none"
        )
    if not may_skip and num_ranks == 1:
        return clip
    if clip == "unit":
        raise ConfigError(
            "optimizer.clip: unit steps a unit before the gradients of all are known, so fp16 cannot skip a step that "
            "overflows; use bf16, or optimizer.clip=global"
        )
    return "global"


def may_skip(train: TrainConfig, spec: ModelSpec) -> bool:
    """Return whether a run may have to skip a step: where it is told to, or where fp16 overflows."""
    return "fp16" in spec.dtypes or train.on_nonfinite == "skip"


def state_layout(
    optimizer: OptimizerConfig,
    spec: ModelSpec,
    tile_elements: int | None,
    *,
    num_workers: int,
    num_ranks: int,
    kernels: bool,
) -> StateLayout:
    """Return how a trained unit lies at home, with its gradient, see `options_for`.

    Raises:
        ConfigError: the masters cannot be split, or gradients not be rounded.
    """
    if optimizer.masters.startswith("split") and spec.dtype != "bf16":
        raise ConfigError(
            f"optimizer.masters: only those of bf16 weights can be split, and weights that train are {spec.dtype} "
            "here; leave it auto, or set model.dtype=bf16"
        )
    row = named(optimizer.name)
    about = None if row else _class_of(optimizer)
    num_moments = row.num_moments if row else 0
    moments = optimizer.state if num_moments else "fp32"
    kernels = kernels and num_ranks == 1 and row is not None and row.kernel
    masters = masters_for(optimizer.masters, spec.dtype, moments, kernels=kernels)

    def layout(masters: Masters) -> StateLayout:
        return StateLayout(
            dtype=spec.dtype,
            masters=masters,
            moments=moments,
            gradients=optimizer.gradients,
            num_moments=num_moments,
            state_of=about.state_of if about else (),
            temporaries=0 if about is None or about.by_element else about.temporaries,
            newton_schulz=optimizer.ns_steps if row and row.products else 0,
            products_on_device=optimizer.ns_on == "device",
        )

    state = layout(masters)
    if state.whole:
        _check_whole(optimizer.name, spec, tile_elements, num_ranks)
    if optimizer.masters == "auto" and state.exact and (tile_elements or 0) % state.quantum:
        state = layout("separate")  # whose tiles may be smaller
    if num_ranks > 1 and state.gradients != "fp32":
        raise ConfigError("optimizer.gradients: ranks sum gradients at home, in fp32; leave it fp32")
    if num_workers > 1 and state.gradients != "fp32":
        raise ConfigError(
            "optimizer.gradients: several workers sum gradients at home, in fp32; leave it fp32"
        )
    return state


def _class_of(optimizer: OptimizerConfig) -> "TorchClass":
    """Return what is known of the class that steps; to look at it loads torch."""
    from outsize.optim.torch_trial import torch_class

    return torch_class(optimizer.name, optimizer.args).with_decay(optimizer.weight_decay)


def _round_of(train: TrainConfig, optimizer: OptimizerConfig) -> int | None:
    """Return the microbatches of a round that the user asks for; None where that is the planner's to say."""
    size = train.round_microbatches
    if size is not None and optimizer.gradients != "fp32" and size < (train.microbatches or 1):
        raise ConfigError(
            "train.round_microbatches: rounds sum gradients at home, in fp32; leave it out, or optimizer.gradients fp32"
        )
    return size


def _check_whole(name: str, spec: ModelSpec, tile: int | None, num_ranks: int) -> None:
    """Check that nothing cuts units into parts, where the optimizer steps whole parameters, and that Muon has some."""
    row = named(name)
    if row and row.products and not any(True for unit in spec.units for _ in muon_matrices(unit)):
        raise ConfigError(
            f"optimizer.name: {name} steps matrices of blocks, and none of those trains here; use adamw"
        )
    if num_ranks > 1:
        raise ConfigError(
            f"optimizer.name: {name} steps whole parameters, and ranks share each by its elements; use a single "
            "process, or adamw with optimizer.state=int8"
        )
    largest = max((unit.numel for unit in spec.units if unit.trainable), default=0)
    if tile is not None and tile < largest:
        raise ConfigError(
            f"memory.tile_elements: {name} steps whole parameters, and the largest unit has {largest} elements, "
            f"more than {tile}; leave it out"
        )
