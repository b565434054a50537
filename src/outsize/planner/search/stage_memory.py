"""Count what stages of several workers take in each tier.

On each worker: slots and accumulators twice, so that one half fills while the other is used, or once where memory is
too tight for that (`stages.HALVES`); the rest beside them; inputs and gradients of two microbatches; what forwards
keep, where it leaves (`leaving`); workspace for all units of a backward stage, which are recomputed before the first
of them is differentiated. Below the workers: what stages hand over, and the home.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import PRODUCTS, Demand, bytes_below, offload_rooms, products_bytes
from outsize.planner.memory.step_bytes import device_bytes, host_bytes
from outsize.planner.program.hazards import SAVE_WINDOW
from outsize.planner.program.stages import KeptBytes, Span, Stages, slots_for
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.sizing import LEAST_HOST_BUFFERS, NUM_TILE_BUFFERS, PlanOptions, Sizing
from outsize.planner.search.upgrades import Away, Way, away_in, kept_in_stages, on_its_way
from outsize.units import align_up

ARRIVALS = "arrivals from devices"


def single_units(num_streamed: int, bottom: int, round_size: int, halves: tuple[int, int]) -> Stages:
    """Return stages of one unit each in rounds that do not overlap, which need the least memory.

    Args:
        num_streamed: units.
        bottom: the lowest that runs backward.
        round_size: microbatches of a round.
        halves: sets of slots and of accumulators, see `Stages`.
    """
    return Stages(
        forward=tuple((u, u + 1) for u in range(num_streamed - 1)),
        backward=tuple((u, u + 1) for u in reversed(range(bottom, num_streamed))),
        round_size=round_size,
        slot_halves=halves[0],
        accumulator_halves=halves[1],
        overlaps=False,
    )


def staged_layout(
    model: ModelSpec,
    options: PlanOptions,
    way: Way,
    stages: Stages,
    rest_users: frozenset[int],
    stays: frozenset[int] = frozenset(),
) -> StepLayout:
    """Return the step, its home, nodes and copies between devices apart.

    Args:
        model: its units.
        options: what is decided.
        way: what becomes of what forwards keep.
        stages: of the step.
        rest_users: units whose backward adds to the gradient of a rest that trains.
        stays: see `StepLayout.stays`.
    """
    count = model.num_streamed
    weights = tuple(unit.weight_bytes(model.dtype) for unit in model.units)
    gradients = tuple(unit.gradient_bytes * unit.trainable for unit in model.units)
    return StepLayout(
        num_streamed=count,
        rest=count if len(model.units) > count else None,
        num_microbatches=options.microbatches,
        trainable=tuple(unit.trainable for unit in model.units),
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots_for(stages, [0 if unit in stays else size for unit, size in enumerate(weights)]),
        accumulator_bytes=slots_for(stages, gradients, only_backward=True),
        clip=options.clip,
        unit_clip=options.unit_clip,
        stays=stays,
        tiles=(0,) * len(model.units),
        num_workers=options.num_workers,
        stages=stages,
        kept=kept_in_stages(stages, count, options.microbatches, way),
        rest_users=rest_users,
        cut=options.cut,
    )


def num_handed_over(layout: StepLayout) -> int:
    """Return how many inputs and gradients lie below the workers at once, at most: those of the rounds under way.

    Forward stages save the inputs of all their units that a backward needs, and what comes out at their end; backward
    stages send the gradient of what came in, of each microbatch one at a time. Where all of that goes from device to
    device, only the former. In a step that is cut the stage that turns around is a forward stage, too; and what later
    rounds hand over lies there beside what the first has saved.
    """
    stages, bottom = layout.stages, layout.first_backward
    assert stages is not None
    turning = max(0, layout.num_streamed - max(stages.backward[0][0] + 1, bottom)) if layout.cut else 0
    if layout.peers == layout.neighbours and layout.peers:
        handed = (max(0, end - max(first, bottom, 1)) for first, end in stages.forward)
        return layout.microbatches_at_once * (sum(handed) + turning + layout.cut)
    inputs = sum(max(0, end - max(first + 1, bottom)) + 1 for first, end in stages.forward)
    gradient = stages.backward[0][0] > bottom or (layout.cut and layout.num_rounds > 1)
    return layout.microbatches_at_once * (inputs + turning + gradient)


def activation_bytes(num_units: int, boundary_bytes: int) -> int:
    """Return the activations of a stage: inputs of this and the next microbatch, gradients, and what is leaving."""
    return (2 * (num_units + 1) + SAVE_WINDOW) * boundary_bytes


def arrival_bytes(layout: StepLayout, boundary_bytes: int) -> int:
    """Return the places of a worker for what comes from another one, and what is on its way out to one."""
    return (layout.num_places + SAVE_WINDOW) * boundary_bytes if layout.peers else 0


def spans_that_fit(
    budget_bytes: int,
    weights: tuple[int, ...],
    gradients: tuple[int, ...],
    halves: tuple[int, int],
    boundary_bytes: int,
    workspace: Callable[[Span, bool], int],
    away: Away,
    kept_bytes: KeptBytes,
) -> Callable[[Span, bool], bool]:
    """Return what says whether a worker can hold the units of a span, forward (False) or backward (True).

    Args:
        budget_bytes: of a worker, for stages.
        weights: bytes of each streamed unit.
        gradients: of the gradient of each.
        halves: sets of slots and of accumulators.
        boundary_bytes: of the largest input of a unit.
        workspace: of a span.
        away: what leaves of what forwards keep.
        kept_bytes: that forwards of each extent keep.
    """
    slots, sums = halves
    most_weights, most_gradients, count = max(weights), max(gradients), len(weights)

    def fits(span: Span, backward: bool) -> bool:
        first, end = span
        size = slots * max(most_weights, sum(weights[first:end]))
        size += sums * max(most_gradients, sum(gradients[first:end]) if backward else 0)
        size += activation_bytes(end - first, boundary_bytes) + workspace(span, backward)
        size += 0 if end == count else on_its_way(span, backward, away, kept_bytes)
        return size <= budget_bytes

    return fits


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """Room in host memory; nothing of it for a home that lies there.

    Attributes:
        tile_elements: per optimizer tile.
        num_host_buffers: that whole units pass through, for all workers together.
        host_buffer_bytes: of each.
    """

    tile_elements: int = 0
    num_host_buffers: int = 0
    host_buffer_bytes: int = 0


def rooms(model: ModelSpec, options: PlanOptions, num_workers: int) -> Iterator[HostRoom]:
    """Yield what there may be room for, the most first: for each worker a buffer each way, and large tiles."""
    if options.home != "disk":
        yield HostRoom()
        return
    sizing = Sizing(model, options)
    least = sizing.least()
    for knobs in (*reversed(list(sizing.larger_tiles(least))), least):
        for count in dict.fromkeys((2 * num_workers, LEAST_HOST_BUFFERS)):
            yield HostRoom(
                tile_elements=knobs.tile_elements,
                num_host_buffers=count,
                host_buffer_bytes=sizing.host_buffer_bytes,
            )


def in_room(model: ModelSpec, layout: StepLayout, options: PlanOptions, room: HostRoom) -> StepLayout:
    """Return ``layout`` over the home of ``options``, with the tiles and buffers of ``room``."""
    share_elements = layout.own_elements or tuple(unit.numel for unit in model.units)
    tiles = tuple(
        -(-share_elements[unit.index] // room.tile_elements) if room.tile_elements and unit.trainable else 0
        for unit in model.units
    )
    return replace(
        layout,
        tiles=tiles,
        num_tile_buffers=NUM_TILE_BUFFERS if any(tiles) else 0,
        num_host_buffers=room.num_host_buffers,
        staged=room.num_host_buffers > 0,
        tiles_on_disk=options.home == "disk",
        commits=options.commits and options.home == "disk",
    )


def state_of(model: ModelSpec, options: PlanOptions) -> StateLayout:
    """Return how a trained unit lies at home; gradients are summed there from round to round."""
    return options.state or StateLayout(dtype=model.dtype)


_EXTENT_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Counts the memory of stages.

    Attributes:
        model: its units.
        demand: of a microbatch.
        options: what is decided.
        stays: units whose weights stay on each worker.
    """

    model: ModelSpec
    demand: Demand
    options: PlanOptions
    stays: frozenset[int] = frozenset()

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of the weights of each streamed unit; 0 of one that stays, which takes no slot that units share."""
        streamed = self.model.units[: self.model.num_streamed]
        return tuple(
            unit.weight_bytes(self.model.dtype) * (unit.index not in self.stays) for unit in streamed
        )

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of the gradient of each streamed unit."""
        return tuple(
            unit.gradient_bytes * unit.trainable for unit in self.model.units[: self.model.num_streamed]
        )

    @cached_property
    def boundary_bytes(self) -> int:
        """Bytes of the largest input of a unit."""
        return max(self.demand.boundary_bytes)

    @cached_property
    def constant(self) -> dict[str, int]:
        """Bytes by class that lie on a worker whatever its stages."""
        model, demand = self.model, self.demand
        rest = model.units[model.num_streamed :]
        resident = (unit.weight_bytes(model.dtype) + unit.gradient_bytes * unit.trainable for unit in rest)
        staying = (model.units[unit].weight_bytes(model.dtype) for unit in self.stays)
        return {
            PRODUCTS: products_bytes(model, state_of(model, self.options), demand),
            "resident": sum(resident) + sum(staying),
            "fixed": demand.fixed_bytes,
            "codecs": device_bytes(self.options.transport, model, demand.boundary_bytes),
        }

    @cached_property
    def _top(self) -> int:
        return self.model.num_streamed

    @cached_property
    def _workspaces(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        kinds = [unit.kind for unit in self.model.units[: self.model.num_streamed]]
        by_kind = self.demand.forward_workspace_bytes, self.demand.backward_workspace_bytes
        forward, backward = (tuple(sizes.get(kind, 0) for kind in kinds) for sizes in by_kind)
        return forward, backward

    def workspace_bytes(self, span: Span, backward: bool, keeps: bool) -> int:
        """Return what the units of a stage allocate while they run.

        Those of a backward stage keep their graphs. The stage that turns around recomputes its units one by one, where
        it recomputes them.
        """
        forward, both = (sizes[slice(*span)] for sizes in self._workspaces)
        if not backward:
            return max(forward)
        return max(*forward, *both) if span[1] == self._top and not keeps else sum(both)

    def on_device(self, keeps: bool, away: Away) -> Callable[[Stages], dict[str, int]]:
        """Return what says the bytes on each worker by class, arrivals from other workers apart, of stages.

        A search asks it about thousands of stages of the same spans.

        Args:
            keeps: whether the stage that turns around keeps what its forwards make.
            away: what leaves of what other forwards keep.
        """

        @cache
        def needs(span: Span, backward: bool) -> tuple[int, int, int]:
            leaves = away and not (backward and span[1] == self._top)
            leaving = on_its_way(span, backward, away, self.demand.kept_bytes) if leaves else 0
            return span[1] - span[0], leaving, self.workspace_bytes(span, backward, keeps)

        def by_class(stages: Stages) -> dict[str, int]:
            spans = [needs(span, False) for span in stages.forward]
            spans += [needs(span, True) for span in stages.backward]
            deepest, leaving, workspace = map(max, zip(*spans, strict=True))
            return {
                "weight slots": sum(slots_for(stages, self.weights)),
                "gradient accumulators": sum(slots_for(stages, self.gradients, only_backward=True)),
                "activations": activation_bytes(deepest, self.boundary_bytes) + leaving,
                "workspace": workspace,
                "shared": self.demand.shared_bytes
                * min((1 + stages.overlaps) * stages.round_size, self.options.microbatches),
                **self.constant,
            }

        return by_class

    def table(self, layout: StepLayout, room: HostRoom) -> dict[str, dict[str, int]]:
        """Return bytes by tier and class; the device's are those of each worker.

        Args:
            layout: of stages, in ``room``.
            room: that host memory gives a home on disk.
        """
        stages = layout.stages
        assert stages is not None
        keeps = any(layout.keeps_anything(unit) for unit in layout.keepable)
        waiting = offload_rooms(layout, self.demand) if layout.kept else {}
        table = {
            "device": {
                **self.on_device(keeps, away_in(layout))(stages),
                ARRIVALS: arrival_bytes(layout, self.boundary_bytes),
            },
            "host": {
                "encoded weights": host_bytes(self.options.transport, self.model, layout.num_workers),
                "saved activations": num_handed_over(layout)
                * align_up(max(1, self.boundary_bytes), _EXTENT_BYTES),
                "offloaded activations": sum(count * size for count, size in waiting.values()),
            },
            "disk": {},
        }
        for tier, classes in self._below(layout, room).items():
            table[tier] |= classes
        return {tier: {name: size for name, size in sizes.items() if size} for tier, sizes in table.items()}

    def _below(self, layout: StepLayout, room: HostRoom) -> dict[str, dict[str, int]]:
        """Return what lies below the workers whatever their stages: the home, and what stands before it."""
        if room not in self._homes:
            self._homes[room] = bytes_below(
                self.model,
                layout,
                home=self.options.home,
                tile_elements=room.tile_elements,
                host_buffer_bytes=room.host_buffer_bytes,
                transport=self.options.transport,
                wire=self.options.wire,
                state=self.options.state,
            )
        return self._homes[room]

    @cached_property
    def _homes(self) -> dict[HostRoom, dict[str, dict[str, int]]]:
        return {}
