"""Every op of a program in one table: a row for each of its forms, and everything that is known of it.

Theory of operation
-------------------
A program is a list of ops. An op is a verb (`Kind`) and some numbers; which numbers it has, and how they are written,
is its *form*. Most verbs have one form. A LOAD may come from a host buffer (``LOAD 3@w0.1<h0``) or not, a STEP may be
of one tile (``STEP 3#0@t2``) or of a unit. A row of the table is a form. What is known of an op stands there, and all
else reads it:

=========================  ============================================================================================
what                       reads in a row
=========================  ============================================================================================
`program.parse_op`         ``text``, an example: an op of this form has the numbers that the example has
`program.lane_of`            ``lane``, the kind of thread that runs it
`hazards`                  what it ``reads``, ``writes``, ``fills`` and ``empties``: whom it waits for
`program_rules`            the same: which rules it must obey
traffic, liveness          what it ``carries``, and by its lane from where to where
`simulate.costs`           ``price``: how its seconds and bytes are found; nothing is free unless its row says so
`simulate.stalls`          the same: what a worker that waits for it is said to wait for
the runtime                the verb: the method that is marked with it, see `runtime.ops.context`
``docs/programs.md``       ``text``, ``lane`` and ``meaning``; a test compares them
=========================  ============================================================================================

So a new op is a row here and a handler in the runtime, and a line of a pass that puts it into programs. An op whose row
touches nothing waits for nothing, and obeys no rule but the form of its text.

An op that ``reads`` a resource waits for the last writer. One that ``writes`` it waits for the last writer and for
everyone who has read since; so does one that ``fills`` it, and from then on that slot, accumulator or place is the one
in which something of the unit lies, until an op ``empties`` it. ``after`` waits for the last writer as a reader does,
but no writer waits for it. The resources:

================  =====================================================================================================
``home``          weights and optimizer state of the unit where they rest; of a tile where the op has one
``homes``         those of all units
``in place``      the ``home`` of a tile that no READ has brought into a buffer; of one that was read, nothing
``slot``          the slot of the worker that the op names; ``weights`` those with the unit and the outer parameters
``buffer``        the host buffer or the tile buffer that the op names
``input``         the input of the unit for the microbatch, with what its forward has kept: ``next input`` that of the
                  unit behind it, which exists once the model's own code between the two has run
``gradient``      the gradient of ``input``; ``next gradient`` that of ``next input``
``place``         where a worker keeps what another one's device has sent; ``input place`` the one with ``input``, and
                  ``next gradient place`` the one with ``next gradient``, if they lie in one
``accumulator``   the accumulator of the worker that the op names; ``sum`` the one with the gradient of the unit, and
                  ``sums`` those of the unit and of the outer parameters
``summed``        the gradient of the unit at home
``norm``          the norm of that gradient; ``norms`` those of all units
``coefficient``   by which gradients are clipped
``committed``     the last step that is durable
``count``         how often the unit has been stepped, which a checkpoint keeps as well
================  =====================================================================================================

What is not elegant: three rules that bound memory rather than order are code of `hazards`, not rows.
"""

import re
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal


class Kind(StrEnum):
    """The verb of an op; the value is its text."""

    __hash__ = str.__hash__  # that of enumerations is a call of Python, for each look into a table

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
    UPDATE = "UPDATE"
    WRITE = "WRITE"
    STORE = "STORE"
    COMMIT = "COMMIT"


LaneKind = Literal[
    "compute",
    "up",
    "down",
    "peer",
    "host",
    "read",
    "write",
    "read:units",
    "write:units",
    "net:reduce",
    "net:gather",
    "store",
    "commit",
]
Resource = Literal[
    "home",
    "homes",
    "in place",
    "slot",
    "weights",
    "buffer",
    "input",
    "next input",
    "gradient",
    "next gradient",
    "place",
    "input place",
    "next gradient place",
    "accumulator",
    "sum",
    "sums",
    "summed",
    "norm",
    "norms",
    "coefficient",
    "committed",
    "count",
]
# What moves: weights, the gradient of weights (as a whole or as summed so far), master weights and moments, the input
# of a unit, the gradient of that input, what a forward has kept, and the products of an optimizer that multiplies.
Content = Literal["weights", "gradient", "sum", "state", "input", "input gradient", "kept", "products"]
Price = Literal[
    "free",
    "forward",
    "turn",
    "recompute",
    "backward",
    "norm",
    "link",
    "peer",
    "step",
    "update",
    "disk",
    "exchange",
    "agree",
    "commit",
]

TEXT: Final = re.compile(
    r"(?P<kind>[A-Z]+)"
    r"(?: (?P<unit>[0-9]+)(?:#(?P<tile>[0-9]+))?(?:\.(?P<microbatch>[0-9]+))?"
    r"(?:@w(?P<worker>[0-9]+)(?:>w(?P<target>[0-9]+))?(?:\.(?P<slot>[0-9]+))?)?"
    r"(?:(?P<join>[<>@])[ht](?P<buffer>[0-9]+))?)?"
)


@dataclass(frozen=True)
class OpRow:
    """A form of an op.

    Attributes:
        text: an example, in which unit 3 and microbatch 0 stand for any.
        meaning: what it does, for ``docs/programs.md``.
        lane: the kind of lane that runs it; ``compute``, ``up``, ``down`` and ``peer`` are there for each worker.
        price: how `planner.simulate.costs` finds what it takes.
        carries: what it moves from one memory to another; None where it moves nothing.
        reads: resources, see the top of this file.
        writes: the same.
        fills: the same.
        empties: the same.
        after: the same.
    """

    text: str
    meaning: str
    lane: LaneKind
    price: Price
    carries: Content | None = None
    _: KW_ONLY
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    fills: tuple[Resource, ...] = ()
    empties: tuple[Resource, ...] = ()
    after: tuple[Resource, ...] = ()

    @cached_property
    def kind(self) -> Kind:
        """The verb."""
        return Kind(self._example["kind"])

    @cached_property
    def fields(self) -> frozenset[str]:
        """Which numbers an op of this form has."""
        parts = self._example.groupdict()
        return frozenset(name for name, value in parts.items() if value and name not in ("kind", "join"))

    @cached_property
    def join(self) -> str:
        """How a buffer is named: filled (``>``), drained (``<``) or worked on where it lies (``@``)."""
        return self._example["join"] or ""

    @property
    def is_net(self) -> bool:
        """Whether it is between nodes."""
        return self.lane in ("net:reduce", "net:gather")

    @cached_property
    def _example(self) -> re.Match[str]:
        match = TEXT.fullmatch(self.text)
        if match is None:
            raise ValueError(f"{self.text!r} is not how an op is written")
        return match


# Contents that belong to one microbatch.
ACTIVATIONS: Final[frozenset[Content | None]] = frozenset({"input", "input gradient", "kept"})
# What moves of a unit itself, but for one that rests on the device.
AT_REST: Final[frozenset[Content | None]] = frozenset({"weights", "gradient", "sum"})

# fmt: off
ROWS: Final = (
    OpRow("LOAD 3@w0.1", "weights of unit 3 come up into slot 1 of worker 0",
        "up", "link", "weights", reads=("home",), fills=("slot",)),
    OpRow("LOAD 3@w0.1<h0", "the same, from host buffer 0, where a READ has put them",
        "up", "link", "weights", reads=("buffer",), fills=("slot",)),
    OpRow("FREE 3@w0.1", "slot 1 no longer holds unit 3",
        "compute", "free", writes=("slot",), empties=("slot",)),
    # A unit's sum ends before the next one begins, elsewhere.
    OpRow("ACC 3@w0.1", "accumulator 1 now sums the gradient of unit 3",
        "compute", "free", fills=("accumulator",), after=("summed",)),
    OpRow("SUM 3@w0.1", "the gradient of unit 3 as summed by earlier rounds comes up into accumulator 1, which sums on",
        "up", "link", "sum", fills=("accumulator",), after=("summed",)),
    OpRow("F 3.0@w0", "forward of unit 3 for microbatch 0; of what its backward needs only its input is kept, and "
        "of several workers that where a SAVE has put it",
        "compute", "forward", reads=("weights", "input place"), writes=("input", "next input")),
    OpRow("FA 3.0@w0", "the same, and what its attention returned is kept for the recompute",
        "compute", "forward", reads=("weights", "input place"), writes=("input", "next input")),
    OpRow("FP 3.0@w0", "the same, and what its attention and its matrix products returned",
        "compute", "forward", reads=("weights", "input place"), writes=("input", "next input")),
    OpRow("FK 3.0@w0", "the same, and all that its backward needs",
        "compute", "forward", reads=("weights", "input place"), writes=("input", "next input")),
    OpRow("FB 5.0@w0", "forward, loss and backward of the last unit in one go",
        "compute", "turn", reads=("weights", "input place"), writes=("sums", "input", "gradient"),
        empties=("input place",)),
    OpRow("B 3.0@w0", "backward of unit 3 for microbatch 0; with one worker it first recomputes what FA, FP or FK "
        "have not kept, with several an R on its worker has done that",
        "compute", "backward", reads=("weights", "next gradient", "input place", "next gradient place"),
        writes=("sums", "input", "gradient"), empties=("input place", "next gradient place")),
    OpRow("SAVE 3.0@w0", "the input of unit 3 for microbatch 0 leaves the device",
        "down", "link", "input", reads=("input place",), writes=("input",), empties=("input place",)),
    # What no backward needs has stayed where it arrived.
    OpRow("FETCH 3.0@w0", "it comes back",
        "up", "link", "input", writes=("input",), empties=("input place",)),
    OpRow("OFFLOAD 3.0@w0", "what an FA, FP or FK of unit 3 kept for microbatch 0 leaves the device",
        "down", "link", "kept", reads=("input place",), writes=("input",), empties=("input place",)),
    OpRow("ONLOAD 3.0@w0", "it comes back",
        "up", "link", "kept", writes=("input",), empties=("input place",)),
    OpRow("NORM 3@w0", "norms of the gradients of unit 3, where they lie",
        "compute", "norm", reads=("sum",), writes=("norm",)),
    OpRow("GRAD 3@w0", "the gradient of unit 3 goes home, its accumulator is free",
        "down", "link", "gradient", writes=("sum", "summed"), empties=("sum",)),
    OpRow("GRAD 3@w0>h1", "the same, into host buffer 1",
        "down", "link", "gradient", writes=("sum", "buffer"), empties=("sum",)),
    # The accumulator of a unit that leaves in tiles is the next unit's from that one's ACC on.
    OpRow("GRAD 3#0@w0>t2", "tile 0 of the gradient of unit 3, into tile buffer 2, from where a STEP takes it",
        "down", "link", "gradient", writes=("sum", "buffer")),
    OpRow("CLIP", "all norms become one coefficient; refuses what is not finite",
        "host", "free", reads=("norms",), writes=("coefficient",)),
    OpRow("READ 3>h0", "weights of unit 3, disk to host buffer 0",
        "read:units", "disk", "weights", reads=("home",), writes=("buffer",)),
    OpRow("WRITE 3<h1", "gradient of unit 3, host buffer 1 to disk",
        "write:units", "disk", "gradient", reads=("buffer",), writes=("summed",)),
    OpRow("READ 3#0>t2", "tile 0 of unit 3 (weights, moments, gradient), disk to tile buffer 2",
        "read", "disk", "state", reads=("home", "summed"), writes=("buffer",)),
    OpRow("STEP 3#0@t2", "optimizer step on that tile, or by the gradient in it in place in host memory",
        "host", "step", "products", reads=("coefficient", "committed"), writes=("buffer", "count", "in place")),
    OpRow("WRITE 3#0<t2", "what the step changed, back to disk",
        "write", "disk", "state", reads=("buffer",), writes=("home",)),
    OpRow("STEP 3", "optimizer step of a whole unit, in place in host memory",
        "host", "step", "products", reads=("coefficient", "committed", "summed"), writes=("home",)),
    OpRow("UPDATE 3@w0", "optimizer step of unit 3 where it is resident, by its gradient; the accumulator is free",
        "compute", "update", reads=("coefficient", "committed", "summed"), writes=("sum", "home"), empties=("sum",)),
    OpRow("COMMIT", "what the step wrote becomes durable, and the state that a crash goes back to",
        "commit", "commit", reads=("homes",), writes=("committed",)),
    OpRow("STORE 3", "weights and optimizer state of unit 3, from their home to a checkpoint",
        "store", "free", reads=("home", "count")),
    # Between workers.
    OpRow("R 3.0@w0", "recompute of unit 3 for microbatch 0, from its input, which a FETCH or PASS has brought; "
        "kept for the `B` that follows",
        "compute", "recompute", reads=("weights", "input place"), writes=("input",)),
    OpRow("SEND 3.0@w0", "the gradient of the input of unit 3 leaves the device, for another worker",
        "down", "link", "input gradient", writes=("gradient",)),
    OpRow("RECV 3.0@w1", "it arrives there",
        "up", "link", "input gradient", writes=("gradient",)),
    OpRow("PASS 3.0@w0>w1.2", "the input of unit 3 goes from worker 0 to place 2 of worker 1, device to device",
        "peer", "peer", "input", writes=("input",), fills=("place",)),
    OpRow("RETURN 3.0@w1>w0.2", "the gradient of the input of unit 3 goes the same way",
        "peer", "peer", "input gradient", writes=("gradient",), fills=("place",)),
    # Between nodes.
    OpRow("REDUCE 3<h1", "the gradient of unit 3 in host buffer 1 is summed over all nodes, each keeping its share",
        "net:reduce", "exchange", "gradient", writes=("buffer", "summed", "norm")),
    OpRow("REDUCE 3", "the same, of a gradient that stages have summed at home",
        "net:reduce", "exchange", "gradient", writes=("summed", "norm")),
    OpRow("AGREE", "all nodes learn the loss and the norms of all",
        "net:reduce", "agree", reads=("committed", "norms"), writes=("coefficient",)),
    OpRow("GATHER 3", "the weights of unit 3 that each node has stepped go to all others",
        "net:gather", "exchange", "weights", reads=("summed",), writes=("home",)),
)
# fmt: on

Form = tuple[Kind, bool, bool]
# By the verb, whether the op has a tile, and whether it has a buffer.
ROW_OF: Final[dict[Form, OpRow]] = {
    (row.kind, "tile" in row.fields, "buffer" in row.fields): row for row in ROWS
}
FORMS: Final = {kind: tuple(row for row in ROWS if row.kind is kind) for kind in Kind}
if not all(FORMS.values()):
    raise ValueError(f"ops without a row: {[kind.name for kind, rows in FORMS.items() if not rows]}")


def kinds(*, price: tuple[Price, ...]) -> frozenset[Kind]:
    """Return the verbs whose rows name one of these prices."""
    return frozenset(row.kind for row in ROWS if row.price in price)


# Forwards of a unit that a backward of its own follows.
FORWARD_KINDS: Final = kinds(price=("forward",))
BACKWARD_KINDS: Final = kinds(price=("turn", "backward"))
# What runs a unit.
COMPUTE_KINDS: Final = FORWARD_KINDS | BACKWARD_KINDS | kinds(price=("recompute",))
