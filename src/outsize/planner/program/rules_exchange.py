"""Rule 10 of `planner.program.program_rules`: what several nodes exchange in a step, and when."""

from outsize.planner.program.step_layout import StepLayout


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
