"""Models that read padding as text are told from those that leave it out."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import zoo
from outsize.compat.transformers_private import reads_padding


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "opt", "openai-gpt", "mamba", "qwen3_next", "jamba", "rwkv", "recurrent_gemma"]
)
def test_padding_is_read_by_those_whose_logits_it_changes(name: str):
    model, scores = zoo.build(name).eval(), []
    for ids in torch.tensor([[5, 9, 33]]), torch.tensor([[0, 0, 0, 0, 5, 9, 33]]):
        asked = {
            "max_new_tokens": 1,
            "do_sample": False,
            "output_scores": True,
            "return_dict_in_generate": True,
        }
        scores.append(model.generate(ids, attention_mask=(ids > 0).long(), use_cache=True, **asked).scores[0])
    alone, beside = scores
    assert reads_padding(model) == (not torch.allclose(alone, beside, rtol=1e-3, atol=1e-3))


SIZES = {
    "vocab_size": 97, "pad_token_id": 0, "d_model": 32, "hidden_size": 32, "num_attention_heads": 4,
    "decoder_attention_heads": 4, "num_decoder_attention_heads": 4, "decoder_layers": 2, "num_decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2, "intermediate_size": 48, "n_layer": 2, "n_head": 4, "d_inner": 48,
    "max_position_embeddings": 64, "max_target_positions": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4,
}  # fmt: skip
COUNT_IT = ("trocr", "bart", "mbart", "marian", "mvp", "pegasus", "plbart", "blenderbot", "bigbird_pegasus",
            "prophetnet", "whisper", "xlnet", "roformer", "xlm")  # fmt: skip


@pytest.mark.parametrize("name", COUNT_IT)
def test_models_that_count_their_places_past_the_mask_read_padding(name: str):
    known = AutoConfig.for_model(name).to_dict()
    config = AutoConfig.for_model(name, **{key: value for key, value in SIZES.items() if key in known})
    config.is_decoder, config.is_encoder_decoder = True, False
    assert reads_padding(AutoModelForCausalLM.from_config(config))


def test_a_model_with_a_cache_of_its_own_reads_padding():
    assert reads_padding(zoo.build("minimax"))
