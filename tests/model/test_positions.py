"""How long a sequence a model takes: what its config says, stretched as it says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import outsize
from outsize.model.sizes.model_spec import num_positions
from outsize.training.short_runs import verify
from outsize.wrapped.module import runner_of
from tiny import SIZES, tiny_model, tiny_run

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 1024}, 1024),
        ({"n_positions": 512, "relative_attention_num_buckets": 32}, None),  # T5
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4}}, 256),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.5}}, 160),
        ({"max_position_embeddings": 64, "rope_scaling": YARN}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, 256),  # DeepSeek says the stretched length
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 8192, "rope_scaling": LLAMA3}, 65536),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, 131072),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": YARN}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {
            "sliding_attention": {"rope_type": "default"},
            "full_attention": {"rope_type": "linear", "factor": 8.0}}}, 512),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]}}, 64),
    ],
    ids=str,
)  # fmt: skip
def test_positions_reach_as_far_as_they_are_stretched(config: Mapping[str, Any], want: int | None):
    assert num_positions(config) == want


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}, YARN], ids=str
)
def test_stretched_positions_are_computed_as_the_plain_model_does(rope: dict[str, Any], tmp_path: Path):
    tiny_model(tmp_path, num_hidden_layers=2, rope_scaling=rope)
    asked = num_positions(AutoConfig.from_pretrained(tmp_path).to_dict())
    assert asked == 4 * SIZES["max_position_embeddings"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = outsize.load(
        tmp_path, dtype="fp32", device="cpu", device_memory="64MiB", home="disk", store_dir=tmp_path / "home"
    )
    try:
        for length in (8, asked, 16):  # what is long for a dynamic one changes what follows
            ids = torch.arange(length)[None] % 200
            loss, want = model(ids, labels=ids).loss, plain(ids, labels=ids).loss
            assert torch.equal(loss, want)
            loss.backward()
        prompt = torch.arange(asked - 6)[None] % 200
        how = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": 6,
            "do_sample": False,
            "pad_token_id": 0,
        }
        assert torch.equal(model.generate(prompt, **how), plain.generate(prompt, **how))
    finally:
        runner_of(model).close()


def test_training_takes_stretched_sequences(tmp_path: Path):
    tiny_model(tmp_path / "model", rope_scaling=YARN)
    config = tiny_run(tmp_path, data={"seq_len": 128}, train={"tokens_per_step": 256})
    assert verify(config).equal
