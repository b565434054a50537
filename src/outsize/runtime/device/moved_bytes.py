"""How much has moved one way: on the wire, and what it stands for. Both change at once, so that readers see a pair."""

from typing import NamedTuple


class Moved(NamedTuple):
    """Bytes so far.

    Attributes:
        wire: that went over the link.
        logical: of elements as they are used, before codecs.
    """

    wire: int = 0
    logical: int = 0

    def and_then(self, wire: int, logical: int) -> "Moved":
        """Return the sum with what moved since."""
        return Moved(self.wire + wire, self.logical + logical)
