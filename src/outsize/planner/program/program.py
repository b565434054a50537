"""The program of a step: its ops, their text, and the lanes that run them.

The parser accepts exactly what the renderer prints, so a program that was read from a file, a test or an error message
is the program that was written. Ops are separated by newlines or ``;``; there are no comments, since ``#`` numbers the
tiles.

What each of them means, where it runs and what it touches stands in `planner.program.table`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Final

from outsize.errors import ProgramError
from outsize.planner.program.table import COMPUTE_KINDS, FORMS, FORWARD_KINDS, ROW_OF, TEXT, Kind, OpRow

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


_KINDS = {kind.value: kind for kind in Kind}
_FIELDS = tuple(field.name for field in fields(Op) if field.name != "kind")


@dataclass(frozen=True, slots=True)
class Program:
    """A sequence of ops, defined by their execution in order."""

    ops: tuple[Op, ...] = ()

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        return render(self)


def is_well_formed(op: Op) -> bool:
    """Whether ``op`` has the fields that its kind needs, and no others."""
    present = {name for name in _FIELDS if getattr(op, name) is not None}
    return any(present == row.fields for row in FORMS[op.kind])


def parse_op(text: str) -> Op:
    """Return the op that ``text`` names.

    Raises:
        ProgramError: not an op, or not written as ``str`` writes it.
    """
    text = text.strip()
    match = TEXT.fullmatch(text)
    if match is None or match["kind"] not in _KINDS:
        raise ProgramError(f"not an op: {text!r}; docs/programs.md tells of each: {', '.join(Kind)}")
    numbers = {name: int(match[name]) for name in _FIELDS if match[name] is not None}
    op = Op(kind=_KINDS[match["kind"]], **numbers)
    if not is_well_formed(op) or str(op) != text:
        forms = (Op(kind=op.kind, **dict.fromkeys(row.fields, 0)) for row in FORMS[op.kind])
        raise ProgramError(f"not a form of {op.kind}: {text!r}; write it like {' or '.join(map(str, forms))}")
    return op


def op_or_text(text: str) -> Op | str:
    """Return the op that ``text`` names, or the text where this version has no such op."""
    try:
        return parse_op(text)
    except ProgramError:
        return text


def render(program: Program) -> str:
    """Return the text of ``program``, one op per line."""
    return "\n".join(map(str, program.ops))


def parse(text: str) -> Program:
    """Return the program that ``text`` spells, ops separated by newlines or ``;``.

    Raises:
        ProgramError: with the text and the position (counted from 0) of the first thing that is not an op.
    """
    ops: list[Op] = []
    for piece in re.split(r"[\n;]", text):
        if piece.strip():
            try:
                ops.append(parse_op(piece))
            except ProgramError as error:
                raise ProgramError(f"op {len(ops)}: {error}") from None
    return Program(tuple(ops))


def excerpt(program: Program, position: int, radius: int = 4) -> str:
    """Return the lines around op ``position`` with an arrow at it; ``len(program)`` is behind the last op."""
    lines = []
    for index in range(max(0, position - radius), min(len(program) + 1, position + radius + 1)):
        at_end = index == len(program)
        if at_end and position != index:
            continue
        text = "(end of the program)" if at_end else str(program.ops[index])
        lines.append(f"{'-->' if index == position else '   '} {index:5d}  {text}")
    return "\n".join(lines)


_WORKERS: Final = frozenset({"compute", "up", "down", "peer"})
_TEXT: Final = re.compile(r"(?P<kind>.*?)(?::w(?P<worker>[0-9]+)(?:-w(?P<target>[0-9]+))?)?")


class Lane(str):
    """A lane: its name, with what it is made of. Names in files become one by `lane_named`.

    The rows of `planner.program.table` say which kind of lane runs an op. Each worker has lanes of four kinds:
    ``compute:w0`` runs its units, and what is instant beside them; ``up:w0`` is towards its device, ``down:w0`` away
    from it, ``peer:w0-w1`` from its memory to that of worker 1. The machine has one of each other kind.

    What nodes exchange has two lanes, since a GATHER waits for a STEP while gradients of other units are reduced. Each
    is a channel of its own between nodes, on which all of them do the same in the same order.

    Whole units do not queue behind tiles: the next step's first units are read while the last tiles of this step still
    wait for their turn. Where the disk lies directly below the device there are no whole units to READ or WRITE, and
    the last two lanes do not exist. The lane ``store`` is behind everything else, at low priority.

    Attributes:
        kind: of the lane, e.g. ``up``; see `table.LaneKind`.
        worker: whose it is; None for a lane of the machine.
        target: of ``peer``, the worker that it leads to.
    """

    __slots__ = ("kind", "target", "worker")
    kind: str
    worker: int | None
    target: int | None

    def __new__(cls, kind: str, worker: int | None = None, target: int | None = None) -> "Lane":
        """Return the lane with the name that all its uses share, e.g. ``up:w0``."""
        text = (
            kind
            if worker is None
            else f"{kind}:w{worker}"
            if target is None
            else f"{kind}:w{worker}-w{target}"
        )
        lane = super().__new__(cls, text)
        lane.kind, lane.worker, lane.target = kind, worker, target
        return lane

    def __getnewargs__(self) -> tuple[str, int | None, int | None]:  # type: ignore[override]
        return self.kind, self.worker, self.target

    @property
    def family(self) -> str:
        """The kind of lane, whether for units or tiles, and whatever nodes exchange: e.g. ``read``, ``net``."""
        return self.kind.partition(":")[0]

    @property
    def of_device(self) -> bool:
        """Whether it is one of a device's, and not of the machine."""
        return self.kind in _WORKERS


@cache
def lane_named(text: str) -> Lane:
    """Return the lane of that name."""
    match = _TEXT.fullmatch(text)
    assert match is not None
    worker, target = (None if match[name] is None else int(match[name]) for name in ("worker", "target"))
    return Lane(match["kind"], worker, target)


def lane_of(op: Op) -> Lane:
    """Return the lane that runs ``op``, e.g. ``up:w0``."""
    return _lane(op.kind, op.tile is not None, op.buffer is not None, op.worker, op.target)


@cache
def _lane(kind: Kind, tile: bool, buffer: bool, worker: int | None, target: int | None) -> Lane:
    lane = ROW_OF[kind, tile, buffer].lane
    return Lane(lane, worker if lane in _WORKERS else None, target)
