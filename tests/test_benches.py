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
