"""Do wrapped models that are opened and dropped leave anything? A thousand of them in one process, in any order.

Each is trained a step, generates, fails in the middle of a step, or is left as it is, over either home and device; then
it is unwrapped, or dropped at once, or together with some others. Threads, files and resident memory are counted before
and after.

    python bench/bench_dropped.py                    # some minutes
    python bench/bench_dropped.py --models 100
"""

import argparse
import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common

WARM = 50
PATIENCE_S = 30
MOST_HELD = 4


def use(model: Any, how: str, batch: dict[str, Any]) -> None:
    """Do with a model what people do, and what goes wrong."""
    import torch

    import outsize

    if how == "train":
        optimizer = outsize.AdamW(model)
        model(**batch).loss.backward()
        optimizer.step()
    elif how == "generate":
        with torch.inference_mode():
            model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
    elif how == "fail":
        try:
            model(input_ids=torch.full((2, 4), 10**6))
        except Exception:
            return
        raise AssertionError("there is no such token")
    elif how == "half a step":
        model(**batch)


def left() -> dict[str, int]:
    """Count what is open once everything that was dropped is gone: a step that is under way keeps its model."""
    deadline = time.monotonic() + PATIENCE_S
    gc.collect()
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    return {"threads": threading.active_count(), "files": files, "rss_bytes": common.rss_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import outsize
    import zoo

    chance, batch = random.Random(args.seed), zoo.batch("llama", num_sequences=2)
    room = dict.fromkeys(("device_memory", "host_memory", "disk_memory"), "1GiB")
    held: list[Any] = []
    counted = []
    for number in range(args.models + WARM):
        if number >= WARM and (number - WARM) % (args.models // 4) == 0:
            held.clear()
            counted.append(left())
        place = {"home": chance.choice(("host", "disk")), "device": chance.choice(("cpu", "emulated:1"))}
        model = outsize.wrap(zoo.build("llama"), **room, **place)
        use(model, chance.choice(("train", "generate", "fail", "half a step", "nothing")), batch)
        if chance.random() < 0.2:
            outsize.unwrap(model)
        held.append(model)
        del model
        if len(held) >= MOST_HELD:
            held = chance.sample(held, chance.randrange(MOST_HELD))
    held.clear()
    counted.append(left())
    at = [WARM + args.models * quarter // 4 for quarter in range(5)]
    rows = [(name, *(found[name] for found in counted)) for name in counted[0]]
    common.print_table(("left after", *map(str, at)), rows, title="Dropped")
    result = {"bench": "dropped", "machine": common.machine(), "models": at, "left": counted}
    common.finish(result, args.output)


if __name__ == "__main__":
    main()
