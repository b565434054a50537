"""What benches are asked for and cannot answer: said before they work for minutes, and not by a traceback."""

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
TIME_STEPS = ("activations", "packed_claims", "speed", "transport", "truth", "wrap")


@pytest.mark.parametrize("name", TIME_STEPS)
def test_a_bench_is_asked_for_steps_that_it_times(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [name, "--steps", "1"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench_{name}").main()
    assert ended.value.code == 2
    assert "argument --steps: 1 would time nothing: the first " in capsys.readouterr().err


def test_waits_that_are_explained_are_in_the_source(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    waits = importlib.import_module("bench_waits")
    source = BENCH.parent / "src" / "outsize"
    missing = [row for row in waits.EXPLAINED if row[1] not in (source / row[0]).read_text(encoding="utf-8")]
    files = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    missing += [near for near in waits.NEAR if not any(file.startswith(near) for file in files)]
    assert not missing


GPU_BENCHES = {
    "bench_8b_step": "--tiny --device emulated:1 --device-memory 64MiB --steps 2 --seq-len 64 --microbatches 2 "
    "--most-layers 2 --deterministic off",
    "bench_decode": "--device cpu --numel 100000",
}


@pytest.mark.parametrize("name", GPU_BENCHES)
def test_a_bench_for_a_gpu_ends_without_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It would otherwise break unseen, and be found broken in the minutes for which a GPU is lent."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH / "gpu"))
    results = ["--results", str(tmp_path)] if name == "bench_8b_step" else []
    monkeypatch.setattr(sys, "argv", [name, *GPU_BENCHES[name].split(), *results])
    importlib.import_module(name).main()
    assert capsys.readouterr().out


# In the place of Python: notes each call beside what it was told of devices and memory, and hangs where asked to.
PYTHON = """#!/bin/sh
exec 3>> "$CALLS"
printf '%s|%s|%s|%s\\n' "$*" "${CUDA_VISIBLE_DEVICES-all}" "${OUTSIZE_TEST_DEVICE-}" "${PYTORCH_ALLOC_CONF-}" >&3
case "$*" in *"$HANGS"*) exec sleep 30;; esac
"""


def run_all(
    directory: Path, *names: str, hangs: str = "nothing", **settings: str
) -> tuple[list[list[str]], str]:
    """Return what `run_all.sh` calls, and what it says."""
    python, calls = directory / "python", directory / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    told = {
        "PYTHON": str(python),
        "CALLS": str(calls),
        "HANGS": hangs,
        "INSTALL": "0",
        "RESULTS": str(directory),
    }
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    script = [str(BENCH / "gpu" / "run_all.sh"), *names]
    done = subprocess.run(script, env=clean | told | settings, capture_output=True, text=True, check=False)
    return [line.split("|") for line in calls.read_text().splitlines()], done.stdout


def test_parts_on_a_gpu_come_in_order_and_hide_it_from_the_device_that_is_made_up(tmp_path: Path):
    calls, said = run_all(tmp_path)
    words = ("bench_decode.py", "outsize verify", "not slow) tests/gpu", "bench_8b_step.py", "outsize probe")
    words = (*words, "cuda and slow", "--accelerator=late")
    texts = [call[0].replace("not slow tests", "not slow) tests") for call in calls]
    first = [next(index for index, text in enumerate(texts) if word in text) for word in words]
    assert first == sorted(first)
    assert "all done in" in said
    assert [call[1:3] for call in calls if "--accelerator=late" in call[0]] == [["", "late:0"]]
    assert all("--junitxml" in call[0] for call in calls if "-m pytest" in call[0])
    # Once as users have it, and once with segments that grow.
    assert [bool(call[3]) for call in calls if "bench_8b_step" in call[0]] == [False, True]


def test_all_groups_together_end_in_less_than_28_minutes_and_the_first_in_14(tmp_path: Path):
    """By their limits, whatever their parts take; and each part of the first has its seconds within them."""
    text = (BENCH / "gpu" / "run_all.sh").read_text()
    seconds = {name: int(most) for name, most in re.findall(r"\[(\w+)\]=(\d+)", text)}
    groups = re.search(r'"\$\{@:-([\w ]+)\}"', text)
    assert groups is not None
    in_all = sum(seconds[name] for name in groups[1].split())
    assert in_all <= 28 * 60 - 50  # packages are installed before
    _, said = run_all(tmp_path, "first")
    assert "all done in" in said
    limits = [int(found) for found in re.findall(r"^== .*: at most (\d+) s$", said, re.MULTILINE)]
    assert len(limits) == len(re.findall(r"^== .*: done in", said, re.MULTILINE)) == 8
    assert sum(limits) <= seconds["first"] <= 14 * 60


def test_a_part_that_hangs_costs_no_other_its_results(tmp_path: Path):
    began = time.monotonic()
    calls, said = run_all(tmp_path, "decode", "probe", hangs="bench_decode.py", ALL_S="2")
    assert time.monotonic() - began < 20
    assert "== decode: FAILED" in said
    assert "== probe: FAILED, no time is left" in said
    assert not any("outsize probe" in call[0] for call in calls)
