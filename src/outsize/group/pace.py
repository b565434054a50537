"""Ranks that measure together: each piece begins on all of them at once and is repeated as often on all.

Ranks of one machine share its cores, caches and memory. What one of them measures while the others are at something
else, or wait for it, is not what it reaches in a step, in which all of them work. So before each piece they say what
comes and how much of it they want, and all take the most that anyone wants. Ranks of other machines lose nothing by it.

A rank that cannot go on says so once, in the place of its next word (`give_up`). The others go on by themselves from
there, as they do where they find that they were about to measure different things. Nobody waits for anybody then.
"""

from types import TracebackType
from typing import Self

from outsize.group.group import Group

CHANNEL = "pace"


class Pace:
    """A context manager: who leaves it with an error gives up, and who comes to its end waits for the others.

    Args:
        group: the ranks; of one, every word is its own.
    """

    def __init__(self, group: Group) -> None:
        self._channel = group.channel(CHANNEL) if group.size > 1 else None

    def most(self, what: str, wanted: float) -> float:
        """Return the most that any rank wants of ``what``, when all have come to it; ``wanted`` where all are apart.

        Raises:
            LostRankError: a rank is gone.
        """
        if self._channel is None:
            return wanted
        told = self._channel.gather_objects([what, wanted])
        if any(word is None or word[0] != what for word in told):
            self._channel = None  # on all ranks: they have heard the same
            return wanted
        return max(float(word[1]) for word in told)

    def meet(self, what: str) -> None:
        """Return when all ranks have come to ``what``; at once where they are apart."""
        self.most(what, 0.0)

    def give_up(self) -> None:
        """Tell the others to go on by themselves; idempotent."""
        if self._channel is not None:
            self._channel.gather_objects(None)
            self._channel = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.meet("the end")
        elif isinstance(error, Exception):  # who is told to stop at once does not talk
            self.give_up()
