"""How much of each thing a plan sets aside, and in which order more is better.

A plan is chosen by a handful of numbers, the `Knobs`. The least ones make the plan that needs the least
memory; `UPGRADES` lists what memory to spare is spent on, the most useful first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, takewhile

from outsize.choices import Activations, Handover, Resident
from outsize.codecs.transport import EXACT, Transport, Wire
from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.shares import own_elements
from outsize.planner.memory.memory_table import Tier
from outsize.planner.memory.step_bytes import encoded_bytes, load_bytes
from outsize.planner.program.stages import Kept, Stages
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.forward_plan import frozen_units, resident_order, spread, why_not_resident
from outsize.planner.search.offload_balance import UnitRates
from outsize.units import align_up

# 65,536 elements are 256 KiB in fp32: below that a disk request costs more than its bytes.
LEAST_TILE_ELEMENTS = 65_536
# 16,384 elements are 64 KiB: a gradient that is stepped where it arrives waits for no disk.
LEAST_RING_ELEMENTS = 16_384
# 1M elements are 4 MiB per plane: above that more bytes per request gain nothing.
MOST_TILE_ELEMENTS = 1_048_576
# A model of more tiles gets larger ones where there is memory: programs of millions of ops take minutes to plan.
MOST_TILES = 4096
# One tile is read, one stepped, one written.
NUM_TILE_BUFFERS = 3
# Units whose gradients a ring takes at most: one that steps, and one that has just arrived.
RING_UNITS = 2
# One unit on its way up and one gradient on its way down; with four, disk and link work on different ones.
LEAST_HOST_BUFFERS = 2
MOST_HOST_BUFFERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user decides; None leaves it to the planner.

    Attributes:
        home: where weights and optimizer state rest, ``host`` or ``disk``.
        below: the tier next to the device, ``host`` or ``disk``.
        may_be_on_disk: whether a home in host memory could be on disk instead, and nobody has tried.
        clip: whether gradients are clipped by their global norm.
        unit_clip: whether the gradient of each unit is clipped by its own norm.
        may_skip: whether a step may be skipped, for which the gradients of all units are to be known.
        state: how a trained unit lies at home; None for the plain layout of the model's dtype. Where it keeps no
            gradients, they pass through a ring.
        microbatches: microbatches per step.
        round_microbatches: of them, those that one worker takes through all units at a time; None for all.
        most_microbatches: how many there may be; None where that is not known.
        can_part: whether MLPs could take their tokens in parts, and do not yet.
        slots: units that the device holds at once.
        prefetch: how many units ahead of their use LOADs start.
        tile_elements: elements per tile of the optimizer step, a multiple of 2048.
        commits: whether a home on disk keeps what a step changes twice, and commits every step.
        offload: whether all inputs of units leave the device (True) or none (False).
        cut: whether somebody else decides when the backward begins.
        into_inputs: whether gradients go through to the inputs of the model.
        transport: codecs on the link.
        activations: what becomes of what backwards need of their forwards, see `planner.program.stages`;
            ``auto`` keeps on the
            device what has room when all else has, and offloads where that is known to be faster.
        rates: of a worker; several are needed for stages. None leaves what waits on the device.
        nodes: processes that share the step.
        rank: number of this one; None for the one that steps most.
        wire: codecs between them.
        num_workers: devices that share the step, all alike.
        stages: how the step is cut for several workers; None leaves it to the planner.
        leaves_unasked: whether ``auto`` may offload: a link with rates of its own lies below the device.
        peers: of several workers, pairs (source, target) of which one can copy to the other by itself.
        handover: how stages hand over; ``peer`` must go between all ``peers``, ``auto`` where there is room.
        resident: how many units rest on the device, state and all, or which; ``auto`` as many as make a step shorter.
    """

    home: Tier
    below: Tier
    may_be_on_disk: bool = True
    clip: bool = True
    unit_clip: bool = False
    may_skip: bool = False
    state: StateLayout | None = None
    microbatches: int = 1
    round_microbatches: int | None = None
    most_microbatches: int | None = None
    can_part: bool = False
    slots: int | None = None
    prefetch: int | None = None
    tile_elements: int | None = None
    offload: bool | None = None
    commits: bool = True
    cut: bool = False
    into_inputs: bool = False
    activations: Activations = "auto"
    rates: UnitRates | None = None
    transport: Transport = field(default_factory=Transport)
    nodes: int = 1
    rank: int | None = None
    wire: Wire = EXACT
    num_workers: int = 1
    stages: Stages | None = None
    leaves_unasked: bool = True
    peers: frozenset[tuple[int, int]] = frozenset()
    handover: Handover = "auto"
    resident: Resident | frozenset[int] = 0

    def __post_init__(self) -> None:
        if self.home == "host" and self.below == "disk":
            raise ValueError("the disk cannot lie between the device and a home in host memory")
        if self.ring and self.clip:
            raise ValueError("gradients that are clipped by their global norm wait at home for it")
        if self.resident != "auto" and self.resident and (reason := why_not_resident(self)):
            raise ConfigError(f"memory.resident: {reason}; leave it auto")

    @property
    def ring(self) -> bool:
        """Whether gradients pass through a ring."""
        return self.state is not None and self.state.gradients == "none"

    @property
    def staged(self) -> bool:
        """Whether units pass through host buffers on their way between disk and device."""
        return self.home == "disk" and self.below == "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The numbers that make a plan.

    Attributes:
        num_slots: slots that units share.
        num_accumulators: gradient accumulators that units share.
        num_kept: offloadable units, counted from the last, whose inputs stay on the device.
        tile_elements: elements per tile.
        num_host_buffers: host buffers; 0 where units are not staged.
        kept: see `StepLayout.kept`.
        num_tile_buffers: buffers in the ring of tiles, where there are tiles.
        stays: see `StepLayout.stays`; of units that are not resident.
        encoded: see `StepLayout.encoded`; those that stay are not.
        resident: see `StepLayout.resident`.
    """

    num_slots: int
    num_accumulators: int
    num_kept: int
    tile_elements: int
    num_host_buffers: int
    kept: Kept = ()
    num_tile_buffers: int = NUM_TILE_BUFFERS
    stays: frozenset[int] = frozenset()
    encoded: frozenset[int] = frozenset()
    resident: frozenset[int] = frozenset()


class Sizing:
    """Turns knobs into layouts for one model and one set of options."""

    def __init__(self, model: ModelSpec, options: PlanOptions) -> None:
        self.model = model
        self.options = options
        self.state = options.state or StateLayout(dtype=model.dtype)
        self.own_elements: tuple[int, ...] = ()
        if options.nodes > 1:
            self.own_elements = own_elements(model, options.nodes, options.rank)
        self._resident_order = resident_order(model)
        self._sizes_of = cache(self._shared_sizes)
        self._slot_sizes, self._accumulator_sizes = self._sizes_of(frozenset(), frozenset())
        self._trainable = tuple(unit.trainable for unit in model.units)
        self._weight_bytes = tuple(unit.weight_bytes(model.dtype) for unit in model.units)
        self._link_bytes = tuple(load_bytes(options.transport, unit, model.dtype) for unit in model.units)
        self._encoded_bytes = tuple(encoded_bytes(unit) for unit in model.units)
        self._gradient_bytes = tuple(unit.gradient_bytes * unit.trainable for unit in model.units)
        self.largest_trainable = max((unit.numel for unit in model.units if unit.trainable), default=0)
        # Which units are offloadable a layout tells, and the one that is asked offloads none.
        self._offloadable: tuple[int, ...] = ()
        self._offloadable = self.layout(self.least()).offloadable
        self.num_offloadable = len(self._offloadable)

    @property
    def host_buffer_bytes(self) -> int:
        """Size of a host buffer: any unit's weights, or its gradient, or that alone where nothing else goes through."""
        units = self.model.units
        gradients = max(unit.gradient_bytes * unit.trainable for unit in units)
        if not self.options.staged:
            return gradients if self.options.nodes > 1 else 0
        weights = max(unit.weight_bytes(self.model.dtype) for unit in units)
        return weights if self.options.ring else max(weights, gradients)

    def least(self) -> Knobs:
        """Return the knobs of the plan that needs the least device memory."""
        on_disk = self.options.home == "disk"
        least = min(LEAST_TILE_ELEMENTS if on_disk else LEAST_RING_ELEMENTS, self.largest_trainable)
        least = align_up(least, self.state.quantum if on_disk else PLANE_ELEMENTS)
        if self.state.whole:
            least = self.state.whole_tile(self.largest_trainable)
        tile_elements = self.options.tile_elements or least
        return Knobs(
            num_slots=self._at_most_slots(self.options.slots or 1),
            num_accumulators=min(1, len(self._accumulator_sizes)),
            num_kept=0,
            tile_elements=tile_elements if self.options.home == "disk" or self.options.ring else 0,
            num_host_buffers=LEAST_HOST_BUFFERS if self.options.staged or self.options.nodes > 1 else 0,
            num_tile_buffers=1 if self.state.whole else NUM_TILE_BUFFERS,
        )

    def layout(self, knobs: Knobs) -> StepLayout:
        """Return the layout that ``knobs`` make."""
        model, options = self.model, self.options
        has_rest = len(model.units) > model.num_streamed
        share_elements = self.own_elements or tuple(unit.numel for unit in model.units)
        tiles = tuple(
            -(-numel // knobs.tile_elements) if knobs.tile_elements and trains else 0
            for numel, trains in zip(share_elements, self._trainable, strict=True)
        )
        tiles = tuple(0 if unit in knobs.resident else count for unit, count in enumerate(tiles))
        stays = knobs.stays | (knobs.resident - {model.num_streamed})
        slots, accumulators = self._sizes_of(stays, knobs.resident)
        offload = self._offloadable[: len(self._offloadable) - knobs.num_kept]
        return StepLayout(
            num_streamed=model.num_streamed,
            rest=model.num_streamed if has_rest else None,
            num_microbatches=options.microbatches,
            round_microbatches=options.round_microbatches,
            trainable=self._trainable,
            weight_bytes=self._weight_bytes,
            gradient_bytes=self._gradient_bytes,
            slot_bytes=slots[: knobs.num_slots],
            accumulator_bytes=accumulators[: knobs.num_accumulators],
            stays=stays,
            resident=knobs.resident,
            encoded=knobs.encoded - stays,
            link_bytes=self._link_bytes,
            encoded_bytes=self._encoded_bytes,
            prefetch_depth=max(1, knobs.num_slots - 1) if options.prefetch is None else options.prefetch,
            clip=options.clip,
            unit_clip=options.unit_clip,
            ring=options.ring and any(tiles),
            tiles=tiles,
            tiles_on_disk=options.home == "disk",
            num_host_buffers=knobs.num_host_buffers,
            num_tile_buffers=knobs.num_tile_buffers if any(tiles) else 0,
            staged=options.staged,
            commits=options.commits and options.home == "disk",
            kept=knobs.kept,
            num_nodes=options.nodes,
            own_elements=self.own_elements,
            cut=options.cut,
            into_inputs=options.into_inputs,
            offload=frozenset() if options.offload is False else frozenset(offload),
        )

    def more_slots(self, knobs: Knobs, upto: int) -> Iterator[Knobs]:
        """Yield knobs with more slots, unless their number is given."""
        if self.options.slots is None:
            for num_slots in range(knobs.num_slots + 1, self._at_most_slots(upto) + 1):
                yield replace(knobs, num_slots=num_slots)

    def more_accumulators(self, knobs: Knobs, upto: int = 2) -> Iterator[Knobs]:
        """Yield knobs with a second accumulator, so that a gradient leaves while the next one is summed."""
        if knobs.num_accumulators < min(upto, len(self._accumulator_sizes)):
            yield replace(knobs, num_accumulators=knobs.num_accumulators + 1)

    def accumulators_for_sums(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with a third accumulator where a step has several rounds, so that a sum comes up meanwhile."""
        if self.options.round_microbatches is not None:
            yield from self.more_accumulators(knobs, upto=3)

    def larger_tiles(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with tiles of twice the size, and twice that, while a unit fills one."""
        if self.options.tile_elements is None and knobs.tile_elements:
            sizes = (knobs.tile_elements << shift for shift in count(1))
            enough = min(
                max(MOST_TILE_ELEMENTS, self.model.num_trainable // MOST_TILES), self.largest_trainable
            )
            for size in takewhile(lambda size: size <= enough, sizes):
                yield replace(knobs, tile_elements=size)

    def more_tile_buffers(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with twice the buffers, while a ring of gradients alone takes no more than `RING_UNITS`.

        Of tiles that are whole units a disk home has fewer to begin with, and one more at a time.
        """
        if self.options.home == "disk" and knobs.tile_elements:
            for num_tile_buffers in range(knobs.num_tile_buffers + 1, NUM_TILE_BUFFERS + 1):
                yield replace(knobs, num_tile_buffers=num_tile_buffers)
        if self.options.ring and self.options.home == "host" and knobs.tile_elements:
            enough = RING_UNITS * -(-self.largest_trainable // knobs.tile_elements)
            counts = (knobs.num_tile_buffers << shift for shift in count(1))
            for num_tile_buffers in takewhile(lambda number: number < 2 * enough, counts):
                yield replace(knobs, num_tile_buffers=min(num_tile_buffers, enough))

    def more_kept(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with the inputs of more units kept on the device, those needed soonest first."""
        if self.options.offload is None:
            for num_kept in range(knobs.num_kept + 1, self.num_offloadable + 1):
                yield replace(knobs, num_kept=num_kept)

    def more_host_buffers(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with more host buffers, where units are staged."""
        if self.options.staged:
            for num_host_buffers in range(knobs.num_host_buffers + 1, MOST_HOST_BUFFERS + 1):
                yield replace(knobs, num_host_buffers=num_host_buffers)

    def more_staying(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with more units that stay, of those with weights that never train and no codec writes.

        They lie among others that move, so that the link has the time of all to move those in.
        """
        for units in self._spread(encoded=False):
            yield replace(knobs, stays=knobs.stays | units)

    def more_decoded(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with more units that stay decoded, of those with weights that never train and a codec writes."""
        for units in self._spread(encoded=True):
            yield replace(knobs, stays=knobs.stays | units)

    def more_encoded(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with more of the same units that lie on the device as they are encoded."""
        is_open = self.options.leaves_unasked and self.options.home == "host"
        for units in self._spread(encoded=True) if is_open else ():
            yield replace(knobs, encoded=units)

    def _spread(self, *, encoded: bool) -> Iterator[frozenset[int]]:
        """Yield more and more units with weights that never train, of those that a codec writes or of the others."""
        frozen = frozen_units(self.model) if self.options.slots is None else []
        units = [unit for unit in frozen if bool(self._encoded_bytes[unit]) is encoded]
        yield from (spread(units, number) for number in range(1, len(units) + 1))

    def all_frozen_stay(self, knobs: Knobs) -> bool:
        """Return whether no unit with weights that never train moves."""
        return {*frozen_units(self.model)} <= knobs.stays | knobs.encoded | knobs.resident

    def more_resident(self, knobs: Knobs) -> Iterator[Knobs]:
        """Yield knobs with more units resident, where that is the planner's to say."""
        options = self.options
        is_open = options.resident == "auto" and options.leaves_unasked and options.slots is None
        if is_open and not why_not_resident(options):
            for number in range(len(knobs.resident) + 1, len(self._resident_order) + 1):
                yield replace(knobs, resident=frozenset(self._resident_order[:number]))

    def named_resident(self) -> frozenset[int]:
        """Return the units that are resident because the user says how many are."""
        given = self.options.resident
        if isinstance(given, frozenset):
            return given
        return frozenset() if given == "auto" else frozenset(self._resident_order[:given])

    def _shared_sizes(
        self, stays: frozenset[int], resident: frozenset[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes of the slots and accumulators that units share which have none of their own."""
        model, options = self.model, self.options
        streamed = model.units[: model.num_streamed]
        moving = [unit for unit in streamed if unit.all_tensors and unit.index not in stays]
        in_a_round = options.round_microbatches or options.microbatches
        waits = options.clip or in_a_round < options.microbatches or options.cut
        summed = [u for u in streamed if u.trainable and not (waits and u.index in resident)]
        return (
            _sizes([(unit.kind, unit.weight_bytes(model.dtype)) for unit in moving]),
            _sizes([(unit.kind, unit.gradient_bytes) for unit in summed]),
        )

    def _at_most_slots(self, num_slots: int) -> int:
        return min(num_slots, len(self._slot_sizes))


Upgrade = Callable[[Sizing, Knobs], Iterator[Knobs]]

# Each upgrade goes as far as the budgets let it, then the next one has its turn.
BEFORE_INPUTS: tuple[Upgrade, ...] = (
    lambda sizing, knobs: sizing.more_slots(knobs, upto=2),
    Sizing.more_accumulators,
    lambda sizing, knobs: sizing.more_slots(knobs, upto=3),
    Sizing.accumulators_for_sums,
    Sizing.more_host_buffers,
    Sizing.larger_tiles,
    Sizing.more_tile_buffers,
)
AFTER_INPUTS: tuple[Upgrade, ...] = (
    Sizing.more_kept,
    lambda sizing, knobs: sizing.more_slots(knobs, upto=4),
)
UPGRADES = (*BEFORE_INPUTS, *AFTER_INPUTS)


def _sizes(units: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return a size for each of ``units`` (kind, bytes): the first fits the largest, the others any block."""
    if not units:
        return ()
    largest = max(size for _, size in units)
    block = max((size for kind, size in units if kind == "block"), default=largest)
    return (largest, *[block] * (len(units) - 1))
