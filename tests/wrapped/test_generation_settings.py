"""Every key of generation_config.json: the tokens of transformers, or a refusal that names it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.errors import ConfigError
from outsize.wrapped.writing import generation_settings
from outsize.wrapped.writing.detokenizer import UNKNOWN
from tiny import tiny_model

PROMPT, COUNT = "the square", 8
# As JSON has them; each is taken by itself, greedily, or where it says so drawn.
TAKEN: tuple[dict[str, Any], ...] = (
    {"eos_token_id": [0, 70]},
    {"eos_token_id": None, "bos_token_id": 3, "decoder_start_token_id": 3},
    {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5, "diversity_penalty": 0.0},
    {"num_beams": 2, "early_stopping": "never"},
    {"repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[70], [30, 31]]},
    {"suppress_tokens": list(range(60, 160))},
    {"begin_suppress_tokens": list(range(60, 160))},
    {"sequence_bias": [[[70], 9.0]]},
    {"forced_bos_token_id": 7, "forced_eos_token_id": 5},
    {"min_length": 12, "eos_token_id": list(range(200))},
    {"min_new_tokens": 4, "eos_token_id": list(range(200))},
    {"exponential_decay_length_penalty": [2, 9.0], "eos_token_id": 9},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"guidance_scale": 2.5},
    {"prefill_chunk_size": 3},
    {"max_time": 600.0},
    {"stop_strings": ["?"]},
    {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 9.0, "seeding_scheme": "lefthash", "context_width": 1}},
    *({"do_sample": True, **one} for one in (
        {"temperature": 3.0, "top_k": 9}, {"top_p": 0.4}, {"min_p": 0.9}, {"typical_p": 0.3}, {"top_h": 0.5},
        {"epsilon_cutoff": 0.004}, {"eta_cutoff": 0.9}, {"num_beams": 2, "top_k": 0},
    )),
)  # fmt: skip
NO_MATTER: tuple[dict[str, Any], ...] = (
    {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    {"output_attentions": True, "output_hidden_states": True},
    {"cache_implementation": "static", "max_cache_len": 50, "disable_compile": True},
    {"cache_implementation": "hybrid", "cache_config": {"a": 1}},
    {"max_length": 3, "low_memory": True},
    {"use_cache": False, "pad_token_id": 5, "max_new_tokens": 2},
    {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.1, "is_assistant": True},
    {"num_return_sequences": 1, "num_beam_groups": 1, "token_healing": False, "penalty_alpha": 0.0},
    {"temperature": 0.2, "top_p": 0.1},
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"num_return_sequences": 2, "do_sample": True},
    {"token_healing": True},
    {"cache_implementation": "quantized"},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"penalty_alpha": 0.6},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_early_exit": 1},
    {"use_mtp": True},
    {"dola_layers": "high"},
    {"constraints": [1]},
    {"force_words_ids": [[5]]},
    {"num_beam_groups": 2, "num_beams": 4},
    {"eos_token_id": "<eos>"},
    {"eos_token_id": [0, "<eos>"]},
    {"stop_strings": [5]},
    {"stop_strings": [""]},
    {"num_beams": 0},
    {"bad_words_ids": 5},
    {"sequence_bias": [[[99999], 1.0]]},
    {"repetition_penalty": -1.0},
    {"min_new_tokens": "x"},
    {"suppress_tokens": "x"},
    {"typical_p": -1.0, "do_sample": True},
    {"temperature": "hot", "do_sample": True},
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture
def writer(directory: Path) -> Iterator[TextWriter]:
    options = ModelOptions(
        model=str(directory), device="cpu", device_memory="64MiB", home="disk", dtype="fp32"
    )
    with TextWriter(options) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(directory: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def write(writer: TextWriter, asked: dict[str, Any], said: list[str] | None = None) -> Any:
    writer._model.generation_config = GenerationConfig.from_dict(asked)
    torch.manual_seed(3)
    on_text = (lambda _: None) if said is None else said.append
    draws = {"do_sample": bool(asked.get("do_sample"))}
    ((one,), _) = writer.write([PROMPT], on_text, max_new_tokens=COUNT, batch_size=1, **draws)
    return one


def resident(plain: nn.Module, directory: Path, asked: dict[str, Any]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    plain.generation_config = GenerationConfig.from_dict(asked)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    torch.manual_seed(3)
    stops = {"tokenizer": tokenizer} if "stop_strings" in asked else {}
    written = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        do_sample=bool(asked.get("do_sample")),
        pad_token_id=0,
        **stops,
    )
    row = written[0, ids.shape[1] :].tolist()
    ends = generation_settings.ends_of(plain.generation_config)
    return row[: next((count for count, token in enumerate(row, 1) if token in ends), None)]


def test_the_table_names_every_key_that_transformers_knows_and_once():
    modes = [key for keys in generation_settings.MODES.values() for key in keys]
    named = [
        *generation_settings.HONOURED,
        *generation_settings.WITHOUT_EFFECT,
        *generation_settings.REFUSED,
        *modes,
    ]
    assert len(named) == len(set(named))
    assert vars(GenerationConfig()).keys() <= set(named)


def test_every_kind_of_key_has_members_here():
    keys = {key for one in TAKEN for key in one}
    assert keys == generation_settings.HONOURED
    refused = {key for one in REFUSED for key in one}
    assert {
        *generation_settings.REFUSED,
        *(k for ks in generation_settings.MODES.values() for k in ks),
    } <= refused


@pytest.mark.parametrize("asked", TAKEN, ids=str)
def test_a_key_that_is_taken_gives_the_tokens_of_transformers(
    writer: TextWriter, plain: nn.Module, directory: Path, asked: dict[str, Any]
):
    pieces: list[str] = []
    one = write(writer, asked, pieces)
    text = writer._tokenizer.decode(resident(plain, directory, asked), skip_special_tokens=True)
    assert one.text == text == "".join(pieces)


@pytest.mark.parametrize("asked", NO_MATTER, ids=str)
def test_a_key_that_no_token_depends_on_changes_none(writer: TextWriter, asked: dict[str, Any]):
    assert write(writer, asked) == write(writer, {})


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_a_key_that_is_not_done_is_refused_by_name_before_any_text(writer: TextWriter, asked: dict[str, Any]):
    pieces: list[str] = []
    with pytest.raises(ConfigError, match=f"generation_config.json: {next(iter(asked))} is "):
        write(writer, asked, pieces)
    assert pieces == []


def test_a_key_that_nothing_knows_is_named(writer: TextWriter, caplog: pytest.LogCaptureFixture):
    write(writer, {"chat_format": "chatml", "num_beams": 1})
    assert "chat_format: known to nothing here, and not used" in caplog.text


def test_a_text_that_ends_exactly_where_it_would_be_cut_has_ended(
    writer: TextWriter, plain: nn.Module, directory: Path
):
    row = resident(plain, directory, {})
    count = row.index(row[-1]) + 1
    for ends, reason in ({}, "length"), ({"eos_token_id": row[-1]}, "stop"):
        writer._model.generation_config = GenerationConfig.from_dict(ends)
        ((one,), _) = writer.write(
            [PROMPT], lambda _: None, max_new_tokens=count, batch_size=1, do_sample=False
        )
        assert (one.num_tokens, one.finish_reason) == (count, reason)
    text = write(writer, {}).text
    stop = {"stop_strings": [next(letter for letter in reversed(text) if letter != UNKNOWN)]}
    assert write(writer, stop).finish_reason == "stop"


def test_a_text_that_ends_by_a_string_that_began_in_the_prompt_has_ended(writer: TextWriter):
    begun = write(writer, {}).text[:1]
    one = write(writer, {"stop_strings": [PROMPT[-2:] + begun]})
    assert (one.text, one.finish_reason) == (begun, "stop")
