import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from outsize.config import load_config
from outsize.errors import DataError, InfeasiblePlanError
from outsize.planner.program.program import parse
from outsize.training.forecast import plan
from outsize.training.records import StepRecord
from outsize.training.run import train
from support import make_run


@pytest.fixture(scope="module", params=["host", "disk"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A run, its result, the records that its progress was told, and the lines that it announced."""
    directory = tmp_path_factory.mktemp(request.param)
    records: list[StepRecord] = []
    said: list[str] = []
    config = make_run(directory, memory={"home": request.param})
    result = train(config, progress=records.append, announce=said.append)
    return config, result, records, said


def test_a_result_sums_up_its_steps(finished):
    config, result, records, _ = finished
    assert result.steps == len(records) == 4
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert result.loss == records[-1].loss
    assert result.budget_bytes == 2**30
    assert result.run_dir == config.train.run_dir
    assert result.skipped_steps == 0
    assert 0 <= result.stall_share <= 1
    assert result.tokens_per_s == pytest.approx(
        sum(r.tokens for r in records) / sum(r.seconds for r in records)
    )
    assert all(record.tokens == 4 * 15 for record in records)  # packed: all but the first of each sequence


def test_every_byte_of_disk_is_counted_once(finished):
    config, result, records, _ = finished
    traffic = plan(config).traffic
    if config.memory.home == "host":
        assert result.bytes_read == result.bytes_written == 0
    else:
        assert (result.bytes_read, result.bytes_written) == (4 * traffic.disk_read, 4 * traffic.disk_written)
        assert sum(record.bytes_read for record in records) <= result.bytes_read
    assert [record.bytes_up for record in records[1:]] == pytest.approx([traffic.up] * 3, rel=0.5)


def test_a_run_directory_tells_what_happened(finished):
    config, result, records, _ = finished
    run_dir = Path(result.run_dir)
    beats = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]
    assert [beat["loss"] for beat in beats] == [record.loss for record in records]
    assert load_config(run_dir / "config.yaml", []) == config
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["train"]["steps"] == 4
    told = json.loads((run_dir / "plan.json").read_text())
    assert parse("\n".join(told["program"])) == plan(config).program
    events = json.loads((run_dir / "timeline.json").read_text())
    assert any("FB" in event.get("name", "") for event in events["traceEvents"])
    assert not [path.name for path in run_dir.rglob("*") if "partial" in path.name]
    assert not (run_dir / "store" / "home.bin").exists()


def test_the_result_is_a_trained_model(finished):
    config, result, records, _ = finished
    model = AutoModelForCausalLM.from_pretrained(result.export_dir)
    before = AutoModelForCausalLM.from_pretrained(config.model.path)
    changed = [
        not torch.equal(one, other)
        for one, other in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert all(changed)
    assert records[-1].loss < records[0].loss


def test_what_was_found_and_chosen_is_announced(finished):
    _, result, _, said = finished
    text = "\n".join(said)
    assert "LlamaForCausalLM" in text
    assert "parameters in 5 units, fp32, attention sdpa" in text
    assert "training state" in text
    assert f"saved {result.export_dir}" in text


def test_the_same_run_again_is_the_same_run(tmp_path: Path):
    """And torch's random numbers are nobody's business: neither taken from outside nor left changed."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        records: list[StepRecord] = []
        train(make_run(tmp_path, train={"run_dir": str(tmp_path / f"run{seed}")}), progress=records.append)
        losses.append([record.loss for record in records])
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.are_deterministic_algorithms_enabled()
    assert losses[0] == losses[1]


def test_other_memory_gives_the_same_losses(tmp_path: Path):
    found = []
    for number, memory in enumerate(
        ({"home": "host"}, {"home": "disk", "slots": 1}, {"device": "emulated:1"})
    ):
        records: list[StepRecord] = []
        run = make_run(tmp_path, train={"run_dir": str(tmp_path / f"run{number}")}, memory=memory)
        train(run, progress=records.append)
        found.append([(record.loss, record.grad_norm) for record in records])
    assert found[0] == found[1] == found[2]


def test_a_plan_writes_nothing(tmp_path: Path):
    config = make_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert len(plan(config).program) > 20
    assert sorted(tmp_path.rglob("*")) == before


def test_settings_without_effect_are_noted(tmp_path: Path):
    said: list[str] = []
    train(make_run(tmp_path, train={"steps": 1}, memory={"link_gb_per_s": 1.0}), announce=said.append)
    assert any(line.startswith("note: memory.link_gb_per_s has no effect") for line in said)


def test_a_run_that_cannot_start_leaves_nothing_and_the_next_one_works(tmp_path: Path):
    with pytest.raises(InfeasiblePlanError):
        train(make_run(tmp_path, memory={"device_memory": 1000}))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError):
        train(make_run(tmp_path, data={"path": str(empty)}))
    assert not (tmp_path / "run" / "heartbeat.jsonl").exists()
    assert train(make_run(tmp_path)).steps == 4


def test_an_error_in_progress_ends_the_run_cleanly(tmp_path: Path):
    """Whoever watches may raise: no thread stays, and what was saved stays."""

    def raising(record: StepRecord) -> None:
        if record.step == 3:
            raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"):
        train(make_run(tmp_path, train={"save_every": 1}), progress=raising)
    assert train(make_run(tmp_path, train={"resume": "auto"})).steps == 4
