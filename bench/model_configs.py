"""Configs of models that people train, by name: what ``outsize plan`` needs of them, as their authors publish it."""

from collections.abc import Mapping
from typing import Any

import published_record

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_LLAMA_70B = {
    **published_record.MODELS["Llama-3.1-8B"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}


def _sizes(hidden: int, layers: int, heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": mlp, **more}


MODELS: Mapping[str, Mapping[str, Any]] = {
    **published_record.MODELS,
    "Qwen3-1.7B": {**_QWEN3, **_sizes(2048, 28, 16, 6144, tie_word_embeddings=True)},
    "Qwen3-32B": {**_QWEN3, **_sizes(5120, 64, 64, 25600)},
    "Qwen3-30B-A3B": {**_QWEN3_MOE, **_sizes(2048, 48, 32, 6144, moe_intermediate_size=768)},
    "Qwen3-235B-A22B": {**_QWEN3_MOE, **_sizes(4096, 94, 64, 12288, moe_intermediate_size=1536)},
    "Llama-3.1-70B": _LLAMA_70B,
    "Llama-3.3-70B": _LLAMA_70B,
    "Llama-3.1-405B": {**_LLAMA_70B, **_sizes(16384, 126, 128, 53248)},
}


def config_of(hub_id: str) -> Mapping[str, Any]:
    """Return the config of a model by its id on the hub."""
    return MODELS[hub_id.partition("/")[2].removesuffix("-Instruct")]
