import json
from pathlib import Path
from typing import Any

import pytest

from cli.command_line import status_of
from outsize.config import load_config
from outsize.config.load import dump_config
from outsize.training.short_runs import ShortRun, best_of, sizes_around, sweep
from support import make_run


def row(tokens: int, rate: float, **changes: Any) -> ShortRun:
    return ShortRun(tokens_per_step=tokens, tokens_per_s=rate, memory_bytes={}, **changes)


def test_each_size_is_trained_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    said: list[str] = []
    rows = sweep(config, [32, 128], 2, said.append)
    assert [(found.tokens_per_step, found.microbatches) for found in rows] == [(32, 2), (128, 2)]
    for found in rows:
        assert found.tokens_per_s == pytest.approx(found.tokens_per_step / found.step_s)
        assert found.memory_bytes["device"] > 0
    assert said == ["32 tokens per step", "128 tokens per step"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_size_that_does_not_fit_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = make_run(tmp_path, memory={"device_memory": "64KiB"})
    (found,) = sweep(config, [64], 2)
    assert found.tokens_per_s == 0
    assert "first try" in found.why_not
    assert best_of([found]) is None


def test_the_best_is_the_smallest_size_that_is_nearly_the_fastest():
    rows = [row(64, 90.0), row(128, 99.0), row(256, 100.0), row(512, 0.0, why_not="too large")]
    assert best_of(rows) is rows[1]


def test_sizes_are_those_around_the_run(tmp_path: Path):
    assert sizes_around(make_run(tmp_path)) == [32, 64, 128, 256, 512]
    assert sizes_around(make_run(tmp_path, train={"tokens_per_step": 48})) == [48, 96, 192, 384]


def test_the_command_prints_a_table_and_writes_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(dump_config(make_run(tmp_path)))
    asked = ("sweep", "run.yaml", "--tokens-per-step", 32, "--tokens-per-step", 64, "--steps", 2)
    assert status_of(*asked, "--output", "best.yaml", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [found["tokens_per_step"] for found in told["sizes"]] == [32, 64]
    assert load_config(Path("best.yaml")).tokens_per_step == told["best"]
    assert status_of("sweep", "run.yaml", "--tokens-per-step", 40) == 2
    assert "not a multiple of data.seq_len (16); try 32" in capsys.readouterr().err
    assert status_of("sweep", "run.yaml", "--output", "nowhere/best.yaml") == 2
