"""Which earlier ops an op must wait for, over successive programs: the rows of `planner.program.table`, interpreted.

An op waits for the last writer of what it reads, and for the last writer and the readers since of what it
writes.

The input of unit u exists only once F u.m ran, since the model's forward of microbatch m is a coroutine that
F u.m resumes; so F writes the act of its unit and of the next one.

A COMMIT speaks of a whole step, its WRITEs and what the optimizer counts. So it waits for all of them, and the STEPs of
the next step wait for it, by when that step's forward and backward have given it time.

Two more rules keep what is live on the device as small as the program says, however far the lanes run apart:
an F waits for all SAVEs of its worker but the last `SAVE_WINDOW` - 1 and those behind the F, FB, R or B before it
there, which cannot have ended yet; and a FETCH waits for all SAVEs of its worker and for the F, FB or B before it
there. An OFFLOAD and a SEND count as a SAVE, an ONLOAD and a RECV as a FETCH. So do a PASS and a RETURN count as a SAVE
of the worker that they leave, but are counted by themselves: they have lanes of their own, and wait for a place where
they go, which nothing else takes.

A third keeps what stages hand over as small as the plan says: a microbatch begins, with F 0.m, when the one that is
`at_once` before it has had its last F, FB or B. Without it a worker that only ever runs the first stage would go on to
round after round.

Of several nodes each walks its own program, and all programs exchange the same things in the same order, lane by lane.
An AGREE waits for the COMMIT of the step before: behind it, all nodes have committed that step, and may overwrite the
one before it. A GATHER reads gradhome(u) too, since there lies what a STEP has changed, if that is what is sent.

"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from outsize.planner.program.ops import Op
from outsize.planner.program.resources import Cell, Deps, HomeResource, Remembered, Signal
from outsize.planner.program.table import (
    ACTIVATIONS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    ROW_OF,
    Form,
    OpRow,
    Resource,
)

# Inputs on their way out while the next one is made: two, as in a double buffer.
SAVE_WINDOW = 2
# SAVEs to remember: at the end of a stage its last input, its output and what its last forward kept leave together, and
# one may be before them.
_NUM_SAVES = 4

_Key = tuple[str, int | None, int | None]
_FindOne = Callable[[Op], Cell | HomeResource | None]
_FindAll = Callable[[Op], Iterable[Cell | HomeResource]]


class _Rule(NamedTuple):
    """A row, with the ways to find what it touches: of resources of which there is one, and of many."""

    row: OpRow
    reads: tuple[_FindOne, ...]
    reads_all: tuple[_FindAll, ...]
    writes: tuple[_FindOne, ...]
    writes_all: tuple[_FindAll, ...]
    follows: tuple[_FindOne, ...]
    computes: bool
    is_forward: bool
    binds: bool
    is_activation: bool


class Hazards:
    """Finds the dependencies of ops submitted one after the other, across steps.

    What it remembers is bounded by the number of resources, not by the number of ops.

    Args:
        num_streamed: units that the forward visits.
        rest: index of the resident unit, None where there is none.
        feedback: whether REDUCEs remember what their encodings lose.
        at_once: microbatches under way at once, at most; None is no limit.
    """

    def __init__(
        self, num_streamed: int, rest: int | None, *, feedback: bool = False, at_once: int | None = None
    ) -> None:
        self._seq = 0
        self._at_once = at_once
        self._computed: dict[int, int] = {}  # by microbatch modulo `at_once`
        self._rest = rest
        units = range(num_streamed + (rest is not None))
        self._homes: dict[int | None, HomeResource] = {unit: HomeResource() for unit in units}
        self._norms: dict[int | None, Cell] = {unit: Cell() for unit in units}
        self._summed: dict[int | None, Cell] = {unit: Cell() for unit in units}
        self._counts: dict[int | None, Cell] = {unit: Remembered() for unit in units}
        self._residuals: dict[int | None, Cell] = {unit: Remembered() for unit in units if feedback}
        self._coefficient, self._committed = Signal(), Signal()
        self._cells: dict[_Key, Cell] = {}
        # Slots and accumulators by worker and unit, places by unit and microbatch of what lies in them.
        self._holding: dict[_Key, Cell] = {}
        self._read_tiles: set[tuple[int | None, int | None]] = set()  # and not yet stepped
        # By worker, and whether they leave for another one's memory: a lane for each.
        self._saves: defaultdict[tuple[int | None, bool], deque[int]] = defaultdict(
            lambda: deque(maxlen=_NUM_SAVES)
        )
        self._last_compute: dict[int | None, int] = {}
        self._rules = self._ruled()

    def dependencies(self, op: Op) -> tuple[int, ...]:
        """Return the sequence numbers, ascending, of the ops that ``op`` must wait for; the first is 0."""
        deps: Deps = set()
        seq = self._seq
        row, reads, reads_all, writes, writes_all, follows, computes, is_forward, binds, is_activation = (
            self._rules[op.kind, op.tile is not None, op.buffer is not None]
        )
        if is_forward:
            self._bound_forward(op, deps)
        for find in reads:
            cell = find(op)
            if cell is not None:
                cell.read(seq, deps)
        for find_all in reads_all:
            for cell in find_all(op):
                cell.read(seq, deps)
        for find in writes:
            cell = find(op)
            if cell is not None:
                cell.write(seq, deps)
        for find_all in writes_all:
            for cell in find_all(op):
                cell.write(seq, deps)
        for find in follows:
            cell = find(op)
            if cell is not None:
                deps.add(cell.writer)
        if binds:
            self._bind(op, row)
        if computes:
            self._last_compute[op.worker] = seq
            if self._at_once:
                self._computed[(op.microbatch or 0) % self._at_once] = seq
        elif is_activation:
            self._bound_activation(op, row, seq, deps)
        self._seq += 1
        deps.discard(-1)
        return tuple(sorted(deps))

    def _bind(self, op: Op, row: OpRow) -> None:
        """Remember in which slot, accumulator or place something of a unit lies from now on, or no longer."""
        for name in row.fills:
            self._holding[self._holder(name, op, row)] = self._cells[name, *self._named(name, op)]
        for name in row.empties:
            self._holding.pop(self._holder(name, op, row), None)

    def _ruled(self) -> dict[Form, _Rule]:
        one, many = self._finders()

        def split(names: Iterable[Resource]) -> tuple[tuple[_FindOne, ...], tuple[_FindAll, ...]]:
            return tuple(one[n] for n in names if n in one), tuple(many[n] for n in names if n in many)

        rules = {}
        for form, row in ROW_OF.items():
            reads, reads_all = split(row.reads)
            if "home" in row.reads:
                reads = (
                    self._read_home,
                    *(one[name] for name in row.reads if name != "home" and name in one),
                )
            rules[form] = _Rule(
                row,
                reads,
                reads_all,
                *split((*row.writes, *row.fills)),
                split(row.after)[0],
                computes=row.kind in COMPUTE_KINDS,
                is_forward=row.kind in FORWARD_KINDS,
                binds=bool(row.fills or row.empties),
                is_activation=row.carries in ACTIVATIONS,
            )
        return rules

    def _bound_forward(self, op: Op, deps: Deps) -> None:
        before = self._last_compute.get(op.worker, -1)
        if self._at_once and op.unit == 0:
            deps.add(self._computed.get((op.microbatch or 0) % self._at_once, -1))
        for saves in (self._saves[op.worker, False], self._saves[op.worker, True]):
            # The lane is in order: those before the latest of them are done as well.
            for index in range(len(saves) - SAVE_WINDOW, -1, -1):
                if saves[index] < before:
                    deps.add(saves[index])
                    break

    def _bound_activation(self, op: Op, row: OpRow, seq: int, deps: Deps) -> None:
        if row.lane != "up":
            self._saves[op.worker, row.lane == "peer"].append(seq)
            return
        deps.add(self._last_compute.get(op.worker, -1))
        # Lanes are in order: what left before these is done as well.
        for leaves in (False, True):
            deps.update(self._saves[op.worker, leaves])

    def _finders(self) -> tuple[dict[Resource, _FindOne], dict[Resource, _FindAll]]:
        """Return how the cells of each resource are found; there is none of what is nowhere."""
        cell, get = self._cell, self._holding.get
        one: dict[Resource, _FindOne] = {
            "home": self._home,
            "in place": self._in_place,
            "slot": lambda op: cell("slot", op.worker, op.slot),
            "buffer": lambda op: cell("buffer", op.tile is not None, op.buffer),
            "input": lambda op: cell("input", op.unit, op.microbatch),
            "next input": lambda op: cell("input", (op.unit or 0) + 1, op.microbatch),
            "gradient": lambda op: cell("gradient", op.unit, op.microbatch),
            "next gradient": lambda op: cell("gradient", (op.unit or 0) + 1, op.microbatch),
            "place": lambda op: cell("place", op.target, op.slot),
            "input place": lambda op: get(("input", op.unit, op.microbatch)),
            "next gradient place": lambda op: get(("input gradient", (op.unit or 0) + 1, op.microbatch)),
            "accumulator": lambda op: cell("accumulator", op.worker, op.slot),
            "sum": lambda op: get(("accumulator", op.worker, op.unit)),
            "summed": lambda op: self._summed[op.unit],
            "norm": lambda op: self._norms[op.unit],
            "coefficient": lambda op: self._coefficient,
            "committed": lambda op: self._committed,
            "count": lambda op: self._counts[op.unit],
            "residual": lambda op: self._residuals.get(op.unit),
        }
        many: dict[Resource, _FindAll] = {
            "homes": lambda op: self._homes.values(),
            "weights": lambda op: self._with_rest("slot", op),
            "sums": lambda op: self._with_rest("accumulator", op),
            "norms": lambda op: self._norms.values(),
        }
        return one, many

    def _cell(self, name: str, major: int | None, minor: int | None) -> Cell:
        key = (name, major, minor)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell()
        return cell

    def _named(self, name: Resource, op: Op) -> tuple[int | None, int | None]:
        """Return the place that ``op`` names: buffers of tiles are others than those of units."""
        if name == "buffer":
            return int(op.tile is not None), op.buffer
        return op.target if name == "place" else op.worker, op.slot

    def _holder(self, name: Resource, op: Op, row: OpRow | None = None) -> _Key:
        """Return by what the slot, accumulator or place is found that has something of ``op``'s unit."""
        if name == "slot":
            return "slot", op.worker, op.unit
        if name in ("accumulator", "sum"):
            return "accumulator", op.worker, op.unit
        if name == "next gradient place":
            return "input gradient", (op.unit or 0) + 1, op.microbatch
        content = row.carries if row is not None and name == "place" else None
        return content or "input", op.unit, op.microbatch

    def _with_rest(self, name: str, op: Op) -> list[Cell]:
        units = (op.unit,) if self._rest is None else (op.unit, self._rest)
        cells = [self._holding.get((name, op.worker, unit)) for unit in units]
        return [cell for cell in cells if cell is not None]

    def _home(self, op: Op) -> Cell | HomeResource:
        home = self._homes[op.unit]
        return home if op.tile is None else home.tile(op.tile)

    def _read_home(self, op: Op) -> Cell | HomeResource:
        if op.tile is not None:
            self._read_tiles.add((op.unit, op.tile))
        return self._home(op)

    def _in_place(self, op: Op) -> Cell | None:
        tile = (op.unit, op.tile)
        if tile in self._read_tiles:
            self._read_tiles.remove(tile)
            return None
        return self._homes[op.unit].tile(op.tile or 0)
