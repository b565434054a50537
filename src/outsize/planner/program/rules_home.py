"""Rules of programs over homes, exchanges and hand-overs between workers.

Of the rules in `planner.program.program_rules`: 2 where several workers hand over, 5 and 6 (what happens to weights and
gradients below the device), and 10 (what several nodes exchange in a step, and when).

The input of a unit for a microbatch, and the gradient of that input, may lie on workers and below them. F makes the
input of the next unit on its own worker; SAVE moves it below, FETCH brings a copy up. Once a unit's F has run, a
worker keeps its input only where no copy lies below, or where its backward follows at once. B needs both on its
worker, after an R unless the forward has just run there, and uses them up. What a forward keeps for an R goes the same
way: OFFLOAD moves it below, ONLOAD to the worker of the R, which uses it up.

Between the workers that the layout names, PASS and RETURN move inputs and gradients from one to the other. They arrive
in a place that holds nothing: what lay there has moved on or is used up. An input that no backward needs is used up by
its F.
"""

from collections import Counter, defaultdict

from outsize.planner.program.program import Kind, Op
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import ACTIVATIONS, Content


class BrokenRuleError(Exception):
    """What is wrong with an op; `validate` turns it into a `ProgramError` that shows where."""


def require(condition: object, message: str) -> None:
    """Raise `BrokenRuleError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise BrokenRuleError(message)


class ExchangeRules:
    """Gradients reduced, norms agreed on, and weights gathered, as the ops go by."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._reduced: set[int] = set()
        self._gathered: set[int] = set()
        self._agreed = False

    def reduce(self, unit: int) -> None:
        """Follow a REDUCE of a gradient that is there."""
        require(unit not in self._reduced, f"the gradient of unit {unit} has been reduced already")
        self._reduced.add(unit)

    def agree(self) -> None:
        """Follow an AGREE."""
        require(self._layout.clip, "nodes agree on norms only where gradients are clipped")
        require(not self._agreed, "nodes agree once")
        missing = set(self._layout.step_order) - self._reduced
        require(not missing, f"the gradients of units {sorted(missing)} have not been reduced")
        self._agreed = True

    def gather(self, unit: int) -> None:
        """Follow a GATHER of a unit that has stepped."""
        require(self._layout.trainable[unit], f"unit {unit} does not train")
        require(unit not in self._gathered, f"unit {unit} has been gathered already")
        self._gathered.add(unit)

    def check_agreed(self) -> None:
        """Check that nodes know the norms of all."""
        require(self._agreed, "nodes have not agreed on the norms")

    def check_reduced(self, unit: int) -> None:
        """Check that the gradient of a unit is that of all nodes."""
        require(unit in self._reduced, f"the gradient of unit {unit} has not been reduced")

    def check_done(self) -> None:
        """Check that every unit that steps has been gathered."""
        missing = set(self._layout.step_order) - self._gathered
        require(not missing, f"units {sorted(missing)} have not been gathered")


class HomeRules:
    """Buffers, norms, gradients at home and steps taken, as the ops go by."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._clips = layout.clip or layout.unit_clip
        self._normed: set[int] = set()
        self._clipped = False
        self._gradients: set[int] = set()  # units whose gradient has come home
        self._partial: set[int] = set()  # units whose gradient of some rounds has come home
        self._whole: set[int] = set()  # units whose gradient has left the device, of all rounds
        self._started: set[tuple[int, int]] = set()  # tiles read
        self._committed = False
        self._exchange = ExchangeRules(layout) if layout.num_nodes > 1 else None
        self._stepped: Counter[int] = Counter()  # unit -> tiles stepped; 1 for a whole unit
        self._host: dict[int | None, tuple[Kind, int]] = {}  # host buffer -> READ or GRAD, of which unit
        # tile buffer -> READ, GRAD or STEP, unit, tile
        self._ring: dict[int | None, tuple[Kind, int, int]] = {}
        # unit -> tiles of its gradient that have left
        self._sent: defaultdict[int, set[int]] = defaultdict(set)

    def check(self, op: Op, unit: int) -> None:
        """Follow CLIP, READ, STEP, WRITE, COMMIT, REDUCE, AGREE or GATHER.

        Raises:
            BrokenRuleError: it may not come here.
        """
        row = op.row
        if row.is_net:
            self._with_others(op, unit)
        elif "coefficient" in row.writes:
            self._clip()
        elif "committed" in row.writes:
            self._commit()
        elif op.tile is not None:
            self._tile(op, unit, op.tile)
        elif "buffer" in row.writes:
            self._fill(op, unit)
            self._check_before_step(unit)
        elif "buffer" in row.reads:
            reduced = self._layout.reduces_buffers and unit in self._whole
            require(not reduced, "a gradient of several nodes is reduced")
            self._drain(op, Kind.GRAD, unit)
            self._come_home(unit)
        elif "home" in row.writes:
            require(not self._layout.tiles[unit], f"unit {unit} steps by tiles")
            require(unit not in self._layout.resident, f"unit {unit} steps where it is resident")
            self._check_ready(unit)
            require(not self._stepped[unit], f"unit {unit} has stepped already")
            self._stepped[unit] = 1

    def load(self, op: Op, unit: int) -> None:
        """Follow the part of a LOAD that takes weights from their home or from a host buffer."""
        self._check_staged(op)
        if op.buffer is not None:
            self._drain(op, Kind.READ, unit)
        self._check_before_step(unit)

    def norm(self, unit: int) -> None:
        """Follow a NORM."""
        require(self._clips, "norms are taken only where gradients are clipped")
        require(self._exchange is None, "the norms of several nodes are those of what was reduced")
        require(unit not in self._normed, f"the norm of unit {unit} has been taken already")
        self._normed.add(unit)

    @property
    def committed(self) -> bool:
        """Whether the step has been committed."""
        return self._committed

    def has_gradient(self, unit: int) -> bool:
        """Whether a gradient of ``unit`` has come home, of all rounds or of those so far."""
        return unit in self._gradients or unit in self._partial

    def gradient(self, op: Op, unit: int, final: bool = True) -> None:
        """Follow the part of a GRAD that puts the gradient down."""
        normed = not self._clips or unit in self._normed or not final or self._exchange is not None
        require(normed, f"the norm of unit {unit} has not been taken")
        way = "tile by tile, through the ring" if self._layout.ring else "whole"
        require((op.tile is not None) == self._layout.ring, f"gradients leave {way}")
        if op.tile is not None:
            self._into_ring(op, unit, op.tile)
            return
        if self._layout.reduces_buffers and final:
            require(op.buffer is not None, "a gradient that is to be reduced goes into a host buffer")
        else:
            self._check_staged(op)
        if final:
            self._whole.add(unit)
        if op.buffer is not None:
            self._fill(op, unit)
        else:
            self._come_home(unit)

    def update(self, unit: int) -> None:
        """Follow an UPDATE."""
        require(unit in self._layout.resident, f"unit {unit} rests at home, and steps there")
        require(not self._clips or unit in self._normed, f"the norm of unit {unit} has not been taken")
        require(not self._layout.clip or self._clipped, "gradients have not been clipped")
        require(not self._stepped[unit], f"unit {unit} has stepped already")
        self._stepped[unit] = 1

    def check_end(self) -> None:
        """Check that nothing is left undone or left behind.

        Raises:
            BrokenRuleError: something is.
        """
        self._check_done()
        require(self._committed == self._layout.commits, "the step has not been committed")

    def _come_home(self, unit: int) -> None:
        (self._gradients if unit in self._whole else self._partial).add(unit)

    def _commit(self) -> None:
        require(self._layout.commits, "the home of this layout does not commit")
        self._check_done()
        self._committed = True

    def _check_done(self) -> None:
        """Check that every unit has stepped, and that nothing is on its way."""
        require(not self._host, f"host buffers {sorted(map(str, self._host))} are not empty")
        require(not self._ring, f"tile buffers {sorted(map(str, self._ring))} are not empty")
        for unit, trains in enumerate(self._layout.trainable):
            due = max(1, self._layout.tiles[unit]) if trains else 0
            require(self._stepped[unit] == due, f"unit {unit} has not stepped")
        if self._exchange is not None:
            self._exchange.check_done()

    def _clip(self) -> None:
        require(self._layout.clip, "gradients are not clipped")
        require(not self._clipped, "gradients are clipped once")
        if self._exchange is not None:
            self._exchange.check_agreed()
        missing = set(self._layout.step_order) - self._normed if self._exchange is None else ()
        require(not missing, f"the norms of units {sorted(missing)} have not been taken")
        self._clipped = True

    def all_sent(self, unit: int) -> bool:
        """Whether all tiles of the gradient of ``unit`` have left, where they leave in tiles."""
        return not self._layout.ring or len(self._sent[unit]) == self._layout.tiles[unit]

    def _into_ring(self, op: Op, unit: int, tile: int) -> None:
        """Follow a GRAD of a tile: into a buffer that is empty, or has been filled with the rest of the tile."""
        self._check_tile(op, unit, tile)
        before = (Kind.READ, unit, tile) if self._layout.tiles_on_disk else None
        require(self._ring.get(op.buffer) == before, f"tile buffer {op.buffer} is not ready for it")
        require(tile not in self._sent[unit], "it has left already")
        self._sent[unit].add(tile)
        self._ring[op.buffer] = (Kind.GRAD, unit, tile)

    def _check_tile(self, op: Op, unit: int, tile: int) -> None:
        num_buffers = self._layout.num_tile_buffers
        require(op.buffer is not None and op.buffer < num_buffers, f"there are {num_buffers} tile buffers")
        require(tile < self._layout.tiles[unit], f"unit {unit} has {self._layout.tiles[unit]} tiles")

    def _tile(self, op: Op, unit: int, tile: int) -> None:
        self._check_tile(op, unit, tile)
        held = self._ring.get(op.buffer)
        if op.kind is Kind.READ:
            require(held is None, f"tile buffer {op.buffer} is still in use")
            self._check_gradient(unit)
            require((unit, tile) not in self._started, "it has been read already")
            self._started.add((unit, tile))
            self._ring[op.buffer] = (Kind.READ, unit, tile)
        elif op.kind is Kind.STEP:
            before = Kind.GRAD if self._layout.ring else Kind.READ
            require(held == (before, unit, tile), f"tile buffer {op.buffer} does not hold it, ready to step")
            self._check_ready(unit)
            self._stepped[unit] += 1
            if self._layout.tiles_on_disk:
                self._ring[op.buffer] = (Kind.STEP, unit, tile)
            else:
                del self._ring[op.buffer]
        else:
            require(self._layout.tiles_on_disk, "the home is stepped where it lies")
            require(held == (Kind.STEP, unit, tile), f"tile buffer {op.buffer} does not hold it, stepped")
            del self._ring[op.buffer]

    def _fill(self, op: Op, unit: int) -> None:
        num_buffers = self._layout.num_host_buffers
        require(op.buffer is not None and op.buffer < num_buffers, f"there are {num_buffers} host buffers")
        require(op.buffer not in self._host, f"host buffer {op.buffer} is still in use")
        self._host[op.buffer] = (op.kind, unit)

    def _drain(self, op: Op, filled_by: Kind, unit: int) -> None:
        held = self._host.pop(op.buffer, None)
        fits = held == (filled_by, unit)
        require(fits, f"host buffer {op.buffer} holds nothing of unit {unit} from {filled_by}")

    def _check_staged(self, op: Op) -> None:
        staged = self._layout.staged
        require((op.buffer is not None) == staged, f"units pass {'through' if staged else 'no'} host buffers")

    def _check_before_step(self, unit: int) -> None:
        require(not self._stepped[unit], f"unit {unit} has stepped already")

    def _check_ready(self, unit: int) -> None:
        require(self._layout.trainable[unit], f"unit {unit} does not train")
        self._check_gradient(unit)
        require(not self._layout.clip or self._clipped, "gradients have not been clipped")

    def _check_gradient(self, unit: int) -> None:
        ready = self._layout.ring or unit in self._gradients
        require(ready, f"the gradient of unit {unit} is not home")
        if self._exchange is not None:
            self._exchange.check_reduced(unit)

    def _with_others(self, op: Op, unit: int) -> None:
        if self._exchange is None:
            raise BrokenRuleError("a single node exchanges nothing")
        if op.row.carries == "gradient":
            if op.buffer is not None:
                self._drain(op, Kind.GRAD, unit)
                self._gradients.add(unit)
            require(unit in self._gradients, f"the gradient of unit {unit} is not home")
            self._exchange.reduce(unit)
        elif op.row.carries is None:
            self._exchange.agree()
        else:
            due = max(1, self._layout.tiles[unit])
            written = all(held[1] != unit for held in self._ring.values())
            require(written and self._stepped[unit] == due, f"unit {unit} has not stepped")
            self._exchange.gather(unit)


BELOW = -1
INPUT, GRADIENT, KEPT = "the input", "the gradient of the input", "what is kept of the forward"

_Places = defaultdict[tuple[int, int], set[int]]


class HandoverRules:
    """Where every input and every gradient of an input lies, as the ops go by."""

    def __init__(self, layout: StepLayout) -> None:
        assert layout.stages is not None
        self._layout = layout
        self._turn = layout.stages.backward[0][0]
        # Units from here on run backward where they ran forward, and at once.
        self._fused = layout.num_streamed if layout.cut else self._turn
        self._inputs: _Places = defaultdict(set)
        self._gradients: _Places = defaultdict(set)
        self._kept: _Places = defaultdict(set)
        self._contents: dict[Content | None, tuple[str, _Places]] = {
            "input": (INPUT, self._inputs),
            "input gradient": (GRADIENT, self._gradients),
            "kept": (KEPT, self._kept),
        }
        self._recomputed: set[tuple[int, int, int]] = set()
        self._arrived: dict[tuple[int, int], tuple[_Places, tuple[int, int]]] = {}

    def check(self, op: Op, unit: int, microbatch: int) -> None:
        """Follow one op.

        Raises:
            BrokenRuleError: what it needs lies elsewhere.
        """
        worker = BELOW if op.worker is None else op.worker
        at, after = (unit, microbatch), (unit + 1, microbatch)
        row = op.row
        if row.carries in ACTIVATIONS:
            what, places = self._contents[row.carries]
            if row.lane == "peer":
                self._cross(places, at, op, what)
            elif row.lane == "down":
                self._move(places, at, worker, BELOW, what)
            elif row.carries != "input":
                self._move(places, at, BELOW, worker, what)
            else:  # a copy
                require(BELOW in places[at], f"the input of unit {unit} has not been saved")
                require(worker not in places[at], f"the input of unit {unit} is on worker {worker} already")
                places[at].add(worker)
        else:
            self._need(self._inputs, at, worker, INPUT)
            if row.price == "recompute":
                require((*at, worker) not in self._recomputed, f"unit {unit} has been recomputed already")
                self._recomputed.add((*at, worker))
                if self._layout.choice(unit, microbatch).leaves:
                    self._need(self._kept, at, worker, KEPT)
                    del self._kept[at]
            elif row.price == "forward":
                self._inputs[after].add(worker)
                if self._layout.choice(unit, microbatch).leaves:
                    self._kept[at].add(worker)
                spent = unit < self._layout.first_backward
                if spent or (BELOW in self._inputs[at] and unit < self._fused):
                    self._inputs[at].discard(worker)
            else:
                self._backward(op, at, after, worker)

    def _backward(self, op: Op, at: tuple[int, int], after: tuple[int, int], worker: int) -> None:
        if op.row.price == "backward":
            recomputed = at[0] >= self._turn or (*at, worker) in self._recomputed
            require(recomputed, f"unit {at[0]} has not been recomputed on worker {worker}")
            if at[0] < self._layout.last:  # that of the last unit is the caller's to give
                self._need(self._gradients, after, worker, GRADIENT)
                del self._gradients[after]
        self._inputs.pop(at, None)
        if at[0] > self._layout.first_backward:
            self._gradients[at].add(worker)

    def _cross(self, places: _Places, at: tuple[int, int], op: Op, what: str) -> None:
        source, target, place = op.worker or 0, op.target or 0, op.slot or 0
        direct = (source, target) in self._layout.peers
        require(direct, f"nothing goes from worker {source} to {target} by itself")
        require(place < self._layout.num_places, f"a worker has places 0 to {self._layout.num_places - 1}")
        before = self._arrived.get((target, place))
        if before is not None:
            lying, of = before
            free = target not in lying[of]
            require(free, f"place {place} of worker {target} still holds unit {of[0]}'s")
        self._move(places, at, source, target, what)
        self._arrived[target, place] = places, at

    def _need(self, places: _Places, at: tuple[int, int], worker: int, what: str) -> None:
        here = worker in places[at] or (what == INPUT and at[0] == 0)
        require(here, f"{what} of unit {at[0]} is not on worker {worker}")

    def _move(self, places: _Places, at: tuple[int, int], source: int, target: int, what: str) -> None:
        where = "below" if source == BELOW else f"on worker {source}"
        require(source in places[at], f"{what} of unit {at[0]} is not {where}")
        places[at].discard(source)
        places[at].add(target)
