"""Noise on embeddings: the same in a streamed run and a resident one, in training only."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from outsize.session.job.model_setup import _add_noise
from outsize.training.short_runs import verify
from support import make_run

RUNS: dict[str, dict[str, Any]] = {
    "two rounds": {"train": {"microbatches": 4, "round_microbatches": 2}},
    "two workers": {"memory": {"device": "emulated:2"}},
    "LoRA": {"train": {"method": "lora"}},
}


def test_there_is_none_while_nothing_trains():
    model, ids = zoo.build("llama"), torch.arange(8)[None]
    table = model.get_input_embeddings()
    plain = table(ids)
    _add_noise(model, 5.0)
    assert torch.equal(model.eval().get_input_embeddings()(ids), plain)
    assert not torch.equal(model.train().get_input_embeddings()(ids), plain)


@pytest.mark.parametrize("case", RUNS)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    sections = RUNS[case]
    noisy = {**sections, "train": {**sections.get("train", {}), "neftune_noise_alpha": 5.0}}
    with_noise = verify(make_run(tmp_path / "noisy", **noisy))
    assert with_noise.equal
    assert with_noise.loss_streamed[0] != verify(make_run(tmp_path / "quiet", **sections)).loss_streamed[0]
