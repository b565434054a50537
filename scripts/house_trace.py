"""Count what one reads to follow a run: files entered before the first LOAD, in a steady step, holders of the config.

Trains a Llama of some thousand parameters for a few steps in a temporary directory, with a profiler on every thread.

    python scripts/house_trace.py              # the counts
    python scripts/house_trace.py --files      # and the files behind them
"""

import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = str(ROOT / "src" / "outsize") + "/"
sys.path.insert(0, str(ROOT / "tests"))
STEADY_STEP = 5


class Trace:
    """Files and functions of the package that are entered, by part of the run.

    Attributes:
        files: by part, 0 until the first LOAD, then the number of the step.
        holders: functions that a `Config` is handed to, in all parts.
    """

    def __init__(self, config_type: type) -> None:
        self.files: defaultdict[int, set[str]] = defaultdict(set)
        self.holders: set[tuple[str, str]] = set()
        self._config_type, self._part, self._loaded = config_type, -1, False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note one call; see `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        name = code.co_filename.removeprefix(SOURCE)
        if code.co_qualname == "WeightOps.load" and not self._loaded:
            self._loaded, self._part = True, 0
        elif code.co_qualname == "Engine.begin" and self._loaded:
            self._part += 1
        self.files[self._part].add(name)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(each), self._config_type) for each in arguments):
            self.holders.add((name, code.co_qualname))


def main() -> int:
    """Train, and print the counts."""
    from outsize.config import Config
    from outsize.training.run import train
    from tiny import tiny_run

    trace = Trace(Config)
    with tempfile.TemporaryDirectory() as directory:
        memory = {"device": "emulated:1", "home": "host", "device_memory": "64MiB"}
        config = tiny_run(Path(directory), memory=memory, train={"steps": STEADY_STEP + 3})
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            train(config)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    before, steady = trace.files[-1], trace.files[STEADY_STEP]
    rooms = {str(Path(name).parent) for name, _ in trace.holders}
    print(f"{len(before):>5}  files entered until the first LOAD (goal 110)")
    print(f"{len(steady):>5}  files entered in a steady step (goal 45)")
    print(
        f"{len(trace.holders):>5}  functions that a config is handed to, in {len(rooms)} rooms (goal 30 in 15)"
    )
    if "--files" in sys.argv[1:]:
        for title, names in (("until the first LOAD", before), ("steady step", steady)):
            print(f"\n{title}:", *sorted(names), sep="\n  ")
        print("\na config:", *sorted(f"{name}: {function}" for name, function in trace.holders), sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
