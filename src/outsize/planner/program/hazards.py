"""Resources that ops read and write, and which earlier ops an op must wait for, over successive programs.

The rows of `planner.program.table` are interpreted: an op waits for the last writer of what it reads, and for the last
writer and the readers since of what it writes.

The input of unit u exists only once F u.m ran, since the model's forward of microbatch m is a coroutine that F u.m
resumes; so F writes the act of its unit and of the next one.

A COMMIT speaks of a whole step, its WRITEs and what the optimizer counts. So it waits for all of them, and the STEPs of
the next step wait for it, by when that step's forward and backward have given it time.

Two more rules keep what is live on the device as small as the program says, however far the lanes run apart: an F waits
for all SAVEs of its worker but the last `SAVE_WINDOW` - 1 and those behind the F, FB, R or B before it there, which
cannot have ended yet; and a FETCH waits for all SAVEs of its worker and for the F, FB or B before it there. An OFFLOAD
and a SEND count as a SAVE, an ONLOAD and a RECV as a FETCH. So do a PASS and a RETURN count as a SAVE of the worker
that they leave, but are counted by themselves: they have lanes of their own, and wait for a place where they go, which
nothing else takes.

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

from outsize.planner.program.program import Op
from outsize.planner.program.table import (
    ACTIVATIONS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    ROW_OF,
    Form,
    LaneKind,
    Resource,
)

# What is read for ever and never written (the home of a frozen unit) must not grow a list for ever: a reader
# that finds this many others waits for them and stands for them. They are older by more programs than are
# ever in flight.
_MAX_READERS = 64

Deps = set[int]


class Cell:
    """Last writer of a resource and its readers since.

    Ops are known by their sequence numbers; -1 is nobody.
    """

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read; adds to ``deps`` what it must wait for, as all these methods do."""
        if self.writer >= 0:
            deps.add(self.writer)
        if len(self.readers) >= _MAX_READERS:
            deps.update(self.readers)
            self.readers.clear()
        self.readers.append(seq)

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write, or read and write."""
        if self.readers:  # each of which waited for the writer
            deps.update(self.readers)
            self.readers.clear()
        elif self.writer >= 0:
            deps.add(self.writer)
        self.writer = seq


class Signal(Cell):
    """What says something only once somebody has written it; until then nobody has read it either."""

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read."""
        if self.writer >= 0:
            super().read(seq, deps)


class Remembered(Cell):
    """What a checkpoint keeps: its writers wait for the last reader, and for nothing else."""

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read."""
        self.readers = [seq]

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write."""
        deps.update(self.readers)


class HomeResource:
    """A unit's weights and optimizer state at rest: read whole or by tile, written whole or by tile.

    A whole reader that follows a write stands for the whole readers before that write: it waits for all
    writers, and each of those waited for them.
    """

    __slots__ = ("tiles", "whole", "written")

    def __init__(self) -> None:
        self.whole = Cell()
        self.tiles: dict[int, _Tile] = {}
        self.written = False

    @property
    def writer(self) -> int:
        """The last op that has written all of it."""
        return self.whole.writer

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read all tiles."""
        deps.update([cell.writer for cell in self.tiles.values()])
        if self.written:
            self.whole.readers.clear()
            self.written = False
        self.whole.read(seq, deps)

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write all tiles."""
        for cell in self.tiles.values():
            deps.update(cell.readers or (cell.writer,))
        self.tiles.clear()
        self.whole.write(seq, deps)

    def tile(self, tile: int) -> "_Tile":
        """Return the resource that is one tile."""
        cell = self.tiles.get(tile)
        if cell is None:
            cell = self.tiles[tile] = _Tile(self)
        return cell


class _Tile(Cell):
    __slots__ = ("home",)

    def __init__(self, home: HomeResource) -> None:
        super().__init__()
        self.home = home

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read one tile."""
        if self.home.whole.writer >= 0:
            deps.add(self.home.whole.writer)
        super().read(seq, deps)

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write one tile."""
        whole_plane = self.home.whole
        deps.update(whole_plane.readers or (whole_plane.writer,))
        super().write(seq, deps)
        self.home.written = True


# Inputs on their way out while the next one is made: two, as in a double buffer.
SAVE_WINDOW = 2
# SAVEs to remember: at the end of a stage its last input, its output and what its last forward kept leave together, and
# one may be before them.
_NUM_SAVES = 4

_Key = tuple[str, int | None, int | None]
_Find = Callable[[Op], Cell | HomeResource | None]
_Hold = Callable[[Op], _Key]


class _Rule(NamedTuple):
    """A row, with the ways to find what it touches, and where it is held from then on, or no longer."""

    reads: tuple[_Find, ...]
    writes: tuple[_Find, ...]
    follows: tuple[_Find, ...]
    fills: tuple[tuple[_Hold, _Find], ...]
    empties: tuple[_Hold, ...]
    computes: bool
    is_forward: bool
    leaves_by: LaneKind | None


class _Cells(dict[_Key, Cell]):
    """Cells by what they are of; made when they are first asked for."""

    def __missing__(self, key: _Key) -> Cell:
        cell = self[key] = Cell()
        return cell


class Hazards:
    """Finds the dependencies of ops submitted one after the other, across steps.

    What it remembers is bounded by the number of resources, not by the number of ops.

    Args:
        num_streamed: units that the forward visits.
        rest: index of the resident unit, None where there is none.
        at_once: microbatches under way at once, at most; None is no limit.
    """

    def __init__(self, num_streamed: int, rest: int | None, *, at_once: int | None = None) -> None:
        self._seq = 0
        self._at_once = at_once
        self._computed: dict[int, int] = {}  # by microbatch modulo `at_once`
        self._rest = rest
        units = range(num_streamed + (rest is not None))
        self._homes: dict[int | None, HomeResource] = {unit: HomeResource() for unit in units}
        self._norms: dict[int | None, Cell] = {unit: Cell() for unit in units}
        self._summed: dict[int | None, Cell] = {unit: Cell() for unit in units}
        self._counts: dict[int | None, Cell] = {unit: Remembered() for unit in units}
        self._coefficient, self._committed = Signal(), Signal()
        self._cells = _Cells()
        # Slots and accumulators by worker and unit, places by unit and microbatch of what lies in them.
        self._holding: dict[_Key, Cell | HomeResource | None] = {}
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
        seq, holding = self._seq, self._holding
        reads, writes, follows, fills, empties, computes, is_forward, leaves_by = self._rules[
            op.kind, op.tile is not None, op.buffer is not None
        ]
        if is_forward:
            self._bound_forward(op, deps)
        for find in reads:
            cell = find(op)
            if cell is not None:
                cell.read(seq, deps)
        for find in writes:
            cell = find(op)
            if cell is not None:
                cell.write(seq, deps)
        for find in follows:
            cell = find(op)
            if cell is not None:
                deps.add(cell.writer)
        for hold, find in fills:
            holding[hold(op)] = find(op)
        for hold in empties:
            holding.pop(hold(op), None)
        if computes:
            self._last_compute[op.worker] = seq
            if self._at_once:
                self._computed[(op.microbatch or 0) % self._at_once] = seq
        elif leaves_by is not None:
            self._bound_activation(op, leaves_by, seq, deps)
        self._seq += 1
        deps.discard(-1)
        return tuple(sorted(deps))

    def _ruled(self) -> dict[Form, _Rule]:
        finders, holders = self._finders(), self._holders()

        def every(names: Iterable[Resource]) -> tuple[_Find, ...]:
            return tuple(find for name in names for find in finders[name])

        rules = {}
        for form, row in ROW_OF.items():
            reads = every(name for name in row.reads if name != "home")
            in_place = {"place": row.carries or "input"}  # what comes to lie there
            rules[form] = _Rule(
                (self._read_home, *reads) if "home" in row.reads else reads,
                every((*row.writes, *row.fills)),
                every(row.after),
                tuple((holders[in_place.get(name, name)], finders[name][0]) for name in row.fills),
                tuple(holders[name] for name in row.empties),
                computes=row.kind in COMPUTE_KINDS,
                is_forward=row.kind in FORWARD_KINDS,
                leaves_by=row.lane if row.carries in ACTIVATIONS else None,
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

    def _bound_activation(self, op: Op, lane: LaneKind, seq: int, deps: Deps) -> None:
        if lane != "up":
            self._saves[op.worker, lane == "peer"].append(seq)
            return
        deps.add(self._last_compute.get(op.worker, -1))
        # Lanes are in order: what left before these is done as well.
        for leaves in (False, True):
            deps.update(self._saves[op.worker, leaves])

    def _finders(self) -> dict[Resource, tuple[_Find, ...]]:
        """Return how the cells of each resource are found; a way returns None of what is nowhere."""
        cells, get, rest = self._cells, self._holding.get, self._rest

        def held(name: str) -> tuple[_Find, ...]:
            """Return the way to what ``name`` has of an op's unit, and of the rest."""
            finds: tuple[_Find, ...] = (
                lambda op: get((name, op.worker, op.unit)),
                lambda op: get((name, op.worker, rest)),
            )
            return finds if rest is not None else finds[:1]

        def fixed(cells: Iterable[Cell | HomeResource]) -> tuple[_Find, ...]:
            return tuple((lambda op, cell=cell: cell) for cell in cells)

        return {
            "home": (self._home,),
            "homes": fixed(self._homes.values()),
            "in place": (self._in_place,),
            "slot": (lambda op: cells["slot", op.worker, op.slot],),
            "weights": held("slot"),
            "buffer": (lambda op: cells["buffer", op.tile is not None, op.buffer],),
            "input": (lambda op: cells["input", op.unit, op.microbatch],),
            "next input": (lambda op: cells["input", (op.unit or 0) + 1, op.microbatch],),
            "gradient": (lambda op: cells["gradient", op.unit, op.microbatch],),
            "next gradient": (lambda op: cells["gradient", (op.unit or 0) + 1, op.microbatch],),
            "place": (lambda op: cells["place", op.target, op.slot],),
            "input place": (lambda op: get(("input", op.unit, op.microbatch)),),
            "next gradient place": (lambda op: get(("input gradient", (op.unit or 0) + 1, op.microbatch)),),
            "accumulator": (lambda op: cells["accumulator", op.worker, op.slot],),
            "sum": held("accumulator")[:1],
            "sums": held("accumulator"),
            "summed": (lambda op: self._summed[op.unit],),
            "norm": (lambda op: self._norms[op.unit],),
            "norms": fixed(self._norms.values()),
            "coefficient": fixed((self._coefficient,)),
            "committed": fixed((self._committed,)),
            "count": (lambda op: self._counts[op.unit],),
        }

    @staticmethod
    def _holders() -> dict[str, _Hold]:
        """Return by what the slot, accumulator or place is found that has something of an op's unit."""
        by_unit: dict[str, _Hold] = {
            "slot": lambda op: ("slot", op.worker, op.unit),
            "accumulator": lambda op: ("accumulator", op.worker, op.unit),
            "input": lambda op: ("input", op.unit, op.microbatch),
            "input gradient": lambda op: ("input gradient", op.unit, op.microbatch),
            "next gradient place": lambda op: ("input gradient", (op.unit or 0) + 1, op.microbatch),
        }
        return by_unit | {"sum": by_unit["accumulator"], "input place": by_unit["input"]}

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
