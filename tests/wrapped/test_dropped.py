"""Models that are dropped, left open, or fail: nothing of ours outlives them, and every script ends."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import outsize
import zoo
from wrapped.loops import ROOM

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
MOST_S = 300  # of a script that takes seconds; only one that never ends reaches it
SCRIPT = f"""
import gc, sys
sys.path[:0] = {[str(SOURCE), str(TESTS)]!r}
import torch
import outsize, zoo

BATCH = zoo.batch("llama", num_sequences=2)

def make(index, home=None):
    home = home or ("host", "disk")[index % 2]
    device = ("cpu", "emulated:1")[index // 2 % 2]
    return outsize.wrap(zoo.build("llama"), **{{**{ROOM!r}, "home": home, "device": device}})

def train(model):
    optimizer = outsize.AdamW(model)
    model(**BATCH).loss.backward()
    optimizer.step()

def generate(model):
    with torch.inference_mode():
        model.generate(BATCH["input_ids"], max_new_tokens=2, do_sample=False)

def fail(model):
    try:
        model(input_ids=torch.full((2, 4), 10**6))
    except Exception:
        pass
    else:
        raise AssertionError("there is no such token")
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    script = SCRIPT + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=MOST_S)


@pytest.mark.parametrize(
    "body",
    [
        "models = [make(index) for index in range(9)]\nfor model in models[:4]: train(model)\ngenerate(models[5])",
        "for index in range(9):\n    model = make(index)\n    (train, generate, fail)[index % 3](model)",
        "model = make(3)\ngenerate(model)\nvars(model).clear()\ndel model\ngc.collect()",
    ],
    ids=["all open", "dropped one after another", "gone while it generates"],
)
def test_a_script_that_closes_nothing_ends(body: str):
    done = run(body)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_script_that_fails_in_the_middle_of_a_step_ends(home: str):
    done = run(f"model = make(0, {home!r})\ntrain(model)\nmodel(**BATCH)\nraise SystemExit(7)")
    assert done.returncode == 7, done.stderr
    done = run(f"model = make(2, {home!r})\ngenerate(model)\ntrain(model)\nraise KeyError('mine')")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr


def test_models_that_were_dropped_leave_nothing():
    """No thread, no file and no memory: of every form, trained, generated with and broken."""
    done = run(
        """
        import os, threading

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        def once(index):
            model = make(index)
            if index % 4 < 3:
                (train, generate, fail)[index % 4](model)

        def left():
            gc.collect()
            for thread in threading.enumerate():
                if thread is not threading.main_thread():
                    thread.join()
            return len(os.listdir("/proc/self/fd"))

        for index in range(8):
            once(index)
        files, memory = left(), resident()
        for index in range(30):
            once(index)
        assert left() == files, (left(), files)
        assert resident() < memory + 25 * 2**20, (resident(), memory)
        """
    )
    assert done.returncode == 0, done.stderr


def test_weights_that_somebody_keeps_outlive_their_model():
    model = outsize.wrap(zoo.build("llama"), **{**ROOM, "home": "host"})
    want = {name: value.clone() for name, value in zoo.build("llama").state_dict().items()}
    kept = dict(model.state_dict())
    del model
    gc.collect()
    assert all((kept[name] == value).all() for name, value in want.items())
