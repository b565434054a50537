"""The rules every program obeys, as a machine that follows the program and refuses the op that breaks one.

1. Every unit runs every microbatch forward once, and backward once if anything up to it trains (or the rest does);
   microbatches in the order 0, 1, …, since that is the order in which gradients are summed.
2. An op finds its inputs: the activation of the unit before it, the gradient of the unit after it, and its own input
   on the device, not saved away.
   What a backward needs is kept from the forward, by FA, FP or FK, where the layout says so and nowhere else. Where it
   leaves the device it comes back before that backward.
3. A compute op finds its unit in a slot, and the rest in its own. A slot and an accumulator hold one unit at a time,
   and one that fits. A unit is loaded at most twice in a round, one that stays on a single worker once, and never after
   it has stepped.
4. The gradient of a unit leaves once all its backwards have run, whole, or each tile once where there is a ring; where
   gradients are clipped, after its norm.
5. A unit steps once (each tile once), when its gradient is home; where gradients are clipped, after CLIP. One that is
   resident steps on the device instead, by the sum of all rounds, and its gradient never leaves.
6. A buffer is filled, used and drained in this order, for one unit or tile at a time.
7. A step is committed, where it is, once, behind everything else.
8. At the end every slot, accumulator and buffer is empty, every backward has run, every trainable unit has stepped.
9. A step holds no STORE: what a checkpoint takes is the state between two steps, in a program of its own.
10. Of several nodes, each reduces the whole gradient of a unit once before the unit steps, agrees with the others on
   the norms once before CLIP, and gathers a unit once after it has stepped. A single node does none of it.

A step of several rounds obeys the same rules: gradients leave once the backwards of a round have run, and the next
round sums on. So does one that is cut into stages, on the worker that runs the op. Where inputs and their gradients lie
then is checked by `planner.program.rules_home`.

Rules 5, 6 and 10 are checked by `planner.program.rules_home`. Bytes are the business of
`planner.memory.step_bytes`.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from outsize.planner.program.program import Kind, Op, is_well_formed
from outsize.planner.program.rules_home import HandoverRules, HomeRules, require
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import ACTIVATIONS, OpRow

Place = tuple[int | None, int | None]


class Rules:
    """The state of a step as its ops go by, and what may come next."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._home = HomeRules(layout)
        self._slots: dict[Place, int] = {}  # worker and slot -> unit
        self._accumulators: dict[Place, int] = {}  # worker and accumulator -> unit
        self._handover = HandoverRules(layout) if layout.stages is not None else None
        self._loads: Counter[int] = Counter()
        self._forwards: Counter[int] = Counter()  # unit -> microbatches done, which is also the next one
        self._backwards: Counter[int] = Counter()
        self._saved: set[tuple[int, int]] = set()
        self._fetched: set[tuple[int, int]] = set()
        self._offloaded: set[tuple[int, int]] = set()
        self._onloaded: set[tuple[int, int]] = set()

    def check(self, op: Op) -> None:
        """Follow one op.

        Raises:
            BrokenRuleError: it may not come here.
        """
        layout = self._layout
        require(is_well_formed(op), "an op of this kind has other fields")
        require(not self._home.committed, "a step is committed once, and last")
        require(op.row.lane != "store", "units are stored between steps, in a program of their own")
        unit = -1 if op.unit is None else op.unit
        require(unit < layout.num_units, f"there are {layout.num_units} units")
        require(op.worker is None or op.worker < layout.num_workers, f"there is no worker {op.worker}")
        microbatch = op.microbatch or 0
        require(microbatch < layout.num_microbatches, f"there are {layout.num_microbatches} microbatches")
        if op.microbatch is not None:
            require(unit < layout.num_streamed, "the rest does not run by itself")
        check = self._check_of(op.row)
        if check is not None:
            check(op, unit, microbatch)
        else:
            self._home.check(op, unit)

    def _check_of(self, row: OpRow) -> Callable[[Op, int, int], None] | None:
        """Return the rule of what concerns a device; None for what is beyond it."""
        if row.price in ("forward", "turn", "recompute", "backward"):
            computing = {
                "forward": self._forward,
                "turn": self._forward_backward,
                "recompute": self._recompute,
            }
            return computing.get(row.price, self._backward)
        if row.carries in ACTIVATIONS:
            return self._follow_kept if row.carries == "kept" else self._follow_input
        if row.price == "update":
            return self._update
        if "slot" in (*row.fills, *row.empties):
            return self._load if row.fills else self._free
        if "accumulator" in row.fills:
            return self._sum if row.carries else self._acc
        if "sum" in row.reads:
            return self._norm if "norm" in row.writes else self._look_at_sum
        return self._grad if "sum" in row.writes else None

    def check_end(self) -> None:
        """Check what must hold behind the last op.

        Raises:
            BrokenRuleError: something is left undone or left behind.
        """
        layout = self._layout
        for unit in range(layout.num_streamed):
            require(
                self._forwards[unit] == layout.num_microbatches, f"unit {unit} has not run all its forwards"
            )
            done = unit < layout.first_backward or self._backwards[unit] == layout.num_microbatches
            require(done, f"unit {unit} has not run all its backwards")
        require(not self._slots, f"slots still hold units {sorted(self._slots.values())}")
        holding = sorted(self._accumulators.values())
        require(not holding, f"accumulators still hold the gradients of units {holding}")
        self._home.check_end()

    def _load(self, op: Op, unit: int, _: int) -> None:
        layout = self._layout
        needed = layout.weight_bytes[unit]
        _check_place(op, unit, "slot", layout.slot_bytes, layout.own_slots, needed)
        require(layout.weight_bytes[unit], f"unit {unit} has no weights of its own")
        place = (op.worker, op.slot)
        require(place not in self._slots, f"slot {op.slot} still holds unit {self._slots.get(place)}")
        require(unit not in _held(self._slots, op.worker), f"unit {unit} is in a slot already")
        every = layout.num_workers * (1 + layout.cut)  # of a step that is cut each part loads the rest
        most = max(2, every) if unit == layout.rest else 2 * layout.num_rounds
        most = 1 + layout.cut if unit in layout.stays and layout.stages is None else most
        times = "twice" if most == 2 else f"{most} times"
        require(self._loads[unit] < most, f"unit {unit} has been loaded {times} already")
        self._home.load(op, unit)
        self._loads[unit] += 1
        self._slots[place] = unit

    def _free(self, op: Op, unit: int, _: int) -> None:
        place = (op.worker, op.slot)
        require(self._slots.get(place) == unit, f"slot {op.slot} does not hold unit {unit}")
        del self._slots[place]

    def _acc(self, op: Op, unit: int, _: int) -> None:
        layout = self._layout
        _check_place(
            op,
            unit,
            "accumulator",
            layout.accumulator_bytes,
            layout.own_accumulators,
            layout.gradient_bytes[unit],
        )
        require(layout.trainable[unit], f"unit {unit} does not train")
        holder = self._accumulators.get((op.worker, op.slot))
        require(holder is None, f"accumulator {op.slot} still holds the gradient of unit {holder}")
        require(unit not in self._accumulators.values(), f"unit {unit} has an accumulator already")
        begun = self._begun(unit)
        if op.row.carries == "sum":
            require(begun and self._home.has_gradient(unit), f"no gradient of unit {unit} is home to sum on")
        else:
            require(not begun, f"a backward that adds to the gradient of unit {unit} has run already")
        self._accumulators[op.worker, op.slot] = unit

    def _begun(self, unit: int) -> bool:
        """Whether something has been added to the gradient of ``unit``."""
        if unit != self._layout.rest:
            return self._backwards[unit] > 0
        adding = self._layout.rest_users if self._layout.stages is not None else self._backwards
        return any(self._backwards[user] for user in adding)

    def _sum(self, op: Op, unit: int, microbatch: int) -> None:
        several = self._layout.stages is not None or self._layout.num_rounds > 1
        require(several, "gradients are summed in one round")
        self._acc(op, unit, microbatch)

    def _forward(self, op: Op, unit: int, microbatch: int) -> None:
        self._check_turn(unit)
        choice = self._layout.choice(unit, microbatch)
        if choice.forward is Kind.FORWARD:
            require(op.kind is Kind.FORWARD, "the layout keeps nothing of it for its backward")
        require(op.kind is choice.forward, f"the layout keeps what its backward needs: {choice.forward}")
        self._run_forward(op, unit, microbatch)

    def _check_turn(self, unit: int) -> None:
        apart = self._layout.cut or unit < self._layout.last
        require(apart, "the last unit runs forward and backward in one op, FB")

    def _forward_backward(self, op: Op, unit: int, microbatch: int) -> None:
        require(not self._layout.cut, "in a step that is cut the last unit runs F and B")
        require(
            unit == self._layout.last, f"only unit {self._layout.last} runs forward and backward in one op"
        )
        self._run_forward(op, unit, microbatch)
        self._run_backward(op, unit, microbatch)

    def _recompute(self, op: Op, unit: int, microbatch: int) -> None:
        require(self._handover is not None, "a backward recomputes by itself")
        require(unit >= self._layout.first_backward, f"nothing up to unit {unit} trains")
        require(self._forwards[unit] > microbatch, "its forward has not run")
        self._check_back(unit, microbatch)
        self._check_weights(op, unit)
        if self._handover is not None:
            self._handover.check(op, unit, microbatch)

    def _backward(self, op: Op, unit: int, microbatch: int) -> None:
        require(unit >= self._layout.first_backward, f"nothing up to unit {unit} trains")
        self._check_turn(unit)
        require(self._forwards[unit] > microbatch, "its forward has not run")
        after = unit == self._layout.last or self._backwards[unit + 1] > microbatch
        require(after, f"unit {unit + 1} has not made the gradient that it starts from")
        if unit in self._layout.offload:
            require((unit, microbatch) in self._fetched, "its input has not come back to the device")
        self._check_back(unit, microbatch)
        self._run_backward(op, unit, microbatch)

    def _check_back(self, unit: int, microbatch: int) -> None:
        back = (unit, microbatch) in self._onloaded or not self._layout.choice(unit, microbatch).leaves
        require(back, "what its forward kept has not come back to a device")

    def _run_forward(self, op: Op, unit: int, microbatch: int) -> None:
        self._check_weights(op, unit)
        require(
            self._forwards[unit] == microbatch, f"unit {unit} runs microbatch {self._forwards[unit]} next"
        )
        require(unit == 0 or self._forwards[unit - 1] > microbatch, f"unit {unit - 1} has not made its input")
        if self._handover is not None:
            self._handover.check(op, unit, microbatch)
        self._forwards[unit] += 1

    def _run_backward(self, op: Op, unit: int, microbatch: int) -> None:
        self._check_weights(op, unit)
        due = self._backwards[unit]
        require(due == microbatch, f"unit {unit} runs the backward of microbatch {due} next")
        layout = self._layout
        adds_to_rest = layout.rest is not None and (layout.stages is None or unit in layout.rest_users)
        for which in (unit, layout.rest or 0) if adds_to_rest else (unit,):
            here = which in _held(self._accumulators, op.worker)
            summed = not layout.trainable[which] or here
            require(summed, f"the gradient of unit {which} has no accumulator")
        if self._handover is not None and op.row.price == "backward":
            self._handover.check(op, unit, microbatch)
        self._backwards[unit] += 1

    def _check_weights(self, op: Op, unit: int) -> None:
        for which in (unit,) if self._layout.rest is None else (unit, self._layout.rest):
            here = not self._layout.weight_bytes[which] or which in _held(self._slots, op.worker)
            require(here, f"unit {which} is in no slot")

    def _follow_input(self, op: Op, unit: int, microbatch: int) -> None:
        """Follow an input, or its gradient: of one worker it leaves and comes back, and is not handed over."""
        if self._handover is not None:
            self._handover.check(op, unit, microbatch)
            return
        at, row = (unit, microbatch), op.row
        stays = row.carries != "input" or row.lane == "peer"
        require(not stays, "inputs and their gradients stay where they are")
        if row.lane == "down":
            require(unit in self._layout.offload, f"the layout keeps the inputs of unit {unit} on the device")
            require(self._forwards[unit] > microbatch, "its forward has not run")
            require(at not in self._saved, "it has been saved already")
            self._saved.add(at)
        else:
            require(at in self._saved, "it has not been saved")
            require(at not in self._fetched, "it has been fetched already")
            self._fetched.add(at)

    def _follow_kept(self, op: Op, unit: int, microbatch: int) -> None:
        """Follow what a forward has kept: it leaves and comes back, perhaps to another worker."""
        at = (unit, microbatch)
        if op.row.lane == "down":
            leaves = self._layout.choice(unit, microbatch).leaves
            require(leaves, f"the layout keeps nothing of unit {unit} that leaves the device")
            require(self._forwards[unit] > microbatch, "its forward has not run")
            require(at not in self._offloaded, "it has been offloaded already")
            self._offloaded.add(at)
        else:
            require(at in self._offloaded, "it has not been offloaded")
            require(at not in self._onloaded, "it has come back already")
            self._onloaded.add(at)
        if self._handover is not None:
            self._handover.check(op, unit, microbatch)

    def _look_at_sum(self, op: Op, unit: int, _: int) -> None:
        self._check_complete(op, unit)
        require(self._is_final(unit), f"unit {unit} has backwards to run in later rounds")

    def _norm(self, op: Op, unit: int, microbatch: int) -> None:
        self._look_at_sum(op, unit, microbatch)
        self._home.norm(unit)

    def _update(self, op: Op, unit: int, microbatch: int) -> None:
        if self._layout.cut:
            require(self._home.has_gradient(unit), f"no gradient of unit {unit} is home")
        else:
            self._look_at_sum(op, unit, microbatch)
        self._home.update(unit)
        self._accumulators = {at: holder for at, holder in self._accumulators.items() if holder != unit}

    def _grad(self, op: Op, unit: int, _: int) -> None:
        stays = unit in self._layout.resident and not self._layout.cut
        require(not stays, f"the gradient of unit {unit} stays where the unit is")
        self._check_complete(op, unit)
        self._home.gradient(op, unit, final=self._is_final(unit))
        if self._home.all_sent(unit):
            self._accumulators = {at: holder for at, holder in self._accumulators.items() if holder != unit}

    def _is_final(self, unit: int) -> bool:
        """Whether no later round adds to the gradient of ``unit``."""
        layout = self._layout
        if unit != layout.rest:
            return self._backwards[unit] == layout.num_microbatches
        users = layout.rest_users if layout.stages is not None else ()
        return all(self._backwards[user] == layout.num_microbatches for user in users)

    def _check_complete(self, op: Op, unit: int) -> None:
        """Check that the accumulator of ``unit`` holds its whole gradient, or all of a round."""
        held = _held(self._accumulators, op.worker)
        require(unit in held, f"the gradient of unit {unit} is in no accumulator")
        layout, done = self._layout, self._backwards[unit]
        if layout.stages is not None if unit == layout.rest else done and done % layout.round_size == 0:
            return
        adding = range(self._layout.first_backward, self._layout.num_streamed)
        for other in adding if unit == self._layout.rest else (unit,):
            complete = self._backwards[other] == self._layout.num_microbatches
            require(complete, f"unit {other} has not run all its backwards")


def _check_place(
    op: Op, unit: int, name: str, sizes: tuple[int, ...], own_places: Mapping[int, int], needed: int
) -> None:
    """Check that the slot or accumulator exists, is shared or the unit's own, and is large enough."""
    slot = len(sizes) if op.slot is None else op.slot
    if unit in own_places:
        require(slot == own_places[unit], f"unit {unit} has {name} {own_places[unit]} of its own")
        return
    require(slot < len(sizes), f"units share {name}s 0 to {len(sizes) - 1}")
    require(needed <= sizes[slot], f"{name} {slot} has {sizes[slot]} bytes, unit {unit} needs {needed}")


def _held(places: Mapping[Place, int], worker: int | None) -> set[int]:
    """Return the units that lie in places of ``worker``."""
    return {unit for (at, _), unit in places.items() if at == worker}
