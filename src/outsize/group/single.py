"""A group of one: what a run is without torchrun."""

from collections.abc import Mapping

from torch import Tensor

from outsize.group.group import Group


class SingleGroup(Group):
    """Group of a single rank: every collective returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 0, 1

    def channel(self, name: str) -> "SingleGroup":
        """Return a group of one."""
        return SingleGroup()

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """There is nobody to send to."""
        if outgoing or incoming:
            raise ValueError(f"there is one rank only, got {sorted({*outgoing, *incoming})}")

    def close(self, error: BaseException | None = None) -> None:
        """There is nobody to leave."""
