"""Which lane runs an op. A lane does one thing at a time, in program order.

The rows of `planner.program.table` say which kind of lane. Each worker has lanes of four kinds: ``compute:w0`` runs
its units, and what is instant beside them; ``up:w0`` is towards its device, ``down:w0`` away from it, ``peer:w0-w1``
from its memory to that of worker 1. The machine has one of each other kind.

What nodes exchange has two lanes, since a GATHER waits for a STEP while gradients of other units are reduced. Each is a
channel of its own between nodes, on which all of them do the same in the same order.

Whole units do not queue behind tiles: the next step's first units are read while the last tiles of this step
still wait for their turn. Where the disk lies directly below the device there are no whole units to READ or
WRITE, and the last two lanes do not exist. The lane ``store`` is behind everything else, at low priority.
"""

import re
from functools import cache
from typing import Final

from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.table import ROW_OF

_WORKERS: Final = frozenset({"compute", "up", "down", "peer"})
_TEXT: Final = re.compile(r"(?P<kind>.*?)(?::w(?P<worker>[0-9]+)(?:-w(?P<target>[0-9]+))?)?")


class Lane(str):
    """A lane: its name, with what it is made of. Names in files become one by `lane_named`.

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
