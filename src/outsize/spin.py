"""What libraries read of the environment once: how long threads of OpenMP spin, and how products repeat their bits.

Several lanes compute at once: threads that spin long take the cores from the others, and those that do not
spin sleep thousands of times a step (`outsize.runtime.engine.executor`).
"""

import os
import sys

# Turns, for GOMP_SPINCOUNT; a turn takes 10 to 50 ns.
SPIN_TURNS = "5000"
_SAID_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_late: list[str] = []


def limit_spinning() -> None:
    """Have threads of OpenMP spin for a moment alone, unless the environment says how long; too late beside a torch."""
    if any(name in os.environ for name in _SAID_BY):
        return
    if "torch" in sys.modules and sys.platform == "linux":
        _late.append(
            "torch was loaded before outsize, so its threads spin while they wait, and a step beside other work may "
            f"take several times as long: import outsize first, or set GOMP_SPINCOUNT={SPIN_TURNS} in the environment"
        )
    os.environ["GOMP_SPINCOUNT"] = SPIN_TURNS  # read by OpenMP when torch is loaded


def repeat_products() -> None:
    """Have cuBLAS repeat its bits where it is asked to: it reads how once, before its first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def late_warning() -> str | None:
    """Return what is to be said of a torch that was loaded too early: once, then None."""
    return _late.pop() if _late else None
