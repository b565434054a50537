"""Tiny random models whose forward makes a cache of its own, or whose blocks write into what they are given.

Each entry of `MODELS` makes a model, in training mode, and a batch for it.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB_SIZE, IMAGE = 160, 150
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHARING: dict[str, Any] = {
    **TEXT,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 8,
}
Made = tuple[nn.Module, dict[str, Tensor]]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _ids(rows: int = 2, patches: int = 0, length: int = 8) -> Tensor:
    """Return token ids, with the place of an image of so many patches after the second."""
    ids = torch.randint(5, 90, (rows, length + patches), generator=torch.Generator().manual_seed(1))
    ids[:, 2 : 2 + patches] = IMAGE
    return ids


def _with_labels(model: nn.Module, ids: Tensor, **others: Tensor) -> Made:
    return model.train(), {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **others}


def _llava() -> Made:
    vision = {
        **VISION,
        "model_type": "clip_vision_model",
        "image_size": 16,
        "patch_size": 4,
        "projection_dim": 32,
    }
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config=vision,
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return _with_labels(
        transformers.LlavaForConditionalGeneration(config),
        _ids(patches=16),
        pixel_values=_random(2, 3, 16, 16),
    )


def _internvl() -> Made:
    config = transformers.InternVLConfig(
        vision_config={**VISION, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": False},
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return _with_labels(
        transformers.InternVLForConditionalGeneration(config),
        _ids(patches=4),
        pixel_values=_random(2, 3, 16, 16),
    )


def _qwen3_vl() -> Made:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "in_channels": 3,
    }
    ropes = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "intermediate_size": 256, "head_dim": 8, "rope_parameters": ropes},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=151,
        vision_start_token_id=152,
        vision_end_token_id=153,
    )
    ids = _ids(1, 4)
    return _with_labels(
        transformers.Qwen3VLForConditionalGeneration(config),
        ids,
        pixel_values=_random(16, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        mm_token_type_ids=(ids == IMAGE).int(),
    )


def _decision_transformer() -> Made:
    config = transformers.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=32, n_layer=4, n_head=4, n_inner=48, max_ep_len=32, n_positions=64
    )
    steps = torch.arange(6).repeat(2, 1)
    return transformers.DecisionTransformerModel(config).train(), {
        "states": _random(2, 6, 5),
        "actions": _random(2, 6, 3),
        "rewards": _random(2, 6, 1),
        "returns_to_go": _random(2, 6, 1),
        "timesteps": steps,
        "attention_mask": torch.ones_like(steps),
    }


def _gemma3n() -> Made:
    config = transformers.Gemma3nTextConfig(
        **SHARING, laurel_rank=4, activation_sparsity_pattern=[0.0] * 6, altup_num_inputs=2
    )
    return _with_labels(transformers.Gemma3nForCausalLM(config), _ids(length=12))


def _gemma4() -> Made:
    config = transformers.Gemma4TextConfig(**SHARING, global_head_dim=8)
    return _with_labels(transformers.Gemma4ForCausalLM(config), _ids(length=12))


MODELS: dict[str, Callable[[], Made]] = {
    "llava": _llava,
    "internvl": _internvl,
    "qwen3_vl": _qwen3_vl,
    "decision_transformer": _decision_transformer,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
}


def build(name: str) -> Made:
    """Return the model called ``name``, its weights random, without dropout, and a batch for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model, batch
