"""Which earlier ops an op must wait for, over successive programs: the rules of data, in one table.

An op waits for the last writer of what it reads, and for the last writer and the readers since of what it
writes.

==============  ===============================================  =============================================
resource        read by                                          written by
==============  ===============================================  =============================================
home(u, tile)   LOAD, STORE u, READ u>h: all; READ u#p: tile p;  STEP, GATHER u: all tiles; WRITE u#p: tile p;
                COMMIT: all tiles of all units                   STEP u#p that no READ u#p came before: tile p
slot(w, s)      F, FB, R, B of the unit in it; the rest's: all      LOAD, FREE
host buffer h   LOAD u<h, WRITE u<h                              READ u>h, GRAD u>h, REDUCE u<h
act(u, m)       -                                                F, FB, R, B, SAVE, FETCH, OFFLOAD, ONLOAD,
                                                                 PASS u.m; F (u-1).m
dact(u, m)      B (u-1).m                                        B, FB, SEND, RECV, RETURN u.m
place(w, p)     of what PASS u.m has put there: F, FB, B, SAVE   PASS, RETURN
                u.m; of what RETURN u.m has: B (u-1).m
acc(w, a)       NORM u                                           ACC, SUM, GRAD, FB, B u; the rest's: all FB, B
norm(u)         CLIP, AGREE                                      NORM u, REDUCE u
coef            STEP                                             CLIP, AGREE
gradhome(u)     STEP u, READ u#p, ACC u, SUM u, GATHER u         GRAD u, WRITE u<h, REDUCE u
tile buffer t   WRITE u#p<t                                      READ u#p>t, GRAD u#p>t, STEP u#p@t
commit          STEP, AGREE                                      COMMIT
==============  ===============================================  =============================================

FA, FP and FK are Fs: what they keep is part of act(u, m).

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

A STORE keeps how often its unit has been stepped as well, and a STEP counts: so a STEP u#p waits for the last STORE u.
Where encodings of gradients have what they lost added the next time, a STORE keeps that too, and a REDUCE changes it:
then a REDUCE u waits for the last STORE u.
"""

from collections import defaultdict, deque
from collections.abc import Callable

from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.resources import Cell, Deps, HomeResource

# Inputs on their way out while the next one is made: two, as in a double buffer.
SAVE_WINDOW = 2
# SAVEs to remember: at the end of a stage its last input, its output and what its last forward kept leave together, and
# one may be before them.
_NUM_SAVES = 4

_Key = tuple[str, int | None, int | None]


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
        self._feedback = feedback
        self._rest = rest
        units = range(num_streamed + (rest is not None))
        self._homes: dict[int | None, HomeResource] = {unit: HomeResource() for unit in units}
        self._gradient_homes: dict[int | None, Cell] = {unit: Cell() for unit in units}
        self._norms: dict[int | None, Cell] = {unit: Cell() for unit in units}
        self._coefficient = Cell()
        self._committed = Cell()
        self._cells: dict[_Key, Cell] = {}
        self._slot_of: dict[tuple[int | None, int | None], Cell] = {}
        self._accumulator_of: dict[tuple[int | None, int | None], Cell] = {}
        # By worker, and whether they leave for another one's memory: a lane for each.
        self._saves: defaultdict[tuple[int | None, bool], deque[int]] = defaultdict(
            lambda: deque(maxlen=_NUM_SAVES)
        )
        self._place_of: dict[_Key, Cell] = {}
        self._stores: dict[int | None, int] = {}
        self._read_tiles: set[tuple[int | None, int]] = set()  # and not yet stepped
        self._last_compute: dict[int | None, int] = {}
        self._rules: dict[Kind, Callable[[Op, int, Deps], None]] = {
            Kind.LOAD: self._load,
            Kind.FREE: self._free,
            Kind.ACC: self._acc,
            Kind.FORWARD: self._forward,
            Kind.FORWARD_ATTENTION: self._forward,
            Kind.FORWARD_PRODUCTS: self._forward,
            Kind.FORWARD_KEEP: self._forward,
            Kind.FORWARD_BACKWARD: self._forward_backward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.SAVE: self._save,
            Kind.FETCH: self._fetch,
            Kind.OFFLOAD: self._save,
            Kind.ONLOAD: self._fetch,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.PASS: self._pass,
            Kind.RETURN: self._return,
            Kind.SUM: self._sum,
            Kind.NORM: self._norm,
            Kind.GRAD: self._grad,
            Kind.CLIP: self._clip,
            Kind.REDUCE: self._reduce,
            Kind.AGREE: self._agree,
            Kind.GATHER: self._gather,
            Kind.READ: self._read,
            Kind.STEP: self._step,
            Kind.WRITE: self._write,
            Kind.STORE: self._store,
            Kind.COMMIT: self._commit,
        }

    def dependencies(self, op: Op) -> tuple[int, ...]:
        """Return the sequence numbers, ascending, of the ops that ``op`` must wait for; the first is 0."""
        deps: Deps = set()
        self._rules[op.kind](op, self._seq, deps)
        self._seq += 1
        deps.discard(-1)
        return tuple(sorted(deps))

    def _cell(self, name: str, major: int | None, minor: int | None) -> Cell:
        key = (name, major, minor)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell()
        return cell

    def _load(self, op: Op, seq: int, deps: Deps) -> None:
        slot = self._cell("slot", op.worker, op.slot)
        slot.write(seq, deps)
        self._slot_of[op.worker, op.unit] = slot
        if op.buffer is None:
            self._homes[op.unit].read_all(seq, deps)
        else:
            self._cell("host", 0, op.buffer).read(seq, deps)

    def _free(self, op: Op, seq: int, deps: Deps) -> None:
        self._cell("slot", op.worker, op.slot).write(seq, deps)
        self._slot_of.pop((op.worker, op.unit), None)

    def _acc(self, op: Op, seq: int, deps: Deps) -> None:
        # A unit's sum ends before the next one begins, elsewhere.
        deps.add(self._gradient_homes[op.unit].writer)
        accumulator = self._cell("acc", op.worker, op.slot)
        accumulator.write(seq, deps)
        self._accumulator_of[op.worker, op.unit] = accumulator

    def _compute(self, op: Op, seq: int, deps: Deps, accumulates: bool) -> None:
        """Apply what F, FB and B have in common: weights of the unit and of the rest, gradients of both."""
        worker, unit, rest = op.worker, op.unit, self._rest
        for which in (unit,) if rest is None else (unit, rest):
            slot = self._slot_of.get((worker, which))
            if slot is not None:
                slot.read(seq, deps)
            accumulator = self._accumulator_of.get((worker, which)) if accumulates else None
            if accumulator is not None:
                accumulator.write(seq, deps)
        self._cell("act", unit, op.microbatch).write(seq, deps)
        self._use_place("act", unit, op.microbatch, seq, deps)
        self._last_compute[worker] = seq
        if self._at_once:
            self._computed[(op.microbatch or 0) % self._at_once] = seq

    def _forward(self, op: Op, seq: int, deps: Deps) -> None:
        before = self._last_compute.get(op.worker, -1)
        if self._at_once and op.unit == 0:
            deps.add(self._computed.get((op.microbatch or 0) % self._at_once, -1))
        self._compute(op, seq, deps, accumulates=False)
        self._cell("act", (op.unit or 0) + 1, op.microbatch).write(seq, deps)
        for saves in (self._saves[op.worker, False], self._saves[op.worker, True]):
            # The lane is in order: those before the latest of them are done as well.
            for index in range(len(saves) - SAVE_WINDOW, -1, -1):
                if saves[index] < before:
                    deps.add(saves[index])
                    break

    def _forward_backward(self, op: Op, seq: int, deps: Deps) -> None:
        self._compute(op, seq, deps, accumulates=True)
        self._leave_place("act", op.unit, op.microbatch)
        self._cell("dact", op.unit, op.microbatch).write(seq, deps)

    def _recompute(self, op: Op, seq: int, deps: Deps) -> None:
        self._compute(op, seq, deps, accumulates=False)

    def _backward(self, op: Op, seq: int, deps: Deps) -> None:
        self._forward_backward(op, seq, deps)
        after = (op.unit or 0) + 1
        self._cell("dact", after, op.microbatch).read(seq, deps)
        self._use_place("dact", after, op.microbatch, seq, deps)
        self._leave_place("dact", after, op.microbatch)

    def _save(self, op: Op, seq: int, deps: Deps) -> None:
        self._cell("act", op.unit, op.microbatch).write(seq, deps)
        self._use_place("act", op.unit, op.microbatch, seq, deps)
        self._leave_place("act", op.unit, op.microbatch)
        self._saves[op.worker, False].append(seq)

    def _fetch(self, op: Op, seq: int, deps: Deps) -> None:
        self._cell("act", op.unit, op.microbatch).write(seq, deps)
        # What no backward needs has stayed where it arrived.
        self._leave_place("act", op.unit, op.microbatch)
        self._make_room(op, deps)

    def _make_room(self, op: Op, deps: Deps) -> None:
        deps.add(self._last_compute.get(op.worker, -1))
        # Lanes are in order: what left before these is done as well.
        for leaves in (False, True):
            deps.update(self._saves[op.worker, leaves])

    def _send(self, op: Op, seq: int, deps: Deps) -> None:
        self._cell("dact", op.unit, op.microbatch).write(seq, deps)
        self._saves[op.worker, False].append(seq)

    def _receive(self, op: Op, seq: int, deps: Deps) -> None:
        self._cell("dact", op.unit, op.microbatch).write(seq, deps)
        self._make_room(op, deps)

    def _pass(self, op: Op, seq: int, deps: Deps) -> None:
        self._cross("act", op, seq, deps)

    def _return(self, op: Op, seq: int, deps: Deps) -> None:
        self._cross("dact", op, seq, deps)

    def _cross(self, name: str, op: Op, seq: int, deps: Deps) -> None:
        """Let something leave for a place of another worker, once what lay there before has been used."""
        self._cell(name, op.unit, op.microbatch).write(seq, deps)
        place = self._cell("place", op.target, op.slot)
        place.write(seq, deps)
        self._place_of[name, op.unit, op.microbatch] = place
        self._saves[op.worker, True].append(seq)

    def _use_place(self, name: str, unit: int | None, microbatch: int | None, seq: int, deps: Deps) -> None:
        """Let op ``seq`` use what lies in a place, if it does."""
        place = self._place_of.get((name, unit, microbatch))
        if place is not None:
            place.read(seq, deps)

    def _leave_place(self, name: str, unit: int | None, microbatch: int | None) -> None:
        """Know what is used no more in its place, or never was in one."""
        self._place_of.pop((name, unit, microbatch), None)

    def _sum(self, op: Op, seq: int, deps: Deps) -> None:
        self._acc(op, seq, deps)

    def _norm(self, op: Op, seq: int, deps: Deps) -> None:
        accumulator = self._accumulator_of.get((op.worker, op.unit))
        if accumulator is not None:
            accumulator.read(seq, deps)
        self._norms[op.unit].write(seq, deps)

    def _grad(self, op: Op, seq: int, deps: Deps) -> None:
        key = (op.worker, op.unit)
        # The accumulator of a unit that leaves in tiles is the next unit's from that one's ACC on.
        accumulator = (
            self._accumulator_of.get(key) if op.tile is not None else self._accumulator_of.pop(key, None)
        )
        if accumulator is not None:
            accumulator.write(seq, deps)
        if op.tile is not None:
            self._cell("tile", 0, op.buffer).write(seq, deps)
        elif op.buffer is None:
            self._gradient_homes[op.unit].write(seq, deps)
        else:
            self._cell("host", 0, op.buffer).write(seq, deps)

    def _clip(self, op: Op, seq: int, deps: Deps) -> None:
        for norm in self._norms.values():
            norm.read(seq, deps)
        self._coefficient.write(seq, deps)

    def _agree(self, op: Op, seq: int, deps: Deps) -> None:
        self._committed.read(seq, deps)
        self._clip(op, seq, deps)

    def _reduce(self, op: Op, seq: int, deps: Deps) -> None:
        if op.buffer is not None:
            self._cell("host", 0, op.buffer).write(seq, deps)
        self._gradient_homes[op.unit].write(seq, deps)
        self._norms[op.unit].write(seq, deps)
        if self._feedback:
            deps.add(self._stores.get(op.unit, -1))

    def _gather(self, op: Op, seq: int, deps: Deps) -> None:
        self._gradient_homes[op.unit].read(seq, deps)
        self._homes[op.unit].write_all(seq, deps)

    def _read(self, op: Op, seq: int, deps: Deps) -> None:
        home = self._homes[op.unit]
        if op.tile is None:
            home.read_all(seq, deps)
            self._cell("host", 0, op.buffer).write(seq, deps)
        else:
            self._read_tiles.add((op.unit, op.tile))
            home.read_tile(op.tile, seq, deps)
            self._gradient_homes[op.unit].read(seq, deps)
            self._cell("tile", 0, op.buffer).write(seq, deps)

    def _step(self, op: Op, seq: int, deps: Deps) -> None:
        for cell in (self._coefficient, self._committed):
            if cell.writer >= 0:
                cell.read(seq, deps)
        if op.tile is None:
            self._gradient_homes[op.unit].read(seq, deps)
            self._homes[op.unit].write_all(seq, deps)
        else:
            self._cell("tile", 0, op.buffer).write(seq, deps)
            deps.add(self._stores.get(op.unit, -1))
            if (op.unit, op.tile) in self._read_tiles:
                self._read_tiles.remove((op.unit, op.tile))
            else:
                self._homes[op.unit].write_tile(op.tile, seq, deps)

    def _write(self, op: Op, seq: int, deps: Deps) -> None:
        if op.tile is None:
            self._cell("host", 0, op.buffer).read(seq, deps)
            self._gradient_homes[op.unit].write(seq, deps)
        else:
            self._cell("tile", 0, op.buffer).read(seq, deps)
            self._homes[op.unit].write_tile(op.tile, seq, deps)

    def _store(self, op: Op, seq: int, deps: Deps) -> None:
        self._homes[op.unit].read_all(seq, deps)
        self._stores[op.unit] = seq

    def _commit(self, op: Op, seq: int, deps: Deps) -> None:
        for home in self._homes.values():
            home.read_all(seq, deps)
        self._committed.write(seq, deps)
