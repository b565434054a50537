"""The program and its text: one op per line, and back again without loss.

The parser accepts exactly what the renderer prints, so a program that was read from a file, a test or an
error message is the program that was written. Ops are separated by newlines or ``;``; there are no comments,
since ``#`` numbers the tiles.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from outsize.errors import ProgramError
from outsize.planner.program.ops import Kind, Op

_UNIT_MICROBATCH = frozenset({"unit", "microbatch", "worker"})
_UNIT_SLOT = frozenset({"unit", "worker", "slot"})
_UNIT_TILE = frozenset({"unit", "tile", "buffer"})
_PEER = _UNIT_MICROBATCH | {"target", "slot"}

# Which fields an op of each kind has; where there are several shapes, the op exists with and without a buffer
# or tile.
SHAPES: dict[Kind, tuple[frozenset[str], ...]] = {
    Kind.LOAD: (_UNIT_SLOT, _UNIT_SLOT | {"buffer"}),
    Kind.FREE: (_UNIT_SLOT,),
    Kind.ACC: (_UNIT_SLOT,),
    Kind.FORWARD: (_UNIT_MICROBATCH,),
    Kind.FORWARD_ATTENTION: (_UNIT_MICROBATCH,),
    Kind.FORWARD_PRODUCTS: (_UNIT_MICROBATCH,),
    Kind.FORWARD_KEEP: (_UNIT_MICROBATCH,),
    Kind.FORWARD_BACKWARD: (_UNIT_MICROBATCH,),
    Kind.RECOMPUTE: (_UNIT_MICROBATCH,),
    Kind.BACKWARD: (_UNIT_MICROBATCH,),
    Kind.SAVE: (_UNIT_MICROBATCH,),
    Kind.FETCH: (_UNIT_MICROBATCH,),
    Kind.OFFLOAD: (_UNIT_MICROBATCH,),
    Kind.ONLOAD: (_UNIT_MICROBATCH,),
    Kind.SEND: (_UNIT_MICROBATCH,),
    Kind.RECV: (_UNIT_MICROBATCH,),
    Kind.PASS: (_PEER,),
    Kind.RETURN: (_PEER,),
    Kind.SUM: (_UNIT_SLOT,),
    Kind.NORM: (frozenset({"unit", "worker"}),),
    Kind.GRAD: (
        frozenset({"unit", "worker"}),
        frozenset({"unit", "worker", "buffer"}),
        _UNIT_TILE | {"worker"},
    ),
    Kind.CLIP: (frozenset(),),
    Kind.REDUCE: (frozenset({"unit"}), frozenset({"unit", "buffer"})),
    Kind.AGREE: (frozenset(),),
    Kind.GATHER: (frozenset({"unit"}),),
    Kind.READ: (frozenset({"unit", "buffer"}), _UNIT_TILE),
    Kind.STEP: (frozenset({"unit"}), _UNIT_TILE),
    Kind.WRITE: (frozenset({"unit", "buffer"}), _UNIT_TILE),
    Kind.STORE: (frozenset({"unit"}),),
    Kind.COMMIT: (frozenset(),),
}
_KINDS = {kind.value: kind for kind in Kind}
_FIELDS = tuple(field.name for field in fields(Op) if field.name != "kind")
_OP = re.compile(
    r"(?P<kind>[A-Z]+)"
    r"(?: (?P<unit>[0-9]+)(?:#(?P<tile>[0-9]+))?(?:\.(?P<microbatch>[0-9]+))?"
    r"(?:@w(?P<worker>[0-9]+)(?:>w(?P<target>[0-9]+))?(?:\.(?P<slot>[0-9]+))?)?"
    r"(?:[<>@][ht](?P<buffer>[0-9]+))?)?"
)


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
    return any(present == shape for shape in SHAPES[op.kind])


def parse_op(text: str) -> Op:
    """Return the op that ``text`` names.

    Raises:
        ProgramError: not an op, or not written as ``str`` writes it.
    """
    text = text.strip()
    match = _OP.fullmatch(text)
    if match is None or match["kind"] not in _KINDS:
        raise ProgramError(f"not an op: {text!r}; the table of ops is in outsize/planner/program/ops.py")
    numbers = {name: int(match[name]) for name in _FIELDS if match[name] is not None}
    op = Op(kind=_KINDS[match["kind"]], **numbers)
    if not is_well_formed(op) or str(op) != text:
        raise ProgramError(
            f"not a form of {op.kind}: {text!r}; the table of ops is in outsize/planner/program/ops.py"
        )
    return op


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
