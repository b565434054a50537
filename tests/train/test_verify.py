from pathlib import Path

import pytest
import torch

from outsize.session.job.prepare import Job
from outsize.training import short_runs as module
from outsize.training.forecast import plan
from outsize.training.short_runs import run_resident, verify
from support import make_run
from train.test_codec_choice import on_a_link

RUNS = {
    "host": {},
    "disk": {"memory": {"home": "disk", "slots": 2}},
    "bf16 in chunks": {"model": {"dtype": "bf16"}, "train": {"head_chunk_tokens": 7}},
    "fp16": {"model": {"dtype": "fp16"}},
    "the model's own loss": {"train": {"loss": "model"}, "optimizer": {"max_grad_norm": 0.0}},
    "emulated": {"memory": {"device": "emulated:1", "home": "disk", "offload": True}},
    "frozen": {"model": {"freeze": ("model.layers.0.*",)}},
}


@pytest.mark.parametrize("sections", RUNS.values(), ids=RUNS.keys())
def test_streamed_is_resident_bit_for_bit(sections: dict, tmp_path: Path):
    said: list[str] = []
    result = verify(make_run(tmp_path, **sections), announce=said.append)
    assert result.equal
    assert result.steps == 4
    assert result.loss_streamed == result.loss_resident
    assert len(result.loss_streamed) == 4
    assert result.max_weight_difference == 0.0
    assert result.differing == []
    assert result.num_weights > 20_000
    assert [line for line in said if line.endswith(" run")] == ["streamed run", "resident run"]


def test_one_microbatch_of_a_tied_encoder(tmp_path: Path):
    run = make_run(tmp_path, "bert", train={"microbatches": 1, "loss": "model"})
    assert verify(run).equal


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_tied_weights_are_equal_bit_for_bit(loss: str, dtype: str, tmp_path: Path):
    run = make_run(
        tmp_path,
        "llama_tied",
        model={"dtype": dtype},
        train={"microbatches": 3, "loss": loss, "head_chunk_tokens": 5},
    )
    result = verify(run)
    assert (result.equal, result.differing) == (True, [])


def test_a_difference_is_found_named_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def tampered(*arguments):
        losses, weights = run_resident(*arguments)
        changed = {**weights, "model.norm.weight": weights["model.norm.weight"] + torch.tensor(0.25)}
        return [*losses[:-1], losses[-1] + 1], changed

    monkeypatch.setattr(module, "run_resident", tampered)
    result = verify(make_run(tmp_path))
    assert not result.equal
    assert result.differing == ["model.norm.weight"]
    assert result.max_weight_difference == pytest.approx(0.25, abs=1e-6)
    assert result.loss_streamed[:-1] == result.loss_resident[:-1]
    assert result.loss_streamed[-1] != result.loss_resident[-1]


@pytest.mark.parametrize("device", ["emulated:1", "emulated:2"])
def test_what_is_verified_is_the_plan_that_is_trained(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With what `auto` comes to where a step waits for the link, and not with what it stands for before."""
    on_a_link(monkeypatch, 1e6)
    sections = {"transport": {"weights": "auto"}, "memory": {"device": device, "home": "host"}}
    config = make_run(tmp_path, train={"steps": 2, "microbatches": 2}, **sections)
    plans = []

    class Watched(module.StreamedTrainer):
        def __init__(self, prepared: Job, store_dir: Path) -> None:
            plans.append(prepared.plan)
            super().__init__(prepared, store_dir)

    monkeypatch.setattr(module, "StreamedTrainer", Watched)
    assert verify(config).equal
    trained = plan(config)
    assert trained.transport.weights != "raw"
    assert [(found.layout, found.programs, found.transport) for found in plans] == [
        (trained.layout, trained.programs, trained.transport)
    ]


def test_without_a_run_directory_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    assert verify(make_run(tmp_path, train={"run_dir": None, "steps": 1})).equal
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.txt", "model", "tmp"]
