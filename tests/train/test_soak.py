"""A short run of many steps: `bench/bench_soak.py` is the long one, and looks at memory too."""

import os
import threading
from pathlib import Path

import pytest

from outsize.testing.tiny import tiny_run
from outsize.train.run import train

STEPS, WARM = 60, 10


@pytest.mark.parametrize("home", ["host", "disk"])
def test_steps_open_no_files_and_start_no_threads(tmp_path: Path, home: str):
    seen: list[tuple[int, int]] = []

    def look(_: object) -> None:
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))

    train(
        tiny_run(tmp_path, train={"steps": STEPS, "save_every": 20}, memory={"home": home, "offload": True}),
        progress=look,
    )
    assert len(seen) == STEPS
    # Two batches ahead there is nothing left to make, and the thread that makes them ends.
    assert len(set(seen[WARM:-3])) == 1
