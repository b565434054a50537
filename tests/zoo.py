"""Tiny random models of many Hugging Face architectures: what the exactness tests run through.

Each entry of `ARCHITECTURES` makes a config of three layers and a hidden size of 32, small enough that a step
takes milliseconds, and odd enough in its sizes that a tensor that lands in the wrong place is seen. One table
names what an architecture needs beside the sizes that all share; keys that its config does not know are left
out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaForCausalLM,
    PretrainedConfig,
)

VOCAB_SIZE = 97
FIRST_WORD = 3  # ids below are padding, begin and end
IGNORED = -100  # label that the loss leaves out

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": 8,
    "use_cache": False,
}

MLA: dict[str, Any] = {  # multi-head latent attention: as many key-value heads as heads
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "first_k_dense_replace": 1,
}
GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SLIDING_AND_FULL: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_biased": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen2_tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": GATED_DELTA,
    "mistral": {},
    "mixtral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": SLIDING_AND_FULL,
    "phi": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 8},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "falcon": {"head_dim": None, "bias": True},
    "falcon_alibi": {"head_dim": None, "alibi": True, "new_decoder_architecture": False},
    "bloom": {},
    "mpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"ffn_dim": 48},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "stablelm": {},
    "cohere": {},
    "cohere2": SLIDING_AND_FULL,
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "starcoder2": {},
    "smollm3": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "nemotron": {},
    "qwen2_moe": {},
    "llama4_text": {"intermediate_size_mlp": 48, "attention_chunk_size": 32},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "minimax": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16},
    "phimoe": {},
    "exaone4": SLIDING_AND_FULL,
    "seed_oss": {},
    "persimmon": {},
    "biogpt": {},
    "apertus": {},
    "arcee": {},
    "helium": {},
    "diffllama": {},
    "bitnet": {},
    "dots1": {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 2, "activation_function": "silu"},
    "flex_olmo": {},
    "openai-gpt": {},
    "modernbert-decoder": {},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "mamba": {"state_size": 4},
    "lfm2": {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]},
    "afmoe": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cwm": {},
    "doge": {},
    "ernie": {"is_decoder": True},
    "exaone_moe": {},
    "falcon_mamba": {"state_size": 4},
    "glm4_moe_lite": MLA,
    "gpt_neox_japanese": {},
    "internlm3": {},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {**MLA, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "num_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8},
    "minicpm3": MLA,
    "minimax_m2": {},
    "ministral": {},
    "nanochat": {},
    "olmo_hybrid": {},
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA,
    "solar_open": {},
    "vaultgemma": {},
    "youtu": {**MLA, "pad_token_id": None},  # transformers zeroes the row of the padding when it loads
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "modernbert": {},
    "megatron-bert": {},
}
MODEL_TYPE = {
    "llama_tied": "llama",
    "llama_biased": "llama",
    "qwen2_tied": "qwen2",
    "falcon_alibi": "falcon",
}


def make_config(name: str, dropout: float = 0.0) -> PretrainedConfig:
    """Return the tiny config called ``name``, with every dropout probability set to ``dropout``."""
    model_type = MODEL_TYPE.get(name, name)
    config_class = type(AutoConfig.for_model(model_type))
    known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
    wanted = {**SIZES, **CAUSAL.get(name, {}), **MASKED.get(name, {})}
    config = config_class(**{k: v for k, v in wanted.items() if k in known and v is not None})
    for part in (config, getattr(config, "attn_config", None)):
        for key, value in list(vars(part).items()) if part is not None else []:
            if ("drop" in key) and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(part, key, type(value)(dropout) if dropout == 0 else dropout)
    return config


ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    name: partial(make_config, name) for name in (*CAUSAL, *MASKED)
}


def is_masked(name: str) -> bool:
    """Whether ``name`` is an encoder, trained to fill in what is masked."""
    return name in MASKED


def build(name: str, seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with random weights, in training mode; norms and biases are random as well."""
    factory = AutoModelForMaskedLM if is_masked(name) else AutoModelForCausalLM
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model: nn.Module = factory.from_config(make_config(name, dropout), dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            stored = model.state_dict()
            for buffer_name, buffer in model.named_buffers():
                if buffer_name in stored and buffer.is_floating_point() and not buffer.any():
                    buffer.add_(torch.randn_like(buffer), alpha=0.05)  # router corrections begin at zero
    return model.train()


def small_llama(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return a Llama of two layers, for tests of many steps; ``changes`` are those of its config."""
    config = make_config("llama")
    config.update({"num_hidden_layers": 2, **changes})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).train()


def batch(name: str, seed: int = 0, num_sequences: int = 2, seq_len: int = 12) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``labels``, ``(num_sequences, seq_len)``; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, seq_len)
    input_ids = torch.randint(FIRST_WORD, VOCAB_SIZE, shape, generator=generator)
    if is_masked(name):
        ignored = torch.rand(shape, generator=generator) < 0.5
    else:
        prompt = torch.randint(0, max(1, seq_len // 2), (num_sequences, 1), generator=generator)
        ignored = torch.arange(seq_len) < prompt
    ignored[:, -1] = False
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, IGNORED)}
