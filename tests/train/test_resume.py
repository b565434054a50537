"""A run goes on with other memory, from another place, over the end of the data: to the same bits."""

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.checkpoint.checkpoint_state import latest
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError
from outsize.storage.committed import CommittedHome
from outsize.training.records import StepRecord
from outsize.training.run import train
from support import assert_same_end, end_of, in_dir, make_run


def with_memory(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"memory": config.memory.model_copy(update=changes)})


OTHER_MEMORY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fewer slots": ({"slots": 3}, {"slots": 1}),
    "a fraction of the budget": ({"home": "disk"}, {"home": "disk", "device_memory": "6MiB"}),
    "a fraction of the budget below": ({}, {"host_memory": "2MiB"}),
    "other tiles": ({"home": "disk", "tile_elements": 2048}, {"home": "disk", "tile_elements": 6144}),
    "activations leave": ({"offload": False}, {"offload": True}),
    "another device": ({}, {"device": "emulated:1", "home": "disk"}),
    "more workers": ({}, {"device": "emulated:2"}),
    "fewer workers, another home": ({"device": "emulated:3"}, {"home": "disk"}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Train three steps without a break, once for each dtype; returns the directory of model, data and run."""

    @functools.cache
    def run_in(dtype: str) -> Path:
        directory = tmp_path_factory.mktemp(f"whole-{dtype}")
        train(in_dir(make_run(directory, model={"dtype": dtype}, train={"steps": 3}), directory / "whole"))
        return directory

    return run_in


@pytest.mark.parametrize("case", OTHER_MEMORY)
def test_other_memory_changes_no_bit(case: str, tmp_path: Path, whole: Callable[[str], Path]) -> None:
    """In one dtype or the other: their states differ in what lies at home, and every case moves all of it."""
    first, second = OTHER_MEMORY[case]
    dtype = ("fp32", "bf16")[list(OTHER_MEMORY).index(case) % 2]
    root = whole(dtype)
    train(in_dir(make_run(root, model={"dtype": dtype}, memory=first), tmp_path / "parts", steps=2))
    other = make_run(root, model={"dtype": dtype}, train={"steps": 3}, memory=second)
    train(in_dir(other, tmp_path / "parts", resume="auto"))
    assert_same_end(root / "whole", tmp_path / "parts")


@pytest.mark.parametrize("done", [1, 2, 3])
def test_the_data_goes_on_over_the_end_of_an_epoch(done: int, tmp_path: Path) -> None:
    """Seven sequences, four to a step: step 2 ends one epoch and begins the next, step 4 the one after."""
    (tmp_path / "data.txt").write_text("0123456789abcdef" * 7)
    config = make_run(tmp_path)
    records: list[StepRecord] = []
    train(in_dir(config, tmp_path / "whole"), progress=records.append)
    train(in_dir(config, tmp_path / "parts", steps=done))
    state = end_of(tmp_path / "parts")
    assert state["data"]["sequences_per_epoch"] == 7
    assert state["data"]["next_sequence"] == 4 * done
    again: list[StepRecord] = []
    train(in_dir(config, tmp_path / "parts", resume="auto"), progress=again.append)
    assert [record.loss for record in again] == [record.loss for record in records[done:]]
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "tokens_per_step", 128),
        ("data", "seq_len", 32),
        ("data", "pack", "none"),
    ],
)
def test_other_sequences_or_steps_are_refused(section: str, key: str, value: object, tmp_path: Path) -> None:
    train(in_dir(make_run(tmp_path), tmp_path / "run", steps=1))
    changed = make_run(tmp_path, **{section: {key: value}})
    with pytest.raises(ConfigError, match=f"belongs to a run with {section}.{key}=.*, not {value}; resume"):
        train(in_dir(changed, tmp_path / "run", resume="auto", steps=4))


@pytest.mark.parametrize("home", ["host", "disk"])
def test_other_data_are_refused_and_the_same_elsewhere_are_not(home: str, tmp_path: Path) -> None:
    """From a checkpoint, and from a home on disk that is newer than any."""
    config = make_run(tmp_path, memory={"home": home})
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    text = tmp_path / "data.txt"
    moved = tmp_path / "moved.txt"
    moved.write_text(text.read_text())
    text.write_text(text.read_text().swapcase())
    with pytest.raises(ConfigError, match=r"belongs to a run over other data: .* sequences per epoch"):
        train(in_dir(config, tmp_path / "parts", resume="auto"))
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"path": str(moved)})})
    train(in_dir(elsewhere, tmp_path / "parts", resume="auto"))
    one, other = end_of(tmp_path / "whole"), end_of(tmp_path / "parts")
    for found in (one, other):
        del found["data"]["path"], found["files"]
    assert one.keys() == other.keys()


@pytest.mark.parametrize("home", ["host", "disk"])
def test_settings_that_a_run_goes_on_with_otherwise_are_said(home: str, tmp_path: Path) -> None:
    config = make_run(tmp_path, memory={"home": home})
    train(in_dir(config, tmp_path / "run", steps=2))
    said: list[str] = []
    (tmp_path / "own.py").write_text("def loss(logits, labels):\n    return logits.float().square().mean()\n")
    groups = [{"params": ["*embed*"], "lr": 0.5}]
    changed = make_run(
        tmp_path,
        memory={"home": home},
        optimizer={"lr": 5e-4, "layer_decay": 0.9, "groups": groups},
        train={"loss_function": f"{tmp_path / 'own.py'}:loss", "neftune_noise_alpha": 2.0},
        data={"mlm_probability": 0.5},
    )
    train(in_dir(changed, tmp_path / "run", resume="auto", steps=3), announce=said.append)
    assert [line for line in said if "goes on with" in line] == [
        f"note: the run goes on with {line}"
        for line in (
            "data.mlm_probability=0.5, and had 0.15",
            "optimizer.groups=[{'params': ['*embed*'], 'lr': 0.5}], and had nothing",
            "optimizer.layer_decay=0.9, and had 1.0",
            "optimizer.lr=0.0005, and had 0.001",
            f"train.loss_function={tmp_path / 'own.py'}:loss, and had nothing",
            "train.neftune_noise_alpha=2.0, and had nothing",
            "train.steps=3, and had 2",
        )
    ]
    train(in_dir(config, tmp_path / "run", resume="auto", steps=4), announce=said.append)
    assert f"train.loss_function=nothing, and had {tmp_path / 'own.py'}:loss" in "".join(said)


def test_other_microbatches_see_the_same_sequences_and_agree_wherever_the_state_rests(tmp_path: Path) -> None:
    """The order in which gradients are summed is another, so bits differ from a run that never changed it."""
    whole: list[StepRecord] = []
    train(in_dir(make_run(tmp_path), tmp_path / "whole"), progress=whole.append)
    for home in ("host", "disk"):
        config = make_run(tmp_path, memory={"home": home})
        train(in_dir(config, tmp_path / home, steps=2))
        records: list[StepRecord] = []
        train(in_dir(config, tmp_path / home, resume="auto", microbatches=4), progress=records.append)
        assert [r.tokens for r in records] == [r.tokens for r in whole[2:]]
        assert [r.loss for r in records] == pytest.approx([r.loss for r in whole[2:]], rel=1e-4)
    assert_same_end(tmp_path / "host", tmp_path / "disk")


# --- from a path --------------------------------------------------------------------------------------------


def test_a_path_goes_on_in_a_new_directory_and_leaves_the_old_one_alone(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    train(in_dir(config, tmp_path / "whole", save_every=1, save_total_limit=None))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*")}
    source = tmp_path / "whole" / "checkpoints" / "step-00000002"
    said: list[str] = []
    train(
        in_dir(config, tmp_path / "other", resume=str(source), save_total_limit=1, save_every=1),
        announce=said.append,
    )
    assert "resumed from step-00000002" in said
    assert_same_end(tmp_path / "whole", tmp_path / "other")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*")} == before
    ended = train(in_dir(config, tmp_path / "third", resume=str(tmp_path / "other"), steps=5))
    assert ended.steps == 5


def test_a_run_is_not_continued_in_place_by_a_path(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    train(in_dir(config, tmp_path / "run", steps=1))
    with pytest.raises(ConfigError, match="holds a run already; go on with it with --resume auto"):
        train(in_dir(config, tmp_path / "run", resume=str(tmp_path / "run")))


def test_a_path_without_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"model without the state of a run: .*model\.path"):
        train(in_dir(config, tmp_path / "run", resume=str(tmp_path / "model")))
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; give .*checkpoints/step-"):
        train(in_dir(config, tmp_path / "run", resume=str(tmp_path / "nowhere")))
    assert not (tmp_path / "run").exists()


def test_weights_of_any_checkpoint_start_a_run_afresh(tmp_path: Path) -> None:
    """A checkpoint of a run is a plain model too: its optimizer state stays behind."""
    config = make_run(tmp_path)
    train(in_dir(config, tmp_path / "run", steps=2))
    model = str(latest(tmp_path / "run"))
    fresh = make_run(tmp_path, model={"path": model})
    result = train(in_dir(fresh, tmp_path / "fresh", steps=1))
    assert result.steps == 1
    assert set(end_of(tmp_path / "fresh")["updates"].values()) == {1}


def test_a_whole_run_goes_on_when_the_checkpoint_that_it_began_with_has_been_pruned(tmp_path: Path) -> None:
    """All that trains is in its own checkpoint; adapters would go on over another base, and are refused."""
    config = make_run(tmp_path)
    train(in_dir(config, tmp_path / "run", steps=2, save_every=1, save_total_limit=None))
    first, later = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    over = {path: make_run(tmp_path, model={"path": str(path)}) for path in (first, later)}
    train(in_dir(over[first], tmp_path / "whole", steps=2))
    train(in_dir(over[first], tmp_path / "parts", steps=1))
    shutil.rmtree(first)
    train(in_dir(over[later], tmp_path / "parts", steps=2, resume="auto"))
    whole, parts = (end_of(tmp_path / name) for name in ("whole", "parts"))
    assert (whole.pop("model"), parts.pop("model")) == (str(first), str(later))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(*map(torch.as_tensor, (whole[key], parts[key]))) for key in whole if ":" in key)
    assert all(whole[key] == parts[key] for key in whole if ":" not in key)


@pytest.mark.parametrize("clip", ["none", "global"])
def test_what_is_committed_knows_the_loss_of_its_step(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed behind a commit says that loss of its last step when it goes on and ends at once."""
    committed: list[float] = []
    commit = CommittedHome.commit

    def noted(home: CommittedHome, state: Mapping[str, Any], *arguments: Any, **more: Any) -> Any:
        if state["step"]:
            committed.append(state["loss"])
        return commit(home, state, *arguments, **more)

    monkeypatch.setattr(CommittedHome, "commit", noted)
    config = make_run(
        tmp_path, train={"steps": 3, "microbatches": 2}, memory={"home": "disk"}, optimizer={"clip": clip}
    )
    records: list[StepRecord] = []
    train(in_dir(config, tmp_path / "run"), progress=records.append)
    assert committed == [record.loss for record in records]
