"""A model of some thousand parameters with its tokenizer and a text: a whole run takes less than half a second."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from outsize.config import Config
from outsize.config.load import parse_config

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
BUDGET = "512MiB"


def tiny_model(directory: Path, **sizes: int) -> Path:
    """Write a Llama of one block with random weights, and a tokenizer of bytes."""
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar for one shard
        model.save_pretrained(directory)
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(directory)
    return directory


def tiny_run(directory: Path, **sections: Mapping[str, Any]) -> Config:
    """A run of three steps of two microbatches in ``directory``; ``sections`` changes what should differ."""
    model, text = directory / "model", directory / "data.txt"
    if not model.exists():
        tiny_model(model)
    if not text.exists():
        text.write_text("\n".join(f"the square of {n} is {n * n}" for n in range(60)), encoding="utf-8")
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"path": str(text), "seq_len": 16},
        "train": {
            "steps": 3,
            "tokens_per_step": 64,
            "microbatches": 2,
            "seed": 3,
            "run_dir": str(directory / "run"),
        },
        "optimizer": {"lr": 1e-3, "schedule": "constant", "max_grad_norm": 0.5},
        "memory": {
            "device": "cpu",
            "home": "disk",
            "device_memory": BUDGET,
            "host_memory": BUDGET,
            "disk_memory": BUDGET,
        },
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return parse_config(settings)
