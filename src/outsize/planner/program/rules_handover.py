"""Rule 2 of `planner.program.program_rules` for several workers: where inputs, their gradients and what is kept lie.

The input of a unit for a microbatch, and the gradient of that input, may lie on workers and below them. F makes the
input of the next unit on its own worker; SAVE moves it below, FETCH brings a copy up. Once a unit's F has run, a
worker keeps its input only where no copy lies below, or where its backward follows at once. B needs both on its
worker, after an R unless the forward has just run there, and uses them up. What a forward keeps for an R goes the same
way: OFFLOAD moves it below, ONLOAD to the worker of the R, which uses it up.

Between the workers that the layout names, PASS and RETURN move inputs and gradients from one to the other. They arrive
in a place that holds nothing: what lay there has moved on or is used up. An input that no backward needs is used up by
its F.
"""

from collections import defaultdict

from outsize.planner.program.program import Op
from outsize.planner.program.rules_home import require
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import ACTIVATIONS, Content

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
        require(
            (source, target) in self._layout.peers, f"nothing goes from worker {source} to {target} by itself"
        )
        require(place < self._layout.num_places, f"a worker has places 0 to {self._layout.num_places - 1}")
        before = self._arrived.get((target, place))
        if before is not None:
            what_lies, of = before
            require(
                target not in what_lies[of], f"place {place} of worker {target} still holds unit {of[0]}'s"
            )
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
