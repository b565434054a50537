"""What a schedule needs to know about a model and the memory set aside for it: counts and bytes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS
from outsize.planner.program.program import Op
from outsize.planner.program.stages import LEAVING_STAGES, Choice, Kept, Stages, rounds_in_turn

# The only worker of a step that is not cut into stages.
WORKER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One training step of one model, before it is put in order.

    Per-unit tuples have one entry for each streamed unit, then one for the rest where there is one.

    Attributes:
        num_streamed: units that the forward visits.
        rest: index of the resident unit, equal to ``num_streamed``; None where there is none.
        num_microbatches: microbatches of a step, at least one.
        round_microbatches: of them, those that one worker takes through all units at a time; None for all. Stages say
            how many they take themselves.
        trainable: whether a unit has gradients and steps.
        weight_bytes: bytes of a unit's weights in compute dtype; 0 where they live in the rest.
        gradient_bytes: bytes of a unit's fp32 gradient.
        slot_bytes: sizes of the slots that units share; the rest has one more slot, of its own.
        accumulator_bytes: sizes of the gradient accumulators; the rest has one more, of its own.
        stays: units whose weights stay on the device, or on each worker, each in a slot of its own: those that train
            from the first visit of a step to the last (of stages, for a visit), those that never train from step to
            step.
        resident: units whose training state rests on the device: weights, masters and moments never leave it, and the
            gradient is summed and stepped there; where the step is cut it rests there, too, from pass to pass. Streamed
            ones stay as well.
        encoded: units whose frozen parts lie on the device as a codec writes them at home, from step to step; each LOAD
            decodes them into its slot.
        link_bytes: bytes of a unit's weights on the way up; empty where they are its weight bytes.
        encoded_bytes: of them, those that a codec writes once for all steps; empty where there are none.
        prefetch_depth: how many units (LOAD) or microbatches (FETCH) ahead of their use transfers start.
        offload: units whose inputs leave the device between forward and backward.
        kept: for each streamed unit and each microbatch of a round, what becomes of what its backward needs; empty
            recomputes all.
        clip: whether gradients are clipped by their global norm.
        unit_clip: whether the gradient of each unit is clipped by its own norm.
        ring: whether gradients do not wait at home, but pass tile by tile through the buffers of the ring to the
            optimizer, which steps a unit as soon as its backward has run.
        tiles: optimizer tiles of a unit; 0 where it steps whole, in place in host memory.
        tiles_on_disk: whether tiles are read from a home on disk and written back; otherwise the home is stepped where
            it lies, and a tile buffer holds a gradient.
        num_host_buffers: host buffers for whole units on their way between disk and device.
        num_tile_buffers: buffers in the ring of the optimizer's tiles.
        staged: whether units pass through host buffers, the home being two tiers below the device.
        commits: whether the step ends with a COMMIT, its home being on disk.
        num_workers: devices, each with slots and accumulators of these sizes.
        stages: how the step is dealt out to them; None for the V-cycle of one worker.
        peers: in a step of stages, pairs of workers (source, target) between which what one stage makes for the next
            goes device to device, instead of by way of host memory; of all pairs, those whose turns follow each other.
        rest_users: in a step of stages, the units whose backward adds to the gradient of a rest that trains.
        num_nodes: processes that share the step, each with this program.
        own_elements: of several nodes, the elements of each unit that this one steps; empty of a single one.
        cut: whether somebody else decides when the backward begins, as in a training loop of one's own; then the last
            unit runs F and B like any other, see `planner.passes.step_parts`.
        into_inputs: whether gradients go through to the inputs of the model, so that every unit runs a backward.
    """

    num_streamed: int
    rest: int | None
    num_microbatches: int
    round_microbatches: int | None = None
    trainable: tuple[bool, ...]
    weight_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    accumulator_bytes: tuple[int, ...]
    stays: frozenset[int] = frozenset()
    resident: frozenset[int] = frozenset()
    encoded: frozenset[int] = frozenset()
    link_bytes: tuple[int, ...] = ()
    encoded_bytes: tuple[int, ...] = ()
    prefetch_depth: int = 1
    offload: frozenset[int] = frozenset()
    kept: Kept = ()
    clip: bool = False
    unit_clip: bool = False
    ring: bool = False
    tiles: tuple[int, ...]
    tiles_on_disk: bool = True
    num_host_buffers: int = 0
    num_tile_buffers: int = 0
    staged: bool = False
    commits: bool = False
    num_workers: int = 1
    stages: Stages | None = None
    peers: frozenset[tuple[int, int]] = frozenset()
    rest_users: frozenset[int] = frozenset()
    num_nodes: int = 1
    own_elements: tuple[int, ...] = ()
    cut: bool = False
    into_inputs: bool = False

    def __post_init__(self) -> None:
        if self.num_streamed < 1 or self.num_microbatches < 1 or self.round_microbatches == 0:
            raise ValueError("a step has at least one unit and one microbatch, and so has each of its rounds")
        if self.rest is not None and self.rest != self.num_streamed:
            raise ValueError(f"the rest comes last: expected index {self.num_streamed}, not {self.rest}")
        for name in ("trainable", "weight_bytes", "gradient_bytes", "tiles"):
            if len(getattr(self, name)) != self.num_units:
                raise ValueError(f"{name} needs one entry for each of {self.num_units} units")
        if any(train and not size for train, size in zip(self.trainable, self.weight_bytes, strict=True)):
            raise ValueError("a trainable unit has weights")
        moving = (self.weight_bytes[unit] for unit in range(self.num_streamed) if unit not in self.stays)
        if max(moving, default=0) > max(self.slot_bytes, default=0):
            raise ValueError("no slot holds the largest unit")
        apart = self.own_accumulators
        summed = [u for u in range(self.num_streamed) if self.trainable[u] and u not in apart]
        if max((self.gradient_bytes[u] for u in summed), default=0) > max(self.accumulator_bytes, default=0):
            raise ValueError("no accumulator holds the largest gradient")
        if not self.offload <= set(self.offloadable):
            raise ValueError(f"offload may name units {self.offloadable}, not {sorted(self.offload)}")
        able = {u for u in range(self.num_streamed) if self.weight_bytes[u]}
        if not self.stays <= able:
            raise ValueError(f"stays may name units {sorted(able)}, not {sorted(self.stays)}")
        if self.encoded & self.stays or any(not self.encoded_bytes[unit] for unit in self.encoded):
            raise ValueError("encoded may name units that move and have frozen parts with a codec")
        self._check_resident()
        self._check_kept()
        if self.staged and self.num_host_buffers < 1:
            raise ValueError("staged transfers need a host buffer")
        if any(self.tiles) and self.num_tile_buffers < 1:
            raise ValueError("tiles need a tile buffer")
        self._check_nodes()
        if self.ring and (self.clip or self.cut or self.stages is not None or self.num_rounds > 1):
            raise ValueError(
                "a ring of gradients goes with no global norm, no step that is cut, no stages and one round"
            )
        if self.ring and any(not self.tiles[unit] for unit in self.step_order if unit not in self.resident):
            raise ValueError("gradients that pass through a ring pass in tiles")
        if self.clip and self.unit_clip:
            raise ValueError("gradients are clipped by one norm: the global one, or that of their unit")
        if not self.tiles_on_disk and any(self.tiles) and not self.ring:
            raise ValueError("a home that is stepped in place has tiles of gradients only, for a ring")
        self._check_stages()

    def _check_resident(self) -> None:
        if not self.resident <= set(self.step_order):
            raise ValueError(f"resident may name units {self.step_order}, not {sorted(self.resident)}")
        if not self.resident <= {*self.stays, self.rest}:
            raise ValueError("the weights of a resident unit stay on the device")
        elsewhere = self.stages is not None or self.num_nodes > 1 or self.tiles_on_disk
        if self.resident and (elsewhere or any(self.tiles[unit] for unit in self.resident)):
            raise ValueError(
                "units are resident on a single worker over a home in host memory, and step whole"
            )

    def _check_nodes(self) -> None:
        if self.num_nodes < 1 or len(self.own_elements) != (self.num_units if self.num_nodes > 1 else 0):
            raise ValueError(
                f"own_elements needs one entry for each of {self.num_units} units of several nodes"
            )
        if self.num_nodes > 1 and self.cut:
            raise ValueError("a step that is cut is not shared by several nodes")
        if self.num_nodes > 1 and (self.ring or self.unit_clip):
            raise ValueError("nodes share whole gradients, clipped by one norm")
        if self.reduces_buffers and any(self.trainable) and not self.num_host_buffers:
            raise ValueError("gradients that are reduced need a host buffer")

    def _check_kept(self) -> None:
        if not self.kept:
            return
        if len(self.kept) != self.num_streamed:
            raise ValueError(f"kept needs one entry for each of {self.num_streamed} streamed units")
        if any(len(choices) != self.round_size for choices in self.kept):
            raise ValueError(f"kept needs one choice for each of {self.round_size} microbatches")
        able = {*self.keepable, *self.leavable}
        others = [u for u in range(self.num_streamed) if u not in able and self.keeps_anything(u)]
        if others:
            raise ValueError(f"kept may name units {sorted(able)}, not {others}")
        if self.stages is None:
            return
        if any(choice.leaves for unit in self.keepable for choice in self.kept[unit]):
            raise ValueError("where a step turns around nothing leaves: the backward follows at once")
        if any(choice not in LEAVING_STAGES for unit in self.leavable for choice in self.kept[unit]):
            raise ValueError(
                "of stages what a forward keeps leaves for the backward's worker, but no graph does"
            )

    def _check_stages(self) -> None:
        if self.cut and self.clip:
            raise ValueError("a step that is cut goes with no clipping")
        if self.stages is not None and self.round_microbatches is not None:
            raise ValueError("stages say themselves how many microbatches a round has")
        if self.num_workers < 1 or (self.num_workers > 1 and self.stages is None):
            raise ValueError("several workers need stages")
        if not self.peers <= {pair for pair in self.neighbours if self.stages is not None}:
            raise ValueError(
                f"peers may name {sorted(self.neighbours)} where there are stages, not {self.peers}"
            )
        if self.stages is None:
            return
        top, bottom = self.stages.backward[0][1], self.stages.backward[-1][0]
        if (top, bottom) != (self.num_streamed, self.first_backward):
            raise ValueError(f"backward stages cover units {self.first_backward} to {self.last}")
        if self.stages.num_stages < self.num_workers:
            raise ValueError(f"{self.num_workers} workers need as many stages, not {self.stages.num_stages}")
        if self.stages.cursor >= self.num_workers:
            raise ValueError(f"there is no worker {self.stages.cursor}")
        if self.offload:
            raise ValueError("stages hand inputs over and offload none of their own")
        if self.rest_trains != bool(self.rest_users) or not self.rest_users <= set(range(self.num_streamed)):
            raise ValueError(f"a rest that trains has users among units 0 to {self.last}")

    @property
    def reduces_buffers(self) -> bool:
        """Whether whole gradients go into host buffers for other nodes: those of stages are summed at home first."""
        return self.num_nodes > 1 and self.stages is None

    @property
    def whole_planes(self) -> tuple[str, ...]:
        """Planes of which each of several nodes keeps all: weights, and sums of several rounds."""
        return (WEIGHTS,) if self.reduces_buffers and self.num_rounds == 1 else (WEIGHTS, GRADIENT)

    @property
    def round_size(self) -> int:
        """Microbatches of a round; the last round may have fewer."""
        size = self.round_microbatches if self.stages is None else self.stages.round_size
        return min(size or self.num_microbatches, self.num_microbatches)

    @property
    def num_rounds(self) -> int:
        """Rounds of a step: each runs forward and backward over all units, and the sums of gradients go on."""
        return -(-self.num_microbatches // self.round_size)

    @property
    def period(self) -> int:
        """Rounds after which each stage is with the same worker again; one where there is one worker."""
        return 1 if self.stages is None else rounds_in_turn(self.stages.num_stages, self.num_workers)

    @property
    def microbatches_at_once(self) -> int:
        """Microbatches under way at once, at most: those of a round, or of two where one begins while one still ends.

        The rules of data hold later ones back, see `program.hazards`.
        """
        rounds = 2 if self.stages is not None and self.stages.overlaps else 1
        return min(self.round_size * rounds, self.num_microbatches)

    @property
    def rounds(self) -> Iterator[range]:
        """The microbatches of each round."""
        for first in range(0, self.num_microbatches, self.round_size):
            yield range(first, min(first + self.round_size, self.num_microbatches))

    def round_of(self, op: Op) -> int:
        """The number of the round that the microbatch of ``op`` belongs to."""
        return (op.microbatch or 0) // self.round_size

    @property
    def neighbours(self) -> frozenset[tuple[int, int]]:
        """Pairs of workers of which one hands over to the other: stages are dealt out in turn."""
        count = self.num_workers
        return frozenset((worker, (worker + 1) % count) for worker in range(count) if count > 1)

    @property
    def num_places(self) -> int:
        """Places of a worker for what arrives device to device: one for each microbatch of a visit."""
        if self.stages is None or not self.peers:
            return 0
        return self.round_size

    def takes_from_peer(self, worker: int | None) -> bool:
        """Whether what visits of ``worker`` start from comes to it device to device."""
        return any(target == worker for _, target in self.peers)

    def gives_to_peer(self, worker: int | None) -> bool:
        """Whether what visits of ``worker`` make for the next one goes there device to device."""
        return any(source == worker for source, _ in self.peers)

    @property
    def num_units(self) -> int:
        """Streamed units and the rest."""
        return self.num_streamed + (self.rest is not None)

    @property
    def last(self) -> int:
        """The last streamed unit, whose forward and backward are one op unless the step is cut."""
        return self.num_streamed - 1

    @property
    def resident_slot(self) -> int:
        """Index of the slot that is the rest's own."""
        return len(self.slot_bytes)

    @property
    def resident_accumulator(self) -> int:
        """Index of the accumulator that is the rest's own."""
        return len(self.accumulator_bytes)

    @property
    def own_slots(self) -> dict[int, int]:
        """Units that have a slot of their own, the rest first, and its index."""
        rest = () if self.rest is None else (self.rest,)
        return {unit: slot for slot, unit in enumerate((*rest, *sorted(self.stays)), len(self.slot_bytes))}

    @property
    def held_bytes(self) -> int:
        """Bytes of what lies on the device as it is encoded."""
        return sum(self.encoded_bytes[unit] for unit in self.encoded)

    @property
    def own_accumulators(self) -> dict[int, int]:
        """Units that have an accumulator of their own, the rest first, and its index.

        A resident unit needs none where it steps as soon as its backward has run. Where the step is cut, that of a
        resident unit is where its gradient rests.
        """
        waits = self.clip or self.num_rounds > 1 or self.cut
        rest = (self.rest,) if self.rest is not None and self.rest_trains else ()
        units = (*rest, *sorted(self.resident - {self.rest})) if waits else rest
        return {unit: index for index, unit in enumerate(units, len(self.accumulator_bytes))}

    @property
    def rest_has_weights(self) -> bool:
        """Whether a rest is loaded at all."""
        return self.rest is not None and self.weight_bytes[self.rest] > 0

    @property
    def rest_trains(self) -> bool:
        """Whether there is a rest with gradients, to which every unit's backward may add."""
        return self.rest is not None and self.trainable[self.rest]

    @property
    def first_backward(self) -> int:
        """The lowest unit that runs backward: below it nothing trains. The last unit always runs it."""
        if self.rest_trains or self.into_inputs:
            return 0
        return next((u for u in range(self.num_streamed) if self.trainable[u]), self.last)

    @property
    def offloadable(self) -> tuple[int, ...]:
        """Units whose inputs could leave: those a backward needs, but not the ids, nor the last unit's."""
        return tuple(range(max(1, self.first_backward), self.last))

    @property
    def keepable(self) -> tuple[int, ...]:
        """Units whose backward would recompute what their forward had on the same worker.

        These are the units with a backward, but not the last, whose backward follows at once unless the step is cut.
        Of stages only the one that turns around runs both.
        """
        if self.cut and self.stages is not None:  # whose backward is another visit, of another worker
            return ()
        lowest = self.first_backward if self.stages is None else self.stages.backward[0][0]
        return tuple(range(lowest, self.last + self.cut))

    @property
    def leavable(self) -> tuple[int, ...]:
        """Units of which what a forward keeps may leave the device.

        Of stages these are the ones below where the step turns around: their backward may be another worker's.
        """
        if self.stages is None:
            return self.keepable
        return tuple(range(self.first_backward, self.stages.backward[0][0]))

    def choice(self, unit: int, microbatch: int) -> Choice:
        """What becomes of what the backward of ``unit`` for ``microbatch`` needs of the forward."""
        if unit >= len(self.kept):
            return Choice.RECOMPUTE
        choices = self.kept[unit]
        return choices[microbatch % len(choices)]

    def choices(self, unit: int, count: int) -> Counter[Choice]:
        """How many of the first ``count`` microbatches of a step have which choice for ``unit``."""
        if unit >= len(self.kept):
            return Counter({Choice.RECOMPUTE: count})
        repeats, more = divmod(count, len(self.kept[unit]))
        return Counter(self.kept[unit] * repeats + self.kept[unit][:more])

    def keeps_anything(self, unit: int) -> bool:
        """Whether a forward of ``unit`` keeps anything."""
        return unit < len(self.kept) and any(choice is not Choice.RECOMPUTE for choice in self.kept[unit])

    @property
    def keeps_any(self) -> bool:
        """Whether any forward keeps anything."""
        return any(self.keeps_anything(unit) for unit in range(len(self.kept)))

    @property
    def any_leaves(self) -> bool:
        """Whether anything that a forward keeps leaves the device."""
        return any(choice.leaves for choices in set(self.kept) for choice in set(choices))

    @property
    def step_order(self) -> tuple[int, ...]:
        """Trainable units in the order in which the next forward needs them: the rest, then 0, 1, …."""
        order = range(self.num_streamed) if self.rest is None else (self.rest, *range(self.num_streamed))
        return tuple(unit for unit in order if self.trainable[unit])
