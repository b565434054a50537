"""Evaluations: the loss of a resident forward, no bit of training changed, the best step kept, and an end when due."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.checkpoint.checkpoint_state import best, latest
from outsize.config import Config
from outsize.errors import ConfigError, DataError
from outsize.session.job.prepare import prepare
from outsize.session.steps import Measure, microbatches_of
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.evaluation import read_evaluations
from outsize.training.records import StepRecord
from outsize.training.resident import materialise
from outsize.training.run import train
from outsize.training.run_data import open_dataset, tell_of_overlap
from support import end_of, make_run

WAYS: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"memory": {"home": "disk"}},
    "emulated": {"memory": {"device": "emulated:1"}},
    "saved inputs": {"memory": {"offload": True}},
    "the model's own loss": {"train": {"loss": "model"}},
    "bf16": {"model": {"dtype": "bf16"}},
}


def run_of(directory: Path, name: str = "llama", **sections: Any) -> Config:
    return make_run(directory, name, **{"eval": {"split": 0.2, "every": 2}, **sections})


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_that_of_a_resident_forward_of_the_same_microbatches(way: str, tmp_path: Path) -> None:
    config = run_of(tmp_path, **WAYS[way])
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    with open_dataset(config, prepared, tmp_path, lambda _: None, measured=True) as held:
        with StreamedTrainer(prepared, tmp_path / "store") as trainer:
            trainer.fill()
            size = trainer.num_measured
            firsts = range(0, held.num_sequences, size)
            batches = [held.sequences(first, min(size, held.num_sequences - first)) for first in firsts]
            streamed = trainer.evaluate(batches)
            count = trainer._microbatches_measured
        with materialise(prepared), torch.no_grad():
            model = prepared.split.model.eval()
            resident = Measure()
            for batch in batches:
                loss = 0.0
                for part in microbatches_of(batch, min(count, batch.num_sequences)):
                    labels = part.inputs["labels"]
                    if prepared.chunk_tokens is None:
                        loss += float(model(**part.inputs).loss / part.divisor)
                        continue
                    logits = model(**{k: v for k, v in part.inputs.items() if k != "labels"}).logits.float()
                    wanted = labels[:, 1:].reshape(-1)
                    total = torch.nn.functional.cross_entropy(
                        logits[:, :-1].reshape(len(wanted), -1), wanted, ignore_index=-100, reduction="sum"
                    )
                    loss += float(total / part.targets)
                resident = resident.and_then(loss, batch.num_target_tokens)
    assert streamed.tokens == resident.tokens > 0
    # The head takes the tokens in chunks here and all at once there: the sum is taken in another order.
    exact = prepared.chunk_tokens is None
    assert streamed.loss == (resident.loss if exact else pytest.approx(resident.loss, rel=1e-6))


def test_the_loss_of_a_batch_is_to_the_bit_the_one_that_its_step_has(tmp_path: Path) -> None:
    """A step and an evaluation take the same chunks of the same microbatches; there is no dropout here."""
    config = make_run(tmp_path)
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    with (
        open_dataset(config, prepared, tmp_path, lambda _: None) as dataset,
        StreamedTrainer(prepared, tmp_path / "store") as trainer,
    ):
        trainer.fill()
        batches = [dataset.batch(step, config.sequences_per_step) for step in range(3)]
        steps = trainer.steps(iter(batches))
        for batch in batches:
            measured = trainer.evaluate([batch])
            outcome = next(steps)
            assert (measured.loss, measured.tokens) == (outcome.loss, outcome.tokens)


@pytest.mark.parametrize("way", ["host", "disk", "emulated", "saved inputs"])
def test_evaluating_changes_no_bit_of_training(way: str, tmp_path: Path) -> None:
    """A model with dropout, over the same sequences; what is held out is so in both."""
    rare = {"split": 0.2, "every": 0, "keep_best": False}
    often = {"split": 0.2, "every": 1, "keep_best": False}
    sections = {key: value for key, value in WAYS[way].items() if key != "eval"}
    ends = []
    for name, how in (("rare", rare), ("often", often)):
        train_section = {"run_dir": str(tmp_path / name), **sections.get("train", {})}
        train(run_of(tmp_path, "gpt2", **{**sections, "eval": how, "train": train_section}))
        ends.append(end_of(tmp_path / name))
        assert len(read_evaluations(tmp_path / name)) == (1 if name == "rare" else 4)
    one, other = ends
    assert one.keys() == other.keys()
    assert [k for k, v in one.items() if isinstance(v, torch.Tensor) and not torch.equal(v, other[k])] == []


def test_what_was_measured_is_told_everywhere(tmp_path: Path) -> None:
    said: list[str] = []
    records: list[StepRecord] = []
    result = train(run_of(tmp_path), progress=records.append, announce=said.append)
    found = read_evaluations(tmp_path / "run")
    assert [record.step for record in found] == [2, 4]
    assert result.eval_loss == found[-1].loss
    lines = [json.loads(line) for line in (tmp_path / "run" / "heartbeat.jsonl").read_text().splitlines()]
    assert [line["eval_loss"] for line in lines] == [None, found[0].loss, None, found[1].loss]
    assert lines[1]["eval_perplexity"] == pytest.approx(torch.tensor(found[0].loss).double().exp().item())
    assert len([line for line in said if line.startswith("evaluation after step")]) == 2
    assert any(line.startswith("held out for evaluation: ") for line in said)


def test_the_best_step_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """A learning rate that ruins the model makes the first evaluation the best."""
    config = run_of(
        tmp_path,
        eval={"split": 0.2, "every": 1},
        optimizer={"lr": 3.0, "max_grad_norm": 0.0, "schedule": "linear", "warmup_steps": 1},
        train={"steps": 6, "save_total_limit": 1},
    )
    result = train(config)
    found = read_evaluations(tmp_path / "run")
    step = min(found, key=lambda record: record.loss or 0.0).step
    kept = best(tmp_path / "run")
    assert kept is not None
    assert kept.name == f"step-{step:08d}"
    assert result.best_dir == str(kept)
    newest = latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "step-00000006"
    assert {p.name for p in newest.parent.iterdir() if p.is_dir()} == {kept.name, newest.name}


def test_a_run_ends_early_where_nothing_gets_better_and_knows_it_when_it_goes_on(tmp_path: Path) -> None:
    bad = {"lr": 3.0, "max_grad_norm": 0.0, "schedule": "linear", "warmup_steps": 1}
    how = {"split": 0.2, "every": 1, "patience": 2}
    said: list[str] = []
    result = train(run_of(tmp_path, eval=how, optimizer=bad, train={"steps": 50}), announce=said.append)
    assert result.stopped_early
    assert result.steps < 50
    assert any("of the last 2 evaluations none was better than that after step" in line for line in said)
    assert latest(tmp_path / "run") is not None
    again = train(run_of(tmp_path, eval=how, optimizer=bad, train={"steps": 50, "resume": "auto"}))
    assert again.stopped_early
    assert again.steps == result.steps + 1


def test_data_of_its_own_and_a_limit(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("other words, never trained. " * 40)
    train(run_of(tmp_path, eval={"data": str(tmp_path / "other.txt"), "sequences": 3}))
    (record,) = read_evaluations(tmp_path / "run")
    assert record.tokens == 3 * 15


def test_data_that_are_trained_and_measured_are_told(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("other words, never trained. " * 40)
    data = run_of(tmp_path).data.path
    for path, told in (
        (tmp_path / "other.txt", 0),
        (data, 1),
        (Path(data).parent / "." / Path(data).name, 1),
    ):
        said: list[str] = []
        tell_of_overlap(run_of(tmp_path, eval={"data": str(path)}), said.append)
        assert [f"{data} is trained on as well" in line for line in said] == [True] * told


def test_what_is_held_out_is_not_trained(tmp_path: Path) -> None:
    config = run_of(tmp_path, eval={"split": 0.3})
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    rows = []
    for measured in (False, True):
        with open_dataset(config, prepared, tmp_path, lambda _: None, measured=measured) as part:
            rows.append(part.sequences(0, part.num_sequences).input_ids)
    with open_dataset(make_run(tmp_path), prepared, tmp_path, lambda _: None) as whole:
        everything = whole.sequences(0, whole.num_sequences).input_ids
    assert sorted(torch.cat(rows).tolist()) == sorted(everything.tolist())
    assert len(rows[1]) == round(0.3 * len(everything))


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one device of one process measures"):
        train(run_of(tmp_path, memory={"device": "emulated:2"}))
    with pytest.raises(ValueError, match=r"give eval\.data or eval\.split"):
        run_of(tmp_path, eval={"split": 0.2, "data": "x"})
    (tmp_path / "data.txt").write_text("0123456789abcdef" * 2)
    with pytest.raises(DataError, match="would hold out all"):
        train(run_of(tmp_path, eval={"split": 0.9}))
