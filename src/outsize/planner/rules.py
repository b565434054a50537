"""The rules every program obeys, as a machine that follows the program and refuses the op that breaks one.

1. Every unit runs every microbatch forward once, and backward once if anything up to it trains (or the rest
does);
   microbatches in the order 0, 1, …, since that is the order in which gradients are summed.
2. An op finds its inputs: the activation of the unit before it, the gradient of the unit after it, and its
own
   input on the device, not saved away.
3. A compute op finds its unit in a slot, and the rest in its own. A slot and an accumulator hold one unit at
a
   time, and one that fits. A unit is loaded at most twice, and never after it has stepped.
4. The gradient of a unit leaves once all its backwards have run; where gradients are clipped, after its norm.
5. A unit steps once (each tile once), when its gradient is home; where gradients are clipped, after CLIP.
6. A buffer is filled, used and drained in this order, for one unit or tile at a time.
7. At the end every slot, accumulator and buffer is empty, every backward has run, every trainable unit has
stepped.

Rules 5 and 6 are checked by `planner.rules_home`. Bytes are the business of `planner.liveness`.
"""

from collections import Counter

from outsize.planner.layout import WORKER, StepLayout
from outsize.planner.ops import Kind, Op
from outsize.planner.program import is_well_formed
from outsize.planner.rules_home import HomeRules, require


class Rules:
    """The state of a step as its ops go by, and what may come next."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._home = HomeRules(layout)
        self._slots: dict[int | None, int] = {}  # slot -> unit
        self._accumulators: dict[int | None, int] = {}  # accumulator -> unit
        self._loads: Counter[int] = Counter()
        self._forwards: Counter[int] = Counter()  # unit -> microbatches done, which is also the next one
        self._backwards: Counter[int] = Counter()
        self._saved: set[tuple[int, int]] = set()
        self._fetched: set[tuple[int, int]] = set()
        self._checks = {
            Kind.LOAD: self._load,
            Kind.FREE: self._free,
            Kind.ACC: self._acc,
            Kind.FORWARD: self._forward,
            Kind.FORWARD_BACKWARD: self._forward_backward,
            Kind.BACKWARD: self._backward,
            Kind.SAVE: self._save,
            Kind.FETCH: self._fetch,
            Kind.NORM: self._norm,
            Kind.GRAD: self._grad,
        }

    def check(self, op: Op) -> None:
        """Follow one op.

        Raises:
            BrokenRuleError: it may not come here.
        """
        layout = self._layout
        require(is_well_formed(op), "an op of this kind has other fields")
        unit = -1 if op.unit is None else op.unit
        require(unit < layout.num_units, f"there are {layout.num_units} units")
        require(op.worker in (None, WORKER), f"there is no worker {op.worker}")
        microbatch = op.microbatch or 0
        require(microbatch < layout.num_microbatches, f"there are {layout.num_microbatches} microbatches")
        if op.microbatch is not None:
            require(unit < layout.num_streamed, "the rest does not run by itself")
        check = self._checks.get(op.kind)
        if check is not None:
            check(op, unit, microbatch)
        else:
            self._home.check(op, unit)

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
        self._check_place(op, unit, layout.slot_bytes, layout.weight_bytes[unit], "slot")
        require(layout.weight_bytes[unit], f"unit {unit} has no weights of its own")
        require(op.slot not in self._slots, f"slot {op.slot} still holds unit {self._slots.get(op.slot)}")
        require(unit not in self._slots.values(), f"unit {unit} is in a slot already")
        require(self._loads[unit] < 2, f"unit {unit} has been loaded twice already")
        self._home.load(op, unit)
        self._loads[unit] += 1
        self._slots[op.slot] = unit

    def _free(self, op: Op, unit: int, _: int) -> None:
        require(self._slots.get(op.slot) == unit, f"slot {op.slot} does not hold unit {unit}")
        del self._slots[op.slot]

    def _acc(self, op: Op, unit: int, _: int) -> None:
        layout = self._layout
        self._check_place(op, unit, layout.accumulator_bytes, layout.gradient_bytes[unit], "accumulator")
        require(layout.trainable[unit], f"unit {unit} does not train")
        holder = self._accumulators.get(op.slot)
        require(holder is None, f"accumulator {op.slot} still holds the gradient of unit {holder}")
        require(unit not in self._accumulators.values(), f"unit {unit} has an accumulator already")
        begun = sum(self._backwards.values()) if unit == layout.rest else self._backwards[unit]
        require(not begun, f"a backward that adds to the gradient of unit {unit} has run already")
        self._accumulators[op.slot] = unit

    def _check_place(self, op: Op, unit: int, sizes: tuple[int, ...], needed: int, name: str) -> None:
        """Check that the slot or accumulator exists, belongs to this kind of unit, and is large enough."""
        slot = len(sizes) if op.slot is None else op.slot
        if unit == self._layout.rest:
            require(slot == len(sizes), f"the rest has {name} {len(sizes)}")
        else:
            require(slot < len(sizes), f"units share {name}s 0 to {len(sizes) - 1}")
            require(
                needed <= sizes[slot], f"{name} {slot} has {sizes[slot]} bytes, unit {unit} needs {needed}"
            )

    def _forward(self, op: Op, unit: int, microbatch: int) -> None:
        require(unit < self._layout.last, "the last unit runs forward and backward in one op, FB")
        self._run_forward(unit, microbatch)

    def _forward_backward(self, op: Op, unit: int, microbatch: int) -> None:
        require(
            unit == self._layout.last, f"only unit {self._layout.last} runs forward and backward in one op"
        )
        self._run_forward(unit, microbatch)
        self._run_backward(unit, microbatch)

    def _backward(self, op: Op, unit: int, microbatch: int) -> None:
        require(unit >= self._layout.first_backward, f"nothing up to unit {unit} trains")
        require(unit < self._layout.last, "the last unit runs forward and backward in one op, FB")
        require(self._forwards[unit] > microbatch, "its forward has not run")
        after = self._backwards[unit + 1]
        require(after > microbatch, f"unit {unit + 1} has not made the gradient that it starts from")
        if unit in self._layout.offload:
            require((unit, microbatch) in self._fetched, "its input has not come back to the device")
        self._run_backward(unit, microbatch)

    def _run_forward(self, unit: int, microbatch: int) -> None:
        self._check_weights(unit)
        require(
            self._forwards[unit] == microbatch, f"unit {unit} runs microbatch {self._forwards[unit]} next"
        )
        require(unit == 0 or self._forwards[unit - 1] > microbatch, f"unit {unit - 1} has not made its input")
        self._forwards[unit] += 1

    def _run_backward(self, unit: int, microbatch: int) -> None:
        self._check_weights(unit)
        due = self._backwards[unit]
        require(due == microbatch, f"unit {unit} runs the backward of microbatch {due} next")
        for which in (unit,) if self._layout.rest is None else (unit, self._layout.rest):
            summed = not self._layout.trainable[which] or which in self._accumulators.values()
            require(summed, f"the gradient of unit {which} has no accumulator")
        self._backwards[unit] += 1

    def _check_weights(self, unit: int) -> None:
        for which in (unit,) if self._layout.rest is None else (unit, self._layout.rest):
            here = not self._layout.weight_bytes[which] or which in self._slots.values()
            require(here, f"unit {which} is in no slot")

    def _save(self, op: Op, unit: int, microbatch: int) -> None:
        require(unit in self._layout.offload, f"the layout keeps the inputs of unit {unit} on the device")
        require(self._forwards[unit] > microbatch, "its forward has not run")
        require((unit, microbatch) not in self._saved, "it has been saved already")
        self._saved.add((unit, microbatch))

    def _fetch(self, op: Op, unit: int, microbatch: int) -> None:
        require((unit, microbatch) in self._saved, "it has not been saved")
        require((unit, microbatch) not in self._fetched, "it has been fetched already")
        self._fetched.add((unit, microbatch))

    def _norm(self, op: Op, unit: int, _: int) -> None:
        self._check_complete(unit)
        self._home.norm(unit)

    def _grad(self, op: Op, unit: int, _: int) -> None:
        self._check_complete(unit)
        self._home.gradient(op, unit)
        self._accumulators = {slot: holder for slot, holder in self._accumulators.items() if holder != unit}

    def _check_complete(self, unit: int) -> None:
        """Check that the accumulator of ``unit`` holds its whole gradient."""
        require(unit in self._accumulators.values(), f"the gradient of unit {unit} is in no accumulator")
        adding = range(self._layout.first_backward, self._layout.num_streamed)
        for other in adding if unit == self._layout.rest else (unit,):
            complete = self._backwards[other] == self._layout.num_microbatches
            require(complete, f"unit {other} has not run all its backwards")
