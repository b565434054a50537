"""How long a run is, said by how often its data are used; and the rates of its schedule."""

from pathlib import Path

import pytest

from outsize.errors import ConfigError
from outsize.session.steps import LearningRateSchedule
from outsize.training.records import StepRecord
from outsize.training.run import train
from support import assert_same_end, in_dir, make_run


def test_epochs_are_whole_steps_over_the_data_and_the_same_run_as_those_steps(tmp_path: Path) -> None:
    """Seven sequences, four to a step: two epochs are fourteen sequences, which take four steps."""
    (tmp_path / "data.txt").write_text("0123456789abcdef" * 7)
    schedule = {"schedule": "cosine", "min_lr": 1e-5, "warmup_ratio": 0.25}
    said: list[str] = []
    by_epochs = make_run(tmp_path, train={"epochs": 2.0}, optimizer=schedule)
    result = train(in_dir(by_epochs, tmp_path / "epochs"), announce=said.append)
    assert result.steps == 4
    assert "2 epochs of 7 sequences are 4 steps of 4" in said
    train(in_dir(make_run(tmp_path, train={"steps": 4}, optimizer=schedule), tmp_path / "steps"))
    assert_same_end(tmp_path / "epochs", tmp_path / "steps")


def test_a_run_over_epochs_that_has_ended_has_nothing_left_to_do(tmp_path: Path) -> None:
    config = make_run(tmp_path, train={"epochs": 0.5})
    first = train(config)
    again = train(in_dir(config, tmp_path / "run", resume="auto"))
    assert again.steps == first.steps
    further = make_run(tmp_path, train={"epochs": 1.0})
    assert train(in_dir(further, tmp_path / "run", resume="auto")).steps > first.steps


def test_a_warm_up_that_is_longer_than_the_epochs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("0123456789abcdef" * 7)
    with pytest.raises(
        ConfigError, match=r"do not fit before the end of the 2 steps that train.epochs=1 comes"
    ):
        train(make_run(tmp_path, train={"epochs": 1.0}, optimizer={"warmup_steps": 5}))


def test_the_rates_of_a_run_are_those_of_its_schedule(tmp_path: Path) -> None:
    optimizer = {"schedule": "wsd", "warmup_steps": 2, "decay_ratio": 0.5, "min_lr": 1e-4, "lr": 1e-3}
    records: list[StepRecord] = []
    train(make_run(tmp_path, train={"steps": 6}, optimizer=optimizer), progress=records.append)
    schedule = LearningRateSchedule(
        kind="wsd", lr=1e-3, min_lr=1e-4, num_warmup_steps=2, num_training_steps=6, num_decay_steps=3
    )
    assert [record.lr for record in records] == [schedule.learning_rate(step) for step in range(6)]
