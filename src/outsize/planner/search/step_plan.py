"""The plan of a run: what is set aside where, the program of a step, and what it moves.

The search starts from the plan that needs the least memory. If that does not fit, no plan does. Otherwise
memory to spare is spent where it brings the most (`planner.search.upgrades`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from outsize.codecs.transport import EXACT, Transport, Wire
from outsize.errors import InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import (
    Demand,
    Tier,
    by_class,
    bytes_below,
    memory_table,
    offload_rooms,
    products_bytes,
    resident_state_bytes,
    store_buffer_bytes,
    update_workspace_bytes,
)
from outsize.planner.memory.step_bytes import Live, device_bytes, host_bytes
from outsize.planner.memory.traffic import OpBytes, Traffic
from outsize.planner.passes.cycle import cycle_peak
from outsize.planner.passes.slots import limits_of, rewritten
from outsize.planner.passes.step_parts import build_step, successive_steps
from outsize.planner.program.program import Program, render
from outsize.planner.program.stages import Choice, Extent, Kept
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.microbatch_search import what_to_try
from outsize.planner.search.sizing import Knobs, PlanOptions, Sizing
from outsize.planner.search.upgrades import as_asked, kept_for_the_host, spend
from outsize.units import format_bytes

__all__ = ["Budgets", "Demand", "Plan", "PlanOptions", "Traffic", "plan_step"]

Table = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Most bytes that each tier may hold; None is no limit.

    Attributes:
        device: memory of the device.
        host: host memory.
        disk: disk space.
    """

    device: int
    host: int | None = None
    disk: int | None = None

    def short_by(self, memory: Table) -> dict[str, int]:
        """Return the bytes that ``memory``, by tier and class, takes too many, in each tier that is too small."""
        limits = {"device": self.device, "host": self.host, "disk": self.disk}
        totals = {tier: sum(classes.values()) for tier, classes in memory.items()}
        return {
            tier: total - limit
            for tier, total in totals.items()
            if (limit := limits[tier]) is not None and total > limit
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run sets aside and does.

    Attributes:
        model: that is trained.
        demand: of a microbatch.
        home: where weights and optimizer state rest.
        below: the tier next to the device.
        layout: the step before it is put in order; slots, accumulators, prefetch depth, offloaded units.
        host_buffer_bytes: size of a host buffer for whole units; 0 where there are none.
        tile_elements: elements per tile of the optimizer step; 0 where units step whole.
        tile_buffer_bytes: size of a tile buffer.
        store_buffer_bytes: what units of a disk home pass through on their way to a checkpoint; 0 for a host home.
        memory: bytes by tier and class.
        budgets: what they had to fit.
        transport: codecs on the link.
        offload_rooms: what waits below the device of what forwards kept, see `memory_table.offload_rooms`.
        wire: codecs between nodes.
        state: how a trained unit lies at home.
        home_parts: bytes of the home by what they are: weights, master weights, optimizer state, gradients.
        heap: whether the device has `Demand.spare_bytes` besides.
        user_programs: of the user's own, that steps follow by turns; empty for those of the layout.
    """

    model: ModelSpec = field(repr=False)
    demand: Demand = field(repr=False, compare=False)  # seconds of it are measured, and another time others
    home: Tier
    below: Tier
    layout: StepLayout
    host_buffer_bytes: int
    tile_elements: int
    tile_buffer_bytes: int
    store_buffer_bytes: int
    memory: Table
    budgets: Budgets
    state: StateLayout
    transport: Transport = field(default_factory=Transport)
    wire: Wire = EXACT
    home_parts: Mapping[str, int] = field(default_factory=dict)
    offload_rooms: Mapping[Extent, tuple[int, int]] = field(default_factory=dict)
    heap: bool = True
    user_programs: tuple[Program, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        demand: Demand,
        options: PlanOptions,
        layout: StepLayout,
        *,
        state: StateLayout,
        tile_elements: int,
        host_buffer_bytes: int,
        memory: Table,
        budgets: Budgets,
    ) -> "Plan":
        """Return the plan of ``layout``, with the sizes that follow from it."""
        return cls(
            model=model,
            demand=demand,
            home=options.home,
            below=options.below,
            layout=layout,
            host_buffer_bytes=host_buffer_bytes,
            tile_elements=tile_elements,
            tile_buffer_bytes=state.tile_bytes(model, tile_elements, with_state=layout.tiles_on_disk),
            store_buffer_bytes=store_buffer_bytes(model, options.home),
            memory=memory,
            budgets=budgets,
            transport=options.transport,
            offload_rooms=offload_rooms(layout, demand),
            wire=options.wire,
            state=state,
            home_parts=by_class(
                model,
                state,
                commits=layout.commits,
                share_elements=layout.own_elements,
                full_planes=layout.whole_planes,
                transport=options.transport,
                resident=layout.resident,
            ),
        )

    @cached_property
    def program(self) -> Program:
        """The ops of a step."""
        return self.user_programs[0] if self.user_programs else build_step(self.layout)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes that cross links in one step."""
        moved = OpBytes(
            model=self.model,
            layout=self.layout,
            boundary_bytes=self.demand.boundary_bytes,
            home=self.home,
            below=self.below,
            tile_elements=self.tile_elements,
            transport=self.transport,
            kept_bytes=self.demand.kept_bytes,
            state=self.state,
        )
        return moved.traffic(self.program)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that steps follow by turns, where each begins with the worker that the one before left free."""
        if self.user_programs or self.layout.stages is None:
            return self.user_programs or (self.program,)
        return _programs_of(self.layout)

    def walking(self, change: Callable[[str], str]) -> "Plan":
        """Return the plan with what ``change`` makes of the text of each of its programs in place of that.

        Raises:
            ProgramError: it breaks a rule, or holds more activations than the plan has room for; shows where.
        """
        room = self.memory, self.below, self.demand.boundary_bytes, self.demand.kept_bytes
        limits = limits_of(self.program, self.layout, *room)
        programs = tuple(
            rewritten(program, change, self.layout, limits, self.demand.rest_users)
            for program in self.programs
        )
        return replace(self, user_programs=programs)

    @property
    def plan_id(self) -> str:
        """The layout and the programs of a step as a hash, 16 hexadecimal digits.

        Budgets and bytes that a model was measured to need are left out: plans with one id compute and move the same.
        """
        facts = {**self._told(), "program": self._program_text}
        facts["kept"] = [list(choices) for choices in self.layout.kept]
        facts["peers"] = sorted(self.layout.peers)
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def own_slot_bytes(self) -> tuple[int, ...]:
        """Sizes of the slots of `StepLayout.own_slots`; what trains of a resident unit lies in its home instead."""
        layout, units, dtype = self.layout, self.model.units, self.model.dtype
        return tuple(
            layout.weight_bytes[unit] - units[unit].trained_bytes(dtype) * (unit in layout.resident)
            for unit in layout.own_slots
        )

    @property
    def own_accumulator_bytes(self) -> tuple[int, ...]:
        """Sizes of the accumulators of `StepLayout.own_accumulators`; what lies in its home needs none."""
        layout = self.layout
        at_home = layout.resident if layout.cut else frozenset()
        return tuple(layout.gradient_bytes[unit] * (unit not in at_home) for unit in layout.own_accumulators)

    def total_bytes(self, tier: str) -> int:
        """Return all bytes set aside in ``tier``: ``device``, ``host`` or ``disk``."""
        return sum(self.memory[tier].values())

    @property
    def table(self) -> str:
        """The memory and the traffic of a step as text."""
        lines = []
        for tier, classes in self.memory.items():
            budget = getattr(self.budgets, tier)
            limit = f" of {format_bytes(budget)}" if budget is not None else ""
            name = "each worker" if tier == "device" and self.layout.num_workers > 1 else tier
            lines.append(f"{name:<26}{format_bytes(self.total_bytes(tier)):>12}{limit}")
            for name, size in classes.items():
                lines.append(f"  {name:<24}{format_bytes(size):>12}")
                parts = self.home_parts if name == "home" else {}
                lines += [f"    {part:<22}{format_bytes(size):>12}" for part, size in parts.items()]
        lines.append("per step")
        moved = {name: size for name, size in asdict(self.traffic).items() if size or name != "across"}
        lines += [f"  {name:<24}{format_bytes(size):>12}" for name, size in moved.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in what JSON knows; the program is a list of op texts."""
        return {
            **self._told(),
            "budget_bytes": asdict(self.budgets),
            "memory_bytes": {tier: dict(classes) for tier, classes in self.memory.items()},
            "home_bytes": dict(self.home_parts),
            "bytes_per_step": asdict(self.traffic),
            "program": self._program_text,
        }

    @property
    def _program_text(self) -> list[str]:
        return render(self.program).splitlines()

    def _told(self) -> dict[str, Any]:
        """Return what does not follow from budgets, nor from bytes that were measured, without the program."""
        layout = self.layout
        return {
            "home": self.home,
            "below": self.below,
            "microbatches": layout.num_microbatches,
            "round_microbatches": layout.round_size,
            "workers": layout.num_workers,
            "stages": asdict(layout.stages) if layout.stages is not None else None,
            "clip": "global" if layout.clip else "unit" if layout.unit_clip else "none",
            "state": asdict(self.state),
            "prefetch_depth": layout.prefetch_depth,
            "slot_bytes": list(layout.slot_bytes),
            "accumulator_bytes": list(layout.accumulator_bytes),
            "own_slot_bytes": list(self.own_slot_bytes),
            "own_accumulator_bytes": list(self.own_accumulator_bytes),
            **({"resident": sorted(layout.resident)} if layout.resident else {}),
            **({"encoded": sorted(layout.encoded)} if layout.encoded else {}),
            "commits": layout.commits,
            "num_host_buffers": layout.num_host_buffers,
            "host_buffer_bytes": self.host_buffer_bytes,
            "num_tile_buffers": layout.num_tile_buffers,
            "tile_elements": self.tile_elements,
            "tile_buffer_bytes": self.tile_buffer_bytes,
            "store_buffer_bytes": self.store_buffer_bytes,
            "offload": sorted(layout.offload),
            "activations": [dict(Counter(choices)) for choices in layout.kept],
            "transport": asdict(self.transport),
            **({"nodes": layout.num_nodes, "wire": asdict(self.wire)} if layout.num_nodes > 1 else {}),
        }


@lru_cache(maxsize=4)
def _programs_of(layout: StepLayout) -> tuple[Program, ...]:
    return successive_steps(layout)


def plan_step(model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions) -> Plan:
    """Return the plan that makes the most of ``budgets``.

    Raises:
        InfeasiblePlanError: not even the least plan fits; says by how much, and what to try first.
    """
    sizing = Sizing(model, options)
    memory_of = _memory_of(sizing, demand)

    def short(knobs: Knobs) -> dict[str, int]:
        return budgets.short_by(memory_of(knobs))

    knobs = replace(sizing.least(), resident=sizing.named_resident())
    if options.activations != "auto":
        knobs = replace(knobs, kept=as_asked(Choice(options.activations), sizing.layout(knobs), demand))
    knobs = kept_for_the_host(sizing, knobs, short)
    short_by = short(knobs)
    if short_by:
        shortage = partial(shortage_of, model, demand, budgets)
        adapted = (unit for unit in model.units if any(".lora_" in tensor.name for tensor in unit.tensors))
        raw_bytes = sum(part.home_bytes for unit in adapted for part in unit.frozen if part.codec is None)
        raise InfeasiblePlanError(
            lambda: what_to_try(
                memory_of(knobs), short_by, options, sizing.state, shortage, demand.largest_kind, raw_bytes
            ),
            short_by,
        )
    knobs = spend(sizing, demand, knobs, lambda knobs: not short(knobs))
    return _make(sizing, demand, budgets, knobs, memory_of(knobs))


def shortage_of(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions
) -> Mapping[str, int]:
    """Return what the plan that needs the least memory lacks, in bytes by tier; makes no program of it."""
    sizing = Sizing(model, options)
    memory_of = _memory_of(sizing, demand)

    def short(knobs: Knobs) -> dict[str, int]:
        return budgets.short_by(memory_of(knobs))

    least = replace(sizing.least(), resident=sizing.named_resident())
    return short(kept_for_the_host(sizing, least, short))


def _memory_of(sizing: Sizing, demand: Demand) -> Callable[[Knobs], Table]:
    """Return what says how much memory knobs take, by tier and class."""
    options, model, kept_bytes = sizing.options, sizing.model, demand.kept_bytes
    codecs = (
        device_bytes(options.transport, model, demand.boundary_bytes),
        host_bytes(options.transport, model),
    )
    products = products_bytes(model, sizing.state, demand)
    state_bytes = cache(partial(resident_state_bytes, model, sizing.state))
    homes: dict[tuple[int | frozenset[int], ...], Table] = {}
    peaks: dict[tuple[int, int, Kept], Live] = {}

    @cache
    def memory_of(knobs: Knobs) -> Table:
        layout = sizing.layout(knobs)
        buffers = (knobs.tile_elements, knobs.num_tile_buffers, knobs.num_host_buffers, layout.resident)
        if buffers not in homes:
            homes[buffers] = bytes_below(
                model,
                layout,
                home=options.home,
                tile_elements=knobs.tile_elements,
                host_buffer_bytes=sizing.host_buffer_bytes,
                transport=options.transport,
                wire=options.wire,
                state=sizing.state,
            )
        staying = (knobs.num_kept, layout.prefetch_depth, knobs.kept)
        if staying not in peaks:
            peaks[staying] = cycle_peak(layout, demand.boundary_bytes, kept_bytes)
        updates = state_bytes(layout.resident), update_workspace_bytes(model, sizing.state, layout.resident)
        return memory_table(
            demand, layout, peaks[staying], homes[buffers], options.below, codecs, products, updates
        )

    return memory_of


def _make(sizing: Sizing, demand: Demand, budgets: Budgets, knobs: Knobs, memory: Table) -> Plan:
    return Plan.of(
        sizing.model,
        demand,
        sizing.options,
        sizing.layout(knobs),
        state=sizing.state,
        tile_elements=knobs.tile_elements,
        host_buffer_bytes=sizing.host_buffer_bytes,
        memory=memory,
        budgets=budgets,
    )
