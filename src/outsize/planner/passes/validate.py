"""Whether a program obeys the rules; if not, which op breaks which rule.

The rules themselves are in `planner.program.program_rules`. This is the part that walks the program, meters its
bytes, and
shows the program with an arrow at the op that is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outsize.errors import ProgramError
from outsize.planner.memory.activation_liveness import ActivationMeter
from outsize.planner.program.activation_policy import KeptBytes
from outsize.planner.program.program import Program, excerpt
from outsize.planner.program.program_rules import Rules
from outsize.planner.program.rules_home import BrokenRuleError
from outsize.planner.program.step_layout import StepLayout
from outsize.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What the tiers hold besides activations, and what they may hold.

    Attributes:
        boundary_bytes: bytes of the input of each streamed unit, for one microbatch.
        kept_bytes: bytes that forwards of each extent keep.
        below: tier that saved activations go to, ``host`` or ``disk``.
        static_bytes: bytes by tier that are allocated for the whole step.
        budget_bytes: most bytes by tier; a tier without an entry has no limit.
    """

    boundary_bytes: tuple[int, ...]
    below: str
    kept_bytes: KeptBytes = field(default_factory=dict)
    static_bytes: Mapping[str, int] = field(default_factory=dict)
    budget_bytes: Mapping[str, int] = field(default_factory=dict)


def validate(program: Program, layout: StepLayout, limits: MemoryLimits | None = None) -> None:
    """Check ``program`` against `planner.program.program_rules`, and against ``limits`` where they are given.

    Raises:
        ProgramError: a rule is broken; the message names it and shows the program around the op.
    """
    rules = Rules(layout)
    meter = ActivationMeter(layout, limits.boundary_bytes, limits.kept_bytes) if limits is not None else None
    position = 0
    try:
        for position, op in enumerate(program):  # noqa: B007 - read where an error is caught
            rules.check(op)
            if meter is not None and limits is not None:
                _check_bytes(*meter.add(op), limits)
        position = len(program)
        rules.check_end()
    except BrokenRuleError as broken:
        where = str(program.ops[position]) if position < len(program) else "end of the program"
        shown = excerpt(program, position)
        raise ProgramError(f"op {position}, {where}: {broken}\n{shown}") from None


def _check_bytes(device_bytes: int, below_bytes: int, limits: MemoryLimits) -> None:
    for tier, live_bytes in (("device", device_bytes), (limits.below, below_bytes)):
        total = limits.static_bytes.get(tier, 0) + live_bytes
        budget = limits.budget_bytes.get(tier, total)
        if total > budget:
            raise BrokenRuleError(f"{tier} holds {format_bytes(total)}, its budget is {format_bytes(budget)}")
