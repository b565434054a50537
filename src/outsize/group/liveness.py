"""Detect lost ranks: each beats in a store that all can read, and listens to the others.

How a lost rank is told from a slow one, and named:

1. a thread of each rank sets ``beat/<rank>`` to a number that grows, every ``period_s``, and reads those of all others;
2. it takes the time, on its own clock, at which the number of each last changed: clocks of machines are not compared;
3. a rank whose number has stood still for ``timeout_s`` is lost, and a rank that leaves says so, with the error that it
   leaves for, in the place of its number;
4. whichever comes first is kept, and ``on_loss`` is called once: it breaks off whatever waits for the others;
5. a connection to a killed process breaks sooner than its beat is missed. Who finds one broken asks `blame`, which
   listens for a few more periods: to a farewell that names the rank lost first, or to a number that stands still.

So a rank that computes for an hour is not lost, one that is killed, frozen or cut off is, and all others name the same.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import distributed_c10d as c10d

from outsize.errors import LostRankError, OutsizeError

# Periods without a beat after which a rank whose connection is broken is taken to be dead, not just slow to beat.
_SILENT_PERIODS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """What a rank says when it leaves.

    Attributes:
        why: for people; empty where it had come to its end.
        lost: rank that it had found lost, and why it leaves; None where it has not.
    """

    why: str
    lost: int | None

    def text(self) -> str:
        """Return it as it stands in the store."""
        return json.dumps({"why": self.why, "lost": self.lost})

    @classmethod
    def parse(cls, text: str) -> "Farewell | None":
        """Return what stands in the store, or None for a beat."""
        if text.isdigit():
            return None
        fields = json.loads(text)
        return cls(why=fields["why"], lost=fields["lost"])


@dataclass(slots=True)
class _Heard:
    """What was last heard of a rank, and when, on the clock of this one."""

    text: str
    at_s: float


class Liveness:
    """Beats, and listens. Started by `start`, ended by `leave`.

    Args:
        store: of this alone: a store serves one call at a time.
        rank: of this process.
        size: of the group.
        timeout_s: seconds without a beat after which a rank is lost.
        on_loss: called once, from the thread that listens, when a rank is found lost.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, *, timeout_s: float, on_loss: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [peer for peer in range(size) if peer != rank]
        self._timeout_s = timeout_s
        self._period_s = min(timeout_s / 8, 1.0)
        self._on_loss = on_loss
        self._count = 0
        now_s = time.monotonic()
        self._heard = {peer: _Heard("0", now_s) for peer in self._others}
        self._begun: set[int] = set()
        self._lost: LostRankError | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # beats are sent and read by the thread, and by whoever asks for blame
        self._thread = threading.Thread(target=self._run, name="outsize-liveness", daemon=True)
        self._store.set(_key(rank), "0")

    @property
    def lost(self) -> LostRankError | None:
        """The rank that was found lost first, if any."""
        return self._lost

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def leave(self, error: BaseException | None) -> None:
        """Stop, and leave word why; idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        lost = error.rank if isinstance(error, LostRankError) else None
        why = "" if error is None else str(error) if lost is not None else f"{type(error).__name__}: {error}"
        with self._lock:
            _quietly(lambda: self._store.set(_key(self._rank), Farewell(why=why, lost=lost).text()))

    def wait_until_all_left(self, timeout_s: float) -> None:
        """Return when all others have left or are silent, or after ``timeout_s``: for whoever holds the store."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if not _quietly(self._listen):
                return
            if all(Farewell.parse(heard.text) or self._silent(heard) for heard in self._heard.values()):
                return
            time.sleep(0.05)

    def blame(self, peer: int | None, cause: BaseException) -> LostRankError | None:
        """Return who is lost, now that a call has failed with ``cause``; None where all go on beating.

        Args:
            peer: rank whose connection it was; None where that is not known.
            cause: what it failed with.
        """
        began_s = time.monotonic()
        while self._lost is None:
            error = self._told(peer, broken=True) if _quietly(self._listen) else self._store_gone()
            if error is not None:
                self._lost = self._lost or error
                break
            if time.monotonic() - began_s > 2 * _SILENT_PERIODS * self._period_s:
                if peer is None:
                    return None
                self._lost = self._lost or LostRankError(
                    f"rank {peer} is alive, but the connection to it failed or it did not come: "
                    f"{str(cause).partition(chr(10))[0]}",
                    peer,
                )
                break
            time.sleep(self._period_s / 4)
        return self._lost

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            error = self._told() if _quietly(self._listen) else self._store_gone()
            if error is not None and not self._stop.is_set():
                self._lost = self._lost or error
                self._on_loss()
                return

    def _listen(self) -> None:
        """Beat once, and take note of who else has."""
        with self._lock:
            self._count += 1
            if not self._stop.is_set():
                self._store.set(_key(self._rank), str(self._count))
            self._begun |= {
                peer for peer in self._others if peer not in self._begun and self._has_begun(peer)
            }
            begun = sorted(self._begun)
            texts = self._store.multi_get([_key(peer) for peer in begun]) if begun else []
            now_s = time.monotonic()
            for peer, text in zip(begun, (raw.decode() for raw in texts), strict=True):
                if self._heard[peer].text != text:
                    self._heard[peer] = _Heard(text, now_s)

    def _has_begun(self, peer: int) -> bool:
        """Whether a rank has ever beaten: reading what was never written would wait for it."""
        return self._store.check([_key(peer)])

    def _told(self, peer: int | None = None, *, broken: bool = False) -> LostRankError | None:
        """Return who is lost: ``peer`` first, to which a connection failed; silent ones where a call is ``broken``."""
        heard = sorted(self._heard.items(), key=lambda entry: entry[0] != peer)
        farewells = {rank: Farewell.parse(last.text) for rank, last in heard}
        for rank, farewell in farewells.items():
            if farewell is not None and farewell.lost not in (None, self._rank):
                return LostRankError(f"{farewell.why} (found by rank {rank})", farewell.lost)
        for rank, farewell in farewells.items():
            if farewell is not None and farewell.why:
                return LostRankError(f"rank {rank} has ended: {farewell.why}", rank)
        for rank, last in heard:
            quiet_s = time.monotonic() - last.at_s
            if farewells[rank] is not None:
                if broken and peer in (None, rank):
                    return LostRankError(
                        f"rank {rank} has come to its end, and this one has not: did they run the same?", rank
                    )
            elif quiet_s >= self._timeout_s:
                return LostRankError(f"rank {rank} is lost: no heartbeat for {quiet_s:.0f} s", rank)
            elif broken and self._silent(last):
                return LostRankError(
                    f"rank {rank} is lost: its connections are closed and its heartbeat has stopped", rank
                )
        return None

    def _silent(self, heard: _Heard) -> bool:
        return time.monotonic() - heard.at_s >= _SILENT_PERIODS * self._period_s

    def _store_gone(self) -> LostRankError:
        return LostRankError(
            "the meeting place of the ranks (MASTER_ADDR:MASTER_PORT) no longer answers: the node of rank 0 is lost, "
            "or its torchrun has ended",
            0 if self._rank else None,
        )


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _quietly(call: Callable[[], None]) -> bool:
    """Whether ``call`` went well; a store that is gone raises RuntimeErrors of several kinds."""
    try:
        call()
    except OutsizeError:
        raise
    except RuntimeError:
        return False
    return True
