"""Which lane runs an op. A lane does one thing at a time, in program order.

================  ====================================================================================
lane              ops
================  ====================================================================================
``compute:w0``    F, FA, FP, FK, FB, R, B, and what is instant beside them: FREE, ACC, NORM
``up:w0``         LOAD, FETCH, ONLOAD, RECV, SUM: towards the device
``down:w0``       SAVE, OFFLOAD, SEND, GRAD: away from it
``peer:w0-w1``    PASS, RETURN: from the memory of worker 0 to that of worker 1
``host``          CLIP, STEP
``read``          READ of optimizer tiles
``write``         WRITE of optimizer tiles
``read:units``    READ of whole units into host buffers
``write:units``   WRITE of gradients from host buffers
``net:reduce``    REDUCE, AGREE: with other nodes
``net:gather``    GATHER
``store``         STORE: behind everything else, at low priority
``commit``        COMMIT
================  ====================================================================================

What nodes exchange has two lanes, since a GATHER waits for a STEP while gradients of other units are reduced. Each is a
channel of its own between nodes, on which all of them do the same in the same order.

Whole units do not queue behind tiles: the next step's first units are read while the last tiles of this step
still wait for their turn. Where the disk lies directly below the device there are no whole units to READ or
WRITE, and the last two lanes do not exist.
"""

from functools import cache

from outsize.planner.program.ops import Kind, Op

_OF_WORKER = {
    Kind.LOAD: "up",
    Kind.FETCH: "up",
    Kind.ONLOAD: "up",
    Kind.RECV: "up",
    Kind.SUM: "up",
    Kind.SAVE: "down",
    Kind.OFFLOAD: "down",
    Kind.SEND: "down",
    Kind.GRAD: "down",
    Kind.FREE: "compute",
    Kind.ACC: "compute",
    Kind.FORWARD: "compute",
    Kind.FORWARD_ATTENTION: "compute",
    Kind.FORWARD_PRODUCTS: "compute",
    Kind.FORWARD_KEEP: "compute",
    Kind.FORWARD_BACKWARD: "compute",
    Kind.RECOMPUTE: "compute",
    Kind.BACKWARD: "compute",
    Kind.NORM: "compute",
}
_OF_MACHINE = {
    Kind.CLIP: "host",
    Kind.STEP: "host",
    Kind.REDUCE: "net:reduce",
    Kind.AGREE: "net:reduce",
    Kind.GATHER: "net:gather",
    Kind.READ: "read",
    Kind.WRITE: "write",
    Kind.STORE: "store",
    Kind.COMMIT: "commit",
}


def lane_of(op: Op) -> str:
    """Return the name of the lane that runs ``op``, e.g. ``"up:w0"``."""
    if op.target is not None:
        return f"peer:w{op.worker}-w{op.target}"
    return _lane(op.kind, op.worker, op.tile is None)


@cache
def _lane(kind: Kind, worker: int | None, whole: bool) -> str:
    name = _OF_WORKER.get(kind)
    if name is not None:
        return f"{name}:w{worker}"
    name = _OF_MACHINE[kind]
    return f"{name}:units" if whole and name in ("read", "write") else name
