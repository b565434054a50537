"""What stages of several workers take in each tier: what a run of them sets aside.

On each worker: slots and accumulators twice, so that one half fills while the other is used, or once where memory is
too tight for that (`stages.HALVES`); the rest beside them; inputs and gradients of two microbatches; what forwards
keep, where it leaves (`leaving`); workspace for all units of a backward stage, which are recomputed before the first
of them is differentiated. Below the workers: what stages hand over, and the home.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.memory.link_bytes import device_bytes, host_bytes
from outsize.planner.memory.memory_table import PRODUCTS, Demand, bytes_below, offload_rooms, products_bytes
from outsize.planner.program.stages import Span, Stages, slots_for
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_layout import ARRIVALS, activation_bytes, arrival_bytes, num_handed_over
from outsize.planner.search.stage_offload import Away, away_in, on_its_way
from outsize.planner.search.stage_room import HostRoom, state_of
from outsize.units import align_up

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
                "encoded weights": host_bytes(self.options.transport, self.model),
                "saved activations": num_handed_over(layout)
                * align_up(max(1, self.boundary_bytes), _EXTENT_BYTES),
                "offloaded activations": sum(count * size for count, size in waiting.values()),
            },
            "disk": {},
        }
        for tier, classes in self._below(layout, room).items():
            table[tier] |= classes
        return {tier: {name: size for name, size in found.items() if size} for tier, found in table.items()}

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
