"""The instructions of a program: what happens to which unit for which microbatch, never how.

What each of them means, where it runs and what it touches stands in `planner.program.table`.
"""

from dataclasses import dataclass

from outsize.planner.program.table import COMPUTE_KINDS, FORMS, FORWARD_KINDS, ROW_OF, Kind, OpRow

__all__ = ["COMPUTE_KINDS", "FORWARD_KINDS", "Kind", "Op"]

_JOIN = {kind: max(row.join for row in rows) or ">" for kind, rows in FORMS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One instruction.

    Attributes:
        kind: the verb.
        unit: unit index; None only for CLIP, AGREE and COMMIT.
        microbatch: for F, FA, FP, FK, FB, R, B, SAVE, FETCH, OFFLOAD, ONLOAD, SEND, RECV, PASS and RETURN.
        worker: the device that it concerns, or where it starts; None for host and disk ops.
        slot: slot (LOAD, FREE) or accumulator (ACC, SUM) of that worker, or place (PASS, RETURN) of the other one.
        tile: tile of the unit's optimizer state or gradient; None for whole-unit ops.
        buffer: host buffer ``h`` (whole unit) or tile buffer ``t`` that the op fills or drains.
        target: for PASS and RETURN, the worker that something goes to.
    """

    kind: Kind
    unit: int | None = None
    microbatch: int | None = None
    worker: int | None = None
    slot: int | None = None
    tile: int | None = None
    buffer: int | None = None
    target: int | None = None

    def __str__(self) -> str:
        """Return the text form, e.g. ``LOAD 3@w0.1<h0``."""
        text = str(self.kind)
        if self.unit is not None:
            text += f" {self.unit}"
        if self.tile is not None:
            text += f"#{self.tile}"
        if self.microbatch is not None:
            text += f".{self.microbatch}"
        if self.worker is not None:
            text += f"@w{self.worker}"
        if self.target is not None:
            text += f">w{self.target}"
        if self.slot is not None:
            text += f".{self.slot}"
        if self.buffer is not None:
            text += f"{_JOIN[self.kind]}{'h' if self.tile is None else 't'}{self.buffer}"
        return text

    @property
    def row(self) -> OpRow:
        """What is known of ops of its form."""
        return ROW_OF[self.kind, self.tile is not None, self.buffer is not None]
