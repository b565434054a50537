"""A run directory of a loop of one's own is that of a run: heartbeat, plan, report, doctor, watchdog."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
import zoo
from outsize.doctor.run_record import read_run
from outsize.errors import ConfigError, StorageError
from outsize.reporting.collect import collect
from outsize.wrapped import loop_records
from outsize.wrapped.module import runner_of
from outsize.wrapped.parameters import HomeParameters
from reference import num_targets
from wrapped.loops import ROOM, streamed_backward, train, wrapped

BATCHES = [zoo.batch("llama", seed=seed, num_sequences=4) for seed in range(4)]
PLACES: dict[str, dict[str, Any]] = {
    "link": {"device": "emulated:1"},
    "disk": {"home": "disk"},
    "workers": {"device": "emulated:2"},
}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_loop_writes_what_report_and_doctor_read(place: dict[str, Any], tmp_path: Path):
    run_dir = tmp_path / "run"
    with wrapped(zoo.build("llama"), microbatches=2, run_dir=run_dir, **place) as model:
        losses = train(
            model,
            BATCHES,
            lambda model: outsize.AdamW(model, lr=0.01),
            streamed_backward,
            lambda model: outsize.clip_grad_norm_(model, 1.0),
        )
        plan = runner_of(model)._plan
        assert plan is not None
        assert json.loads((run_dir / "plan.json").read_text()) == json.loads(json.dumps(plan.to_dict()))
    steps = lines(run_dir)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["loss"] for step in steps] == losses
    assert [step["tokens"] for step in steps] == [num_targets(batch, True) for batch in BATCHES]
    assert all(step["lr"] == 0.01 and step["grad_norm"] > 0 for step in steps)
    assert all(0 <= step["data_s"] < step["seconds"] for step in steps)
    # Loads, gradients and the optimizer of every step: as many bytes in each but the first, which is planned in.
    moved = "bytes_read" if place.get("home") == "disk" else "bytes_up"
    assert len({step[moved] for step in steps}) == 1
    assert steps[0][moved] > 0
    record = read_run(run_dir)
    assert record.about["num_workers"] == plan.layout.num_workers
    assert record.waits()
    assert collect(run_dir)["timeline"] is not None


def test_steps_of_an_optimizer_of_torch_and_of_several_backwards(tmp_path: Path):
    with wrapped(zoo.build("llama"), run_dir=tmp_path / "run", device="emulated:1") as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        means, targets = [], [num_targets(batch, True) for batch in BATCHES[:2]]
        for _ in range(2):
            losses = [streamed_backward(model, batch) for batch in BATCHES[:2]]
            other.step()  # of nothing that is the model's
            optimizer.step()
            optimizer.zero_grad()
            means.append(sum(float(x) * n for x, n in zip(losses, targets, strict=True)) / sum(targets))
    steps = lines(tmp_path / "run")
    assert [step["loss"] for step in steps] == pytest.approx(means)
    assert [(step["lr"], step["tokens"], step["grad_norm"]) for step in steps] == [
        (0.1, sum(targets), None)
    ] * 2


def test_a_loss_of_the_caller_s_own_is_not_called_the_model_s(tmp_path: Path):
    """Neither alone nor added to it, nor in one of several backwards; scaled it is still the model's."""
    with wrapped(zoo.build("llama"), run_dir=tmp_path / "run") as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(*ways: str) -> float:
            for way in ways:
                output = model(**BATCHES[0])
                own = output.logits.square().mean()
                losses = {
                    "model": output.loss,
                    "own": own,
                    "both": output.loss + own,
                    "scaled": output.loss / 2,
                }
                losses[way].backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(output.loss.detach())

        means = [step(*ways) for ways in (["own"], ["both"], ["model", "own"], ["scaled"])]
    steps = lines(tmp_path / "run")
    assert [step["loss"] for step in steps] == [None, None, None, means[3]]
    targets = num_targets(BATCHES[0], True)
    assert [step["tokens"] for step in steps] == [targets, targets, 2 * targets, targets]


def test_a_directory_that_holds_a_run_is_refused_and_the_model_is_as_it_was(tmp_path: Path):
    (tmp_path / "heartbeat.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").touch()
    model = zoo.build("llama")
    with pytest.raises(ConfigError, match="holds a run of outsize train; choose another run_dir"):
        outsize.wrap(model, **ROOM, run_dir=tmp_path)
    model(**BATCHES[0]).loss.backward()


def test_a_job_that_is_queued_again_puts_the_records_of_the_one_before_aside(tmp_path: Path):
    for _ in range(3):
        with wrapped(zoo.build("llama"), run_dir=tmp_path) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(**BATCHES[0]).loss.backward()
            optimizer.step()
    assert [line["step"] for line in lines(tmp_path)] == [1]
    for number in (1, 2):
        assert [line["step"] for line in lines(tmp_path / f"earlier-{number}")] == [1]
    assert not (tmp_path / "earlier-3").exists()


def test_a_directory_that_another_loop_writes_is_refused_by_the_argument_s_name(tmp_path: Path):
    model = zoo.build("llama")
    with wrapped(zoo.build("llama"), run_dir=tmp_path), pytest.raises(StorageError, match="another run_dir"):
        outsize.wrap(model, **ROOM, run_dir=tmp_path)


def test_a_checkpoint_whose_loop_has_no_directory_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    zoo.build("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "heartbeat.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").touch()
    read: list[Any] = []
    monkeypatch.setattr(HomeParameters, "read", lambda *given: read.append(given) or {})
    with pytest.raises(ConfigError, match="choose another run_dir"):
        outsize.load(tmp_path / "model", **ROOM, home="disk", run_dir=tmp_path)
    assert not read


@pytest.mark.parametrize("recorded", [True, False])
def test_passes_without_a_step_take_no_more_memory_the_more_there_are(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop_records, "MOST_EVENTS", 50)
    how: dict[str, Any] = {"run_dir": tmp_path / "run"} if recorded else {}
    with wrapped(zoo.build("llama"), device="emulated:1", **how) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [streamed_backward(model, BATCHES[number]) for number in (0, 1, 2, 3)]
        runner = runner_of(model)
        assert runner._engine.num_noted <= 50  # type: ignore[union-attr]
        records = runner.records
        assert (records is not None) == recorded
        if records is not None:
            assert (len(records._moved), len(records._events)) == (1, 50)
        optimizer.step()
    if recorded:
        targets = [num_targets(batch, True) for batch in BATCHES]
        mean = sum(float(loss) * n for loss, n in zip(losses, targets, strict=True)) / sum(targets)
        assert [(step["loss"], step["bytes_up"] > 0) for step in lines(tmp_path / "run")] == [(mean, True)]


def test_what_a_loop_is_told_of_a_stall_names_no_setting(tmp_path: Path):
    with wrapped(zoo.build("llama"), run_dir=tmp_path) as model:
        records = runner_of(model).records
        assert records is not None
        assert records._watchdog._reason == "more than 600 s"


def test_only_passes_are_watched(tmp_path: Path):
    with wrapped(zoo.build("llama"), run_dir=tmp_path / "run") as model:
        records = runner_of(model).records
        assert records is not None
        passes, seen = records._passes, []
        before = [passes.num_ended for _ in range(2)]
        assert before[0] != before[1]  # between passes there is progress at every look
        streamed_backward(model, BATCHES[0])
        engine = runner_of(model)._engine
        inner = engine.submit  # type: ignore[union-attr]

        def submit(*given: Any) -> Any:
            seen.append(passes.engine is engine)
            return inner(*given)

        engine.submit = submit  # type: ignore[method-assign, union-attr]
        model(**BATCHES[0])
        assert seen
        assert all(seen)
        assert passes.engine is None


def test_a_model_that_is_dropped_is_not_kept_by_its_records(tmp_path: Path):
    model = outsize.wrap(zoo.build("llama"), **ROOM, run_dir=tmp_path / "run")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamed_backward(model, BATCHES[0])
    optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert [step["step"] for step in lines(tmp_path / "run")] == [1]
