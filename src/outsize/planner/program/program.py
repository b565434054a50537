"""The program and its text: one op per line, and back again without loss.

The parser accepts exactly what the renderer prints, so a program that was read from a file, a test or an
error message is the program that was written. Ops are separated by newlines or ``;``; there are no comments,
since ``#`` numbers the tiles.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from outsize.errors import ProgramError
from outsize.planner.program.ops import Op
from outsize.planner.program.table import FORMS, TEXT, Kind

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
        raise ProgramError(f"not an op: {text!r}; the table of ops is in outsize/planner/program/table.py")
    numbers = {name: int(match[name]) for name in _FIELDS if match[name] is not None}
    op = Op(kind=_KINDS[match["kind"]], **numbers)
    if not is_well_formed(op) or str(op) != text:
        raise ProgramError(
            f"not a form of {op.kind}: {text!r}; the table of ops is in outsize/planner/program/table.py"
        )
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
