import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outsize.errors import ModelError
from outsize.model.sizes.spec_from_config import forward_flops, read_shape, spec_from_config

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


def test_published_sizes():
    assert spec_from_config(LLAMA_8B, "bf16").num_parameters == 8_030_261_248
    assert spec_from_config(QWEN3_235B, "bf16").num_parameters == pytest.approx(235.1e9, rel=1e-3)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model_itself(family, tied):
    names = (
        SMALL
        if "moe" in family or family == "mixtral"
        else {k: v for k, v in SMALL.items() if "expert" not in k}
    )
    config = AutoConfig.for_model(family, **{**names, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = spec_from_config(config.to_dict(), "bf16")
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in model.model.layers[1].parameters())
    assert sum(tensor.numel for tensor in spec.units[2].tensors) == own


def test_flops_are_two_per_active_parameter_and_token_and_attention_besides():
    shape = read_shape(LLAMA_8B)
    flops = forward_flops(shape, 4, 2048)
    assert (flops[0], len(flops)) == (0, 34)
    assert flops[-1] == 2 * 4 * 2048 * 4096 * 128256
    weights = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336)
    assert flops[1] == 2 * 4 * 2048 * weights + 2 * 4 * 2048**2 * 4096


def test_only_the_experts_that_a_token_visits_compute():
    shape = read_shape(QWEN3_235B)
    total = sum(forward_flops(shape, 1, 1))
    assert total / 2 == pytest.approx(21.5e9, rel=0.02)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no sizes from the config of a None model"),
        ({"model_type": "bert"}, "'bert'"),
        ({"model_type": "llama"}, "lacks a size"),
        ({**LLAMA_8B, "hidden_size": "wide"}, "lacks a size"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "below one"),
    ],
)
def test_configs_that_do_not_tell(config, message):
    with pytest.raises(ModelError, match=message):
        read_shape(config)
