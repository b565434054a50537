"""How many bytes of activations are live at every op, however far the lanes run apart.

What else lies on the device (slots, accumulators, tile buffers) is allocated once; only activations come and
go:

* F u.m makes the input of unit u+1; it lives until the backward of unit u+1, or the SAVE, has passed;
* FA, FP and FK u.m keep what B u.m needs besides its input; from when B u.m begins this is part of the workspace. An
  OFFLOAD of it counts as a SAVE does, and an ONLOAD as a FETCH;
* FB and B u.m make the gradient of the input of unit u, and consume that of unit u+1;
* a SAVE that nothing has waited for yet counts as not done: up to `hazards.SAVE_WINDOW` of them, or all behind an F;
* a FETCH counts from where it stands, since it waits for the compute op before it, and for all SAVEs;
* an FB or B that no FETCH has been needed for may run before the FETCHes that stand before it, and then before the
  SAVEs are done that those wait for: the larger of the two counts.

Inputs of unit 0 (ids) are counted elsewhere, as shared bytes.
"""

from collections import deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from outsize.planner.program.hazards import SAVE_WINDOW
from outsize.planner.program.program import COMPUTE_KINDS, Op
from outsize.planner.program.stages import KeptBytes, bytes_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import Content

NOTHING: KeptBytes = MappingProxyType({})


class Live(NamedTuple):
    """Activation bytes on the device and saved in the tier below it, at the worst moment of an op."""

    device_bytes: int
    below_bytes: int


class ActivationMeter:
    """Counts activation bytes op by op.

    Args:
        layout: the step.
        boundary_bytes: bytes of the input of each streamed unit, for one microbatch.
        kept_bytes: bytes that forwards of each extent keep; what it does not tell counts none.
    """

    def __init__(
        self, layout: StepLayout, boundary_bytes: Sequence[int], kept_bytes: KeptBytes = NOTHING
    ) -> None:
        if len(boundary_bytes) != layout.num_streamed:
            raise ValueError(f"boundary_bytes needs {layout.num_streamed} entries, not {len(boundary_bytes)}")
        self._bytes = (0, *boundary_bytes[1:], 0)  # behind the last unit nothing of ours is made
        self._first_backward = layout.first_backward
        self._layout = layout
        self._saved = kept_bytes
        self._leaving: deque[int] = deque()  # bytes of SAVEs that nothing has waited for yet
        self._behind = 0  # of them, those behind the last compute op, which no F waits for
        self._early: dict[
            tuple[Content, int, int | None], int
        ] = {}  # FETCHes that no compute op has waited for yet
        self._late = 0  # bytes of SAVEs that only those have waited for
        self._device = 0
        self._below = 0

    def add(self, op: Op) -> Live:
        """Return the bytes that are live while ``op`` runs."""
        unit, row = op.unit or 0, op.row
        peak = Live(self._device, self._below)
        if row.price == "forward":
            self._finish_saves(but=max(SAVE_WINDOW - 1, self._behind))
            self._device += self._bytes[unit + 1]
            peak = Live(self._device, self._below)
            if unit < self._first_backward:
                self._device -= self._bytes[unit]
            self._device += self._kept(op)
        elif row.price in ("turn", "backward"):
            self._device -= self._kept(op)
            size = self._bytes[unit] if unit > self._first_backward else 0
            keys: list[tuple[Content, int, int | None]] = [
                ("input", unit, op.microbatch),
                ("kept", unit, op.microbatch),
            ]
            if [self._early.pop(key) for key in keys if key in self._early]:
                self._late = 0
            behind = max(0, self._late - sum(self._early.values()))
            peak = Live(self._device + size + behind, self._below)
            consumed = self._bytes[unit + 1] if row.price == "backward" else 0
            self._device += size - self._bytes[unit] - consumed
        elif row.price == "link" and row.carries in ("input", "kept"):
            moved = self._bytes[unit] if row.carries == "input" else self._kept(op)
            peak = self._move(op, moved)
        if op.kind in COMPUTE_KINDS:
            self._behind = 0
        return peak

    def _move(self, op: Op, moved: int) -> Live:
        """Count what leaves the device, or comes back."""
        row = op.row
        if row.lane == "down":
            self._below += moved
            self._leaving.append(moved)
            self._behind += 1
            return Live(self._device, self._below)
        self._late += sum(self._leaving)
        self._early[row.carries or "input", op.unit or 0, op.microbatch] = moved
        self._finish_saves(but=0)
        self._device += moved
        peak = Live(self._device, self._below)
        self._below -= moved
        return peak

    def _kept(self, op: Op) -> int:
        unit, microbatch = op.unit or 0, op.microbatch or 0
        return bytes_of(self._layout.choice(unit, microbatch), unit, self._saved)

    def _finish_saves(self, but: int) -> None:
        """Count all SAVEs as done but the last few."""
        while len(self._leaving) > but:
            self._device -= self._leaving.popleft()
