"""What benches are asked for and cannot answer: said before they work for minutes, and not by a traceback."""

import importlib
import sys
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
