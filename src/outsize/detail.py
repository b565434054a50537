"""Lines of a run that only ``--verbose`` shows."""


class Detail(str):
    """A line that whoever watches a run can do without: what was measured and chosen where nothing in it changes bits.

    It is told like any other line; a screen that is quiet leaves it out, and a log of a program of yours has it.
    """

    __slots__ = ()
