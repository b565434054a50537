"""Tiny random models of several lists of layers, or of none: of images and videos, vision with language, and others.

Each entry of `MODELS` makes a model and a batch for it; `build` has them train without dropout, and `loss_of` is a loss
of whatever a model returns.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

IMAGE = 150
Made = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, Callable[[], Made]] = {}
MMDIT: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32}
DIT: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4}
TIMES = torch.tensor([5, 7])
TEXT: dict[str, Any] = {
    "vocab_size": 160,
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
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def member(make: Callable[[], Made]) -> Callable[[], Made]:
    """Put a model into `MODELS` under the name of its function."""
    MODELS[make.__name__] = make
    return make


def _random(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _packed(channels: int = 16, ids: int = 3) -> dict[str, Any]:
    """Return a batch of two images of 4 x 4 patches and texts of 8 tokens, as the models of Flux take it."""
    return {
        "hidden_states": _random(2, 16, channels),
        "encoder_hidden_states": _random(2, 8, 32, seed=3),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(16, ids),
        "txt_ids": torch.zeros(8, ids),
    }


def _image(text: int = 16, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": _random(2, channels, 8, 8),
        "encoder_hidden_states": _random(2, 6, text, seed=3),
        "timestep": TIMES,
    }


def _video(text: int = 16, tokens: int = 6) -> dict[str, Any]:
    return {
        **_image(text),
        "hidden_states": _random(2, 4, 2, 8, 8),
        "encoder_hidden_states": _random(2, tokens, text, seed=3),
    }


@member
def flux() -> Made:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), **MMDIT,
    )  # fmt: skip
    return model, {**_packed(), "pooled_projections": _random(2, 32, seed=4)}


@member
def flux2() -> Made:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4), **MMDIT,
    )  # fmt: skip
    return model, {**_packed(ids=4), "guidance": torch.ones(2)}


@member
def sd3() -> Made:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, caption_projection_dim=64,
        pooled_projection_dim=32, **MMDIT,
    )  # fmt: skip
    return model, {**_image(32), "pooled_projections": _random(2, 32, seed=4)}


@member
def wan() -> Made:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=64, num_layers=4, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, _video()


@member
def qwen_image() -> Made:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": _random(2, 16, 16),
        "encoder_hidden_states": _random(2, 7, 16, seed=3),
        "encoder_hidden_states_mask": torch.ones(2, 7).long(),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


@member
def ltx() -> Made:
    model = diffusers.LTXVideoTransformer3DModel(
        **DIT, out_channels=4, cross_attention_dim=32, caption_channels=16
    )
    return model, {
        "hidden_states": _random(2, 2 * 4 * 4, 4),
        "encoder_hidden_states": _random(2, 6, 16, seed=3),
        "timestep": TIMES.float()[:, None].expand(2, 32),
        "encoder_attention_mask": torch.ones(2, 6).bool(),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


@member
def hunyuan_video() -> Made:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=4, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": _random(1, 4, 2, 4, 4),
        "timestep": TIMES[:1],
        "encoder_hidden_states": _random(1, 6, 16, seed=3),
        "encoder_attention_mask": torch.ones(1, 6).long(),
        "pooled_projections": _random(1, 8, seed=4),
        "guidance": torch.tensor([6.0]),
    }


@member
def cogvideox() -> Made:
    model = diffusers.CogVideoXTransformer3DModel(
        **DIT, out_channels=4, time_embed_dim=8, text_embed_dim=16, sample_width=8, sample_height=8,
        sample_frames=5, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=6,
    )  # fmt: skip
    return model, {**_image(), "hidden_states": _random(2, 2, 4, 8, 8)}


@member
def sana() -> Made:
    model = diffusers.SanaTransformer2DModel(
        **DIT, out_channels=4, num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32,
        caption_channels=16, sample_size=8,
    )  # fmt: skip
    return model, _image()


@member
def pixart() -> Made:
    model = diffusers.PixArtTransformer2DModel(
        **DIT, out_channels=8, cross_attention_dim=32, sample_size=8, patch_size=2, caption_channels=16,
        use_additional_conditions=False,
    )  # fmt: skip
    return model, {**_image(), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


@member
def lumina2() -> Made:
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=4, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64),
        cap_feat_dim=16,
    )  # fmt: skip
    batch = {**_image(), "timestep": torch.tensor([0.3, 0.7])}
    return model, {**batch, "encoder_attention_mask": torch.ones(2, 6).bool()}


@member
def z_image() -> Made:
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=64, n_layers=4, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[8, 12, 12], axes_lens=[512, 64, 64],
    )  # fmt: skip
    images, texts = list(_random(2, 4, 1, 8, 8)), list(_random(2, 6, 16, seed=3))
    return model, {"x": images, "t": torch.tensor([0.3, 0.7]), "cap_feats": texts}


@member
def chroma() -> Made:
    model = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=1,
        **{**MMDIT, "num_attention_heads": 2},
    )  # fmt: skip
    return model, _packed()


@member
def mochi() -> Made:
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=4, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=8, max_sequence_length=8,
    )  # fmt: skip
    return model, {**_video(tokens=8), "encoder_attention_mask": torch.ones(2, 8).bool()}


@member
def sdxl_unet() -> Made:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=(2, 4), norm_num_groups=4, transformer_layers_per_block=(1, 2),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 16,
    )  # fmt: skip
    return model, {
        "sample": _random(2, 4, 8, 8),
        "timestep": TIMES,
        "encoder_hidden_states": _random(2, 6, 16, seed=3),
        "added_cond_kwargs": {"text_embeds": _random(2, 16, seed=4), "time_ids": _random(2, 6, seed=5)},
    }


def _seen(patches: int, rows: int = 2, **others: Any) -> dict[str, Any]:
    """Return token ids with the place of an image of so many patches, labels, and what else a model takes."""
    ids = torch.randint(5, 90, (rows, 8 + patches), generator=torch.Generator().manual_seed(1))
    ids[:, 2 : 2 + patches] = IMAGE
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **others}


@member
def qwen2_5_vl() -> Made:
    """Two images in one tensor."""
    ropes = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {
        "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
        "fullatt_block_indexes": [1, 3], "in_channels": 3,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ropes, "tie_word_embeddings": False},
        vision_config=vision, image_token_id=IMAGE, video_token_id=151, vision_start_token_id=152,
        vision_end_token_id=153,
    )  # fmt: skip
    batch = _seen(
        4, pixel_values=_random(32, 3 * 2 * 16), image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]])
    )
    kinds = (batch["input_ids"] == IMAGE).int()
    return transformers.Qwen2_5_VLForConditionalGeneration(config), {**batch, "mm_token_type_ids": kinds}


@member
def gemma3() -> Made:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 8, "layer_types": kinds},
        vision_config={**VISION, "vision_use_head": False},
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=151, eoi_token_index=152,
    )  # fmt: skip
    batch = _seen(4, pixel_values=_random(2, 3, 16, 16))
    kind = (batch["input_ids"] == IMAGE).long()
    return transformers.Gemma3ForConditionalGeneration(config), {**batch, "token_type_ids": kind}


@member
def llava_next() -> Made:
    config = transformers.LlavaNextConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=IMAGE, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]],
    )  # fmt: skip
    batch = _seen(36, rows=1, pixel_values=_random(1, 2, 3, 16, 16), image_sizes=torch.tensor([[16, 16]]))
    return transformers.LlavaNextForConditionalGeneration(config), batch


@member
def smolvlm() -> Made:
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=VISION, scale_factor=2, image_token_id=IMAGE,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.SmolVLMForConditionalGeneration(config), _seen(
        4, pixel_values=_random(2, 1, 3, 16, 16)
    )


@member
def clip() -> Made:
    """Images and texts, of other sizes each, are rows of one batch."""
    vision, text = VISION, {**VISION, "vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ids = torch.randint(5, 90, (2, 8), generator=torch.Generator().manual_seed(1))
    return transformers.CLIPModel(config), {
        "input_ids": ids, "pixel_values": _random(2, 3, 16, 16), "return_loss": True,
    }  # fmt: skip


@member
def paligemma() -> Made:
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "head_dim": 8, "model_type": "gemma"},
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
        image_token_id=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    batch = _seen(16, pixel_values=_random(2, 3, 16, 16))
    kinds = torch.zeros_like(batch["input_ids"])
    return transformers.PaliGemmaForConditionalGeneration(config), {**batch, "token_type_ids": kinds}


@member
def wav2vec2() -> Made:
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, layerdrop=0.0, mask_time_prob=0.0, pad_token_id=0,
        ctc_loss_reduction="mean", hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    labels = torch.randint(1, 30, (2, 5), generator=torch.Generator().manual_seed(1))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": _random(2, 400), "labels": labels}


@member
def umt5() -> Made:
    config = transformers.UMT5Config(
        vocab_size=160, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(5, 150, (2, 10), generator=torch.Generator().manual_seed(1))
    return transformers.UMT5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@member
def esm() -> Made:
    config = transformers.EsmConfig(
        vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=32, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=64, position_embedding_type="rotary",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(4, 30, (2, 12), generator=torch.Generator().manual_seed(1))
    return transformers.EsmForMaskedLM(config), {"input_ids": ids, "labels": ids}


@member
def transformer_encoder() -> Made:
    """PyTorch's own."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), {"src": _random(2, 8, 32)}


def build(name: str) -> Made:
    """Return the model called ``name``, its weights random and none zero, without dropout, and a batch for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # those of adaptive norms begin at zero
                    parameter.normal_(0.0, 0.05)
    return model.train(), batch


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model, or one of the first tensor that it returns."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    value = tensors_of(output)[0]
    return (value * _random(*value.shape, seed=6)).mean() + value.square().mean()


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of whatever a model returns, in order."""
    if isinstance(output, Tensor):
        return [output]
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return [tensor for part in parts for tensor in tensors_of(part)]
