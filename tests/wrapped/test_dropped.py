"""Models that are dropped, left open, or fail: nothing of ours outlives them, and every script ends."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import outsize
import zoo
from wrapped.loops import ROOM

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
MOST_S = 300  # of a script that takes seconds; only one that never ends reaches it
SCRIPT = f"""
import gc, json, os, sys
sys.path[:0] = {[str(SOURCE), str(TESTS)]!r}
import torch
import outsize, zoo

BATCH = zoo.batch("llama", num_sequences=2)
zoo.build("llama")  # imported before any fork

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

for name, body in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{{sys.argv[2]}}/{{name}}", os.O_CREAT | os.O_WRONLY), 2)
        exec(body)
        sys.exit()
    print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)
"""


CLOSE_NOTHING = {
    "all open": "models = [make(index) for index in range(9)]\n"
    "for model in models[:4]: train(model)\ngenerate(models[5])",
    "one": "model = make(0)\ntrain(model)",
    "dropped": "for index in range(9):\n    model = make(index)\n    (train, generate, fail)[index % 3](model)",
    "gone": "model = make(3)\ngenerate(model)\nvars(model).clear()\ndel model\ngc.collect()",
}
FAIL = {
    f"{kind} {home}": body.format(home)
    for home in ("host", "disk")
    for kind, body in {
        "ends": "model = make(0, {!r})\ntrain(model)\nmodel(**BATCH)\nraise SystemExit(7)",
        "breaks": "model = make(2, {!r})\ngenerate(model)\ntrain(model)\nraise KeyError('mine')",
    }.items()
}
LEAVES_NOTHING = """
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


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, str]]:
    """Run all scripts to their ends, forked from one that has imported; returns how one ended and its stderr."""
    directory = tmp_path_factory.mktemp("scripts")
    bodies = {**CLOSE_NOTHING, **FAIL, "leaves nothing": LEAVES_NOTHING}
    command = [sys.executable, "-c", SCRIPT, json.dumps(bodies), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=True)
    codes = dict(map(json.loads, done.stdout.splitlines()))
    return lambda name: (codes[name], (directory / name).read_text())


@pytest.mark.parametrize("name", CLOSE_NOTHING)
def test_a_script_that_closes_nothing_ends(name: str, ended: Callable[[str], tuple[int, str]]):
    code, stderr = ended(name)
    assert code == 0, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("name", FAIL)
def test_a_script_that_fails_in_the_middle_of_a_step_ends(name: str, ended: Callable[[str], tuple[int, str]]):
    code, stderr = ended(name)
    assert code == (7 if name.startswith("ends") else 1), stderr
    assert name.startswith("ends") or "KeyError: 'mine'" in stderr


def test_models_that_were_dropped_leave_nothing(ended: Callable[[str], tuple[int, str]]):
    """No thread, no file and no memory: of every form, trained, generated with and broken."""
    code, stderr = ended("leaves nothing")
    assert code == 0, stderr


def test_weights_that_somebody_keeps_outlive_their_model():
    model = outsize.wrap(zoo.build("llama"), **{**ROOM, "home": "host"})
    want = {name: value.clone() for name, value in zoo.build("llama").state_dict().items()}
    kept = dict(model.state_dict())
    del model
    gc.collect()
    assert all((kept[name] == value).all() for name, value in want.items())
