"""A short run of many steps: `bench/bench_soak.py` is the long one, and looks at memory too."""

import os
import threading
from pathlib import Path

import pytest

from outsize.training.run import train
from tiny import tiny_run

STEPS = 60


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
    # The first save starts the lane that saves; while it saves, a file is open. At the end no batches are left to make.
    early, late = seen[25:40], seen[42:-3]
    assert min(files for files, _ in early) == min(files for files, _ in late)
    assert max(threads for _, threads in early) == max(threads for _, threads in late)
