"""Texts of several prompts: each what it is alone, in any batch and order, and none before all of them fit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.errors import InfeasiblePlanError
from outsize.wrapped.writing.detokenizer import UNKNOWN
from support import make_model_dir, make_tokenizer, save_model

TEXTS = ["the square of the number", "ab", "hello you"]
COUNT = 8
LLAMA = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
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


def llama() -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))


def varied(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model whose texts are no repetitions."""
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
    return model


def texts(writer: TextWriter, batch_size: int, **choice: Any) -> list[str]:
    asked = {"max_new_tokens": COUNT, "do_sample": False, **choice}
    written, _ = writer.write(TEXTS, lambda _: None, batch_size=batch_size, **asked)
    return [one.text for one in written]


def alone(plain: nn.Module, **keys: Any) -> list[str]:
    tokenizer, found = make_tokenizer(), []
    stops = {"tokenizer": tokenizer} if "stop_strings" in keys else {}
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": COUNT, "do_sample": False, **stops}
        start = 1 if plain.config.is_encoder_decoder else ids.shape[1]
        row = plain.generate(ids, **asked, **keys, pad_token_id=0)[0, start:]
        found.append(tokenizer.decode(row, skip_special_tokens=True))
    return found


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("make", [bart, t5])
def test_encoder_decoders_write_what_they_do_alone(make: Any, home: Any, tmp_path: Path):
    model = varied(make)
    save_model(model, tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    want = alone(type(model).from_pretrained(tmp_path).eval())
    assert len(set(want)) > 1
    options = ModelOptions(model=str(tmp_path), device="cpu", device_memory="64MiB", home=home, dtype="fp32")
    with TextWriter(options) as writer:
        assert [texts(writer, batch_size) for batch_size in (1, 3)] == [want, want]


# Each by itself; those that look at the text before must not see padding, and ends of one row must not end another.
KEYS: tuple[dict[str, Any], ...] = (
    {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
    {"repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[70], [0, 30], [30, 31]]},
    {"suppress_tokens": list(range(60, 160))},
    {"begin_suppress_tokens": list(range(60, 160))},
    {"sequence_bias": [[[70], 9.0], [[0, 71], 9.0]]},
    {"forced_bos_token_id": 7, "forced_eos_token_id": 5},
    {"min_length": 9, "eos_token_id": list(range(200))},
    {"min_new_tokens": 4, "eos_token_id": list(range(200))},
    {"exponential_decay_length_penalty": [2, 9.0], "eos_token_id": 9},
    {"guidance_scale": 2.5},
    {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 9.0, "seeding_scheme": "selfhash", "context_width": 4}},
    {"eos_token_id": list(range(1, 200, 5))},
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "bart"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model that writes, and the plain one."""
    place = tmp_path_factory.mktemp(request.param)
    save_model(varied(bart if request.param == "bart" else llama), place)
    make_tokenizer().save_pretrained(place)
    options = ModelOptions(model=str(place), device="cpu", device_memory="64MiB", home="host", dtype="fp32")
    factory = AutoModelForSeq2SeqLM if request.param == "bart" else AutoModelForCausalLM
    with TextWriter(options) as writer:
        yield writer, factory.from_pretrained(place, dtype=torch.float32).eval()


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_every_key_gives_a_batch_what_it_gives_each_prompt_alone(opened: Any, keys: dict[str, Any]):
    writer, plain = opened
    given = writer._model.generation_config
    writer._model.generation_config = GenerationConfig.from_dict({**given.to_dict(), **keys})
    try:
        assert texts(writer, 3) == alone(plain, **keys)
    finally:
        writer._model.generation_config = given


def test_a_row_ends_at_its_string_though_others_of_its_batch_go_on(opened: Any):
    writer, plain = opened
    given, free = writer._model.generation_config, alone(plain)
    stops = [text[n : n + 2] for text in free for n in range(COUNT - 2)]
    stops = [stop for stop in stops if len(stop) == 2 and UNKNOWN not in stop]
    assert len(stops) > 3
    for stop in [*stops, TEXTS[1][-1] + free[1][:1]]:
        keys = {"stop_strings": [stop]}
        writer._model.generation_config = GenerationConfig.from_dict({**given.to_dict(), **keys})
        written, _ = writer.write(TEXTS, lambda _: None, batch_size=3, max_new_tokens=COUNT, do_sample=False)
        want = alone(plain, **keys)
        assert [one.text for one in written] == want
        assert [one.finish_reason == "stop" for one in written] == [
            (prompt + text).endswith(stop) or one.num_tokens < COUNT
            for prompt, text, one in zip(TEXTS, want, written, strict=True)
        ]
    writer._model.generation_config = given


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
