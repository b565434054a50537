"""Models of several parts: an encoder and its decoder, a tower before a language model."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from wrapped.loops import assert_equal, gradients, wrapped

ROUNDING = 1e-5  # what layers take of an encoder is summed layer by layer
IDS = torch.randint(5, 97, (4, 12), generator=torch.Generator().manual_seed(1))
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
HALVES = {
    "d_model": 32, "vocab_size": 97, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.0,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=97, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**HALVES))


def whisper() -> nn.Module:
    sizes = {**HALVES, "max_source_positions": 16, "max_target_positions": 64, "decoder_start_token_id": 2}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))


def llava() -> nn.Module:
    """Its tower frozen."""
    tower = transformers.CLIPVisionConfig(**{**SMALL, "num_hidden_layers": 2}, image_size=32, patch_size=16)
    text = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=97, pad_token_id=0)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=tower, image_token_index=4, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def rows(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    if name == "whisper":
        return {"input_features": torch.rand(4, 80, 32, generator=generator), "labels": IDS}
    if name == "llava":
        ids = IDS.clone()
        ids[:, 1:5] = 4  # an image of four patches
        return {
            "input_ids": ids,
            "pixel_values": torch.rand(4, 3, 32, 32, generator=generator),
            "labels": ids,
        }
    return {"input_ids": IDS, "labels": IDS}


MODELS = {"t5": t5, "bart": bart, "whisper": whisper, "llava": llava}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"microbatches": 2, "home": "disk"},
        {"device": "emulated:2"},
        {"device": "emulated:3", "microbatches": 2},
    ],
    ids=["whole", "in two from disk", "on two workers", "on three workers in two"],
)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_plain_model(name: str, settings: dict[str, Any]):
    plain, batch = made(name), rows(name)
    want = plain(**batch).loss
    want.backward()
    with wrapped(made(name), **{"home": "host", **settings}) as model:
        got = model(**batch).loss
        assert torch.allclose(got, want, rtol=ROUNDING, atol=0)
        got.backward()
        if "home" in settings:  # gradients on a disk have norms, and no values
            return
        assert_equal(
            gradients(model),
            gradients(plain),
            0.0 if name == "llava" and "microbatches" not in settings else ROUNDING,
        )
