"""The instructions of a program: what happens to which unit for which microbatch, never how.

============================  ================================================================================
text                          meaning
============================  ================================================================================
``LOAD 3@w0.1``               weights of unit 3 come up from the tier below worker 0 into its slot 1
``LOAD 3@w0.1<h0``            the same, from host buffer 0, where a READ has put them
``FREE 3@w0.1``               slot 1 no longer holds unit 3
``ACC 3@w0.1``                accumulator 1 of worker 0 now sums the gradient of unit 3
``F 3.0@w0``                  forward of unit 3 for microbatch 0, nothing kept but its input
``FA 3.0@w0``                 the same, and what its attention returned is kept for the recompute
``FP 3.0@w0``                 the same, and what its attention and its matrix products returned
``FK 3.0@w0``                 the same, and all that its backward needs
``FB 5.0@w0``                 forward, loss and backward of the last unit in one go
``R 3.0@w0``                  recompute of unit 3 for microbatch 0, kept for the B that follows
``B 3.0@w0``                  recompute, as far as R, FA, FP or FK have not done it, and backward of unit 3
``SAVE 3.0@w0``               the input of unit 3 for microbatch 0 leaves the device
``FETCH 3.0@w0``              it comes back
``OFFLOAD 3.0@w0``            what an FA, FP or FK of unit 3 kept for microbatch 0 leaves the device
``ONLOAD 3.0@w0``             it comes back
``SEND 3.0@w0``               the gradient of the input of unit 3 leaves the device, for another worker
``RECV 3.0@w1``               it arrives there
``PASS 3.0@w0>w1.2``          the input of unit 3 goes from worker 0 to place 2 of worker 1, device to device
``RETURN 3.0@w1>w0.2``        the gradient of the input of unit 3 goes the same way
``SUM 3@w0.1``                the gradient of unit 3 as summed so far comes up into accumulator 1, which sums on
``NORM 3@w0``                 norms of the gradients of unit 3, where they lie
``GRAD 3@w0``                 the gradient of unit 3 leaves the device for its home; its accumulator is free
``GRAD 3@w0>h1``              the same, into host buffer 1, from where a WRITE takes it to disk
``GRAD 3#0@w0>t2``            tile 0 of the gradient of unit 3, into tile buffer 2, from where a STEP takes it
``CLIP``                      all norms become one clipping coefficient; refuses what is not finite
``READ 3>h0``                 weights of unit 3, disk to host buffer 0
``WRITE 3<h1``                gradient of unit 3, host buffer 1 to disk
``READ 3#0>t2``               tile 0 of unit 3 (master weights, moments, gradient), disk to tile buffer 2
``STEP 3#0@t2``               optimizer step on that tile, or by the gradient in it in place in host memory
``WRITE 3#0<t2``              what the step changed, back to disk
``STEP 3``                    optimizer step of the whole unit, in place in host memory
``STORE 3``                   weights and optimizer state of unit 3, from their home to a checkpoint
``REDUCE 3<h1``               the gradient of unit 3 in host buffer 1 is summed over all nodes, each keeping its share
``REDUCE 3``                  the same, of a gradient that is home
``AGREE``                     all nodes learn the loss and the norms of all
``GATHER 3``                  the weights of unit 3 that each node has stepped go to all others
``COMMIT``                    what the step wrote becomes durable, and the state that a crash goes back to
============================  ================================================================================
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The verb of an op; the value is its text."""

    LOAD = "LOAD"
    FREE = "FREE"
    ACC = "ACC"
    FORWARD = "F"
    FORWARD_ATTENTION = "FA"
    FORWARD_PRODUCTS = "FP"
    FORWARD_KEEP = "FK"
    FORWARD_BACKWARD = "FB"
    RECOMPUTE = "R"
    BACKWARD = "B"
    SAVE = "SAVE"
    FETCH = "FETCH"
    OFFLOAD = "OFFLOAD"
    ONLOAD = "ONLOAD"
    SEND = "SEND"
    RECV = "RECV"
    PASS = "PASS"
    RETURN = "RETURN"
    SUM = "SUM"
    NORM = "NORM"
    GRAD = "GRAD"
    CLIP = "CLIP"
    REDUCE = "REDUCE"
    AGREE = "AGREE"
    GATHER = "GATHER"
    READ = "READ"
    STEP = "STEP"
    WRITE = "WRITE"
    STORE = "STORE"
    COMMIT = "COMMIT"


# How the buffer is joined: filled (``>``), drained (``<``) or worked on where it lies (``@``).
_JOIN = {Kind.READ: ">", Kind.GRAD: ">", Kind.LOAD: "<", Kind.WRITE: "<", Kind.REDUCE: "<", Kind.STEP: "@"}


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
            text += f"{_JOIN.get(self.kind, '>')}{'h' if self.tile is None else 't'}{self.buffer}"
        return text


# Forwards of a unit that a backward of its own follows.
FORWARD_KINDS = frozenset({Kind.FORWARD, Kind.FORWARD_ATTENTION, Kind.FORWARD_PRODUCTS, Kind.FORWARD_KEEP})
# What runs a unit.
COMPUTE_KINDS = FORWARD_KINDS | {Kind.FORWARD_BACKWARD, Kind.RECOMPUTE, Kind.BACKWARD}
