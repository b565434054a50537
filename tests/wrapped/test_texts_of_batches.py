"""Texts of several prompts: each what it is alone, in any batch and order, and none before all of them fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.errors import InfeasiblePlanError
from support import make_model_dir, make_tokenizer, save_model

TEXTS = ["the square of the number", "ab", "hello you"]
COUNT = 8
SIZES = {
    "vocab_size": 264,
    "d_model": 32,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}


def bart() -> nn.Module:
    heads = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    }
    layers = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_position_embeddings": 64,
        "forced_eos_token_id": None,
    }
    return BartForConditionalGeneration(BartConfig(**SIZES, **heads, **layers))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(**SIZES, d_kv=8, d_ff=48, num_layers=2, num_heads=4))


def texts(writer: TextWriter, batch_size: int, **choice: Any) -> list[str]:
    asked = {"max_new_tokens": COUNT, "do_sample": False, **choice}
    written, _ = writer.write(TEXTS, lambda _: None, batch_size=batch_size, **asked)
    return [one.text for one in written]


def alone(plain: nn.Module) -> list[str]:
    tokenizer, found = make_tokenizer(), []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": COUNT, "do_sample": False}
        start = 1 if plain.config.is_encoder_decoder else ids.shape[1]
        row = plain.generate(ids, **asked, pad_token_id=0)[0, start:]
        found.append(tokenizer.decode(row, skip_special_tokens=True))
    return found


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("make", [bart, t5])
def test_encoder_decoders_write_what_they_do_alone(make: Any, home: Any, tmp_path: Path):
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
    save_model(model, tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    want = alone(type(model).from_pretrained(tmp_path).eval())
    assert len(set(want)) > 1
    options = ModelOptions(model=str(tmp_path), device="cpu", device_memory="64MiB", home=home, dtype="fp32")
    with TextWriter(options) as writer:
        assert [texts(writer, batch_size) for batch_size in (1, 3)] == [want, want]


def test_a_model_that_reads_padding_gets_none(tmp_path: Path):
    directory = make_model_dir(tmp_path / "model", "rwkv")
    want = alone(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
    with TextWriter(ModelOptions(model=str(directory), device="cpu", home="host", dtype="fp32")) as writer:
        assert texts(writer, 3) == want


def test_a_prompt_that_does_not_fit_is_refused_before_the_text_of_one_that_does(tmp_path: Path):
    directory = make_model_dir(tmp_path / "model", max_position_embeddings=2048)
    options = ModelOptions(model=str(directory), device="emulated:1", device_memory="400KiB", dtype="fp32")
    said: list[str] = []
    asked = {"max_new_tokens": 2, "batch_size": 1, "do_sample": False}
    with TextWriter(options) as writer:
        writer.write(["ab"], said.append, **asked)
        assert said
        said.clear()
        with pytest.raises(InfeasiblePlanError):
            writer.write(["ab", "a" * 1500], said.append, **asked)
        assert not said


def test_prompts_that_are_measured_first_take_no_chances_from_others(tmp_path: Path):
    directory = make_model_dir(tmp_path / "model", max_position_embeddings=2048)
    found = []
    for home in ("host", "disk"):
        options = ModelOptions(
            model=str(directory), device="cpu", device_memory="64MiB", home=home, dtype="fp32"
        )
        with TextWriter(options) as writer:
            torch.manual_seed(3)
            written, figures = writer.write(
                ["ab", "a" * 40], lambda _: None, max_new_tokens=COUNT, batch_size=1, do_sample=True, top_k=0
            )
        found.append([one.text for one in written])
        assert figures.num_passes == 2 * COUNT + (home == "disk")
    assert found[0] == found[1]
