"""Runs whose sequences hold several documents, kept apart."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.session.job.prepare import prepare
from outsize.session.run_state import check_same_run
from outsize.streamed.spec import RunSpec
from outsize.training.evaluation import read_evaluations
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import assert_same_end, in_dir, make_run


def run_over_documents(directory: Path, name: str = "llama", **sections: Any) -> Config:
    """A run over forty documents of 2 to 40 tokens, in sequences of 16."""
    path = directory / "documents.jsonl"
    drawn = random.Random(0)
    lines = ["".join(drawn.choices("abcdefgh", k=drawn.randint(1, 39))) for _ in range(40)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = {"path": str(path), "pack": "documents"}
    return make_run(directory, name, data=data, **sections)


@pytest.mark.parametrize("memory", [{}, {"device": "emulated:2", "home": "disk"}], ids=["one", "workers"])
def test_streamed_is_resident(memory: dict[str, Any], tmp_path: Path):
    assert verify(run_over_documents(tmp_path, memory=memory, train={"steps": 2})).equal


def test_a_run_goes_on_and_is_measured_with_the_same_masks(tmp_path: Path):
    config = run_over_documents(tmp_path, eval={"split": 0.2})
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    train(in_dir(config, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    one, other = (read_evaluations(tmp_path / name)[-1] for name in ("whole", "parts"))
    assert (one.loss, one.tokens) == (other.loss, other.tokens)


@pytest.mark.parametrize(
    ("name", "where"), [("falcon", "transformer.h.0"), ("mamba2", "backbone.layers.0"), ("bert", "bert")]
)
def test_a_model_that_lets_tokens_see_other_documents_is_refused_by_name(
    name: str, where: str, tmp_path: Path
):
    config = run_over_documents(tmp_path, name)
    with pytest.raises(
        ModelError, match=rf"apart: tokens see another document in {where}.*; with data.pack=none each"
    ) as raised:
        prepare(RunSpec.of(config, tmp_path), lambda _: None)
    assert type(raised.value) is ModelError
    assert name in str(raised.value).lower()


def test_a_model_whose_positions_go_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A mask that is right is not all: here GPT-2 looks up positions in the sequence."""
    table = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        is_positions = self.num_embeddings == 64
        return table(self, torch.arange(ids.numel()).view_as(ids) if is_positions else ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel .*: positions go on over the border in "):
        prepare(RunSpec.of(run_over_documents(tmp_path, "gpt2"), tmp_path), lambda _: None)


def test_flash_attention_takes_no_mask():
    with pytest.raises(ValueError, match=r"data.pack: documents .* try model.attention: sdpa, or data.pack"):
        Config(model={"path": "m", "attention": "flash_attention_2"}, data={"path": "d", "pack": "documents"})


@pytest.mark.parametrize(("former", "word"), [(True, "stream"), (False, "none")])
def test_runs_of_before_there_were_three_ways_go_on(former: bool, word: str, tmp_path: Path):
    config = make_run(tmp_path, data={"pack": former})
    assert config.data.pack == word
    state = {
        "model": config.model.path,
        "seed": 3,
        "dtype": "fp32",
        "data": {"seq_len": 16, "pack": former, "tokens_per_step": 64},
    }
    check_same_run(state, "here", config, "fp32")
    other = make_run(tmp_path, data={"pack": "documents"})
    with pytest.raises(ConfigError, match=f"data.pack={word}, not documents"):
        check_same_run(state, "here", other, "fp32")
