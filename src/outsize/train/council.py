"""What ranks decide together between two steps, so that all do the same."""

import torch

from outsize.group.group import Group

STEPS_CHANNEL = "steps"


class Council:
    """Asked by all ranks in the same order; of one rank alone, what it says is what is done.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._channel = group.channel(STEPS_CHANNEL)

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so."""
        told = torch.tensor([int(flag)])
        self._channel.all_reduce(told)
        return bool(told)

    def of_first(self, flag: bool) -> bool:
        """Return what the first rank says."""
        told = torch.tensor([int(flag)])
        self._channel.broadcast(told)
        return bool(told)

    def wait(self) -> None:
        """Return when all ranks have come here."""
        self._channel.barrier()
