"""Plans of all kinds of architectures: counted, refused, or planned by their text part."""

import json

import pytest
from transformers import AutoConfig

from cli.test_plan import answer, run
from outsize.cli import main

# By model type: what its config says, and its parameters as published, in billions.
PUBLISHED = {
    "gpt2": ({}, 0.124),
    "phi3": ({}, 3.82),
    "gemma3_text": ({}, 2.63),
    "glm4": ({}, 9.40),
    "gpt_oss": ({}, 116.8),
    "deepseek_v3": ({}, 671.0),
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}
OPTIONS = (
    "--gpus",
    "h200",
    "--ram",
    "2TB",
    "--disk",
    "50TB",
    "--no-advice",
    "--tokens-per-step",
    "16384",
    "--seq-len",
    "1024",
)


def written(tmp_path, model_type, **changes):
    config = AutoConfig.for_model(model_type, **changes)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict(), default=str))
    return file


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_any_causal_model_is_planned_at_its_real_size(tmp_path, capsys, model_type):
    changes, billions = PUBLISHED[model_type]
    found = answer(capsys, written(tmp_path, model_type, **changes), *OPTIONS)
    assert found["num_parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["tokens_per_s"] > 0
    assert f"transformers builds of a {model_type} config" in " ".join(found["assumptions"])


def test_a_model_of_several_parts_is_planned_by_the_text_part_which_is_named(tmp_path, capsys):
    found = answer(capsys, written(tmp_path, "gemma3"), *OPTIONS)
    assert any("its text part alone, gemma3_text, is planned" in line for line in found["assumptions"])
    found = answer(capsys, written(tmp_path, "llava"), *OPTIONS)
    assert any("its text part alone, llama, is planned" in line for line in found["assumptions"])


def test_a_text_part_that_cannot_be_built_alone_is_planned_with_the_others(tmp_path, capsys):
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 256}
    heads = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    parts = {"text_config": SMALL | heads | {"bos_token_id": 1, "eos_token_id": 2}, "vision_config": vision}
    found = answer(capsys, written(tmp_path, "qwen2_5_vl", **parts), *OPTIONS)
    assert found["tokens_per_s"] > 0
    assert any("planned whole, and its batches as text alone" in line for line in found["assumptions"])


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (
            {"quant_method": "fp8"},
            "stored as fp8, which outsize does not read; the answer is for them in bf16",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "stored as awq, 4 bits, which trains adapters alone; the answer",
        ),
    ],
)
def test_how_weights_are_stored_changes_no_answer_and_is_said(tmp_path, capsys, stored, words):
    found = answer(capsys, written(tmp_path, "qwen3", **SMALL, quantization_config=stored), *OPTIONS)
    assert found["num_parameters"] == 125_824
    assert any(words in line for line in found["assumptions"])


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("t5", "is an encoder-decoder"), ("bart", "is an encoder-decoder"), ("vit", "not a language model")],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, capsys, model_type, words):
    assert run(written(tmp_path, model_type), *OPTIONS) != 0
    assert words in capsys.readouterr().err


def test_an_architecture_that_nobody_knows_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "none_such", "auto_map": {"AutoConfig": "x.Y"}}')
    assert run(tmp_path, *OPTIONS) != 0
    told = capsys.readouterr().err
    assert "transformers does not know it" in told
    assert "Python code of its own" in told


def test_adapters_and_parts_go_with_a_counted_model(tmp_path, capsys):
    file = written(tmp_path, "olmo2", num_hidden_layers=4)
    plain = answer(capsys, file, *OPTIONS)
    lora = answer(capsys, file, *OPTIONS, "--method", "lora", "--lora-modules", "all-linear")
    assert 0 < lora["num_trainable"] < 0.01 * plain["num_trainable"]
    parted = answer(capsys, file, *OPTIONS, "--mlp-parts", "4", "--microbatches", "1")
    whole = answer(capsys, file, *OPTIONS, "--microbatches", "1", "--what-if", "mlp_parts=4")
    (asked,) = whole["what_if"]
    assert asked["step_s"] <= parted["step_s"]  # it may take other microbatches
    assert run(file, *OPTIONS, "--device-memory", "2200MiB", "--microbatches", "1") != 0
    assert "--mlp-parts 4" in capsys.readouterr().err
    assert parted["memory_bytes"]["device"]["workspace"] < whole["memory_bytes"]["device"]["workspace"]


def test_train_takes_the_adapters_of_a_mixture_as_plan_wrote_them(tmp_path, capsys):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    config = Qwen3MoeConfig(
        **sizes, **layers, num_experts_per_tok=2, vocab_size=96, max_position_embeddings=64
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "px.yaml"
    options = ("--gpus", "4090", "--seq-len", 16, "--tokens-per-step", 128, "--no-advice", "--mlp-parts", 2)
    budgets = ("--host-memory", "1GiB", "--device-memory", "1GiB")  # which this machine has, too
    lora = ("--method", "lora", "--lora-parameters", "experts.gate_up_proj,experts.down_proj")
    assert run(tmp_path / "model", *options, *budgets, *lora) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "LoRA of rank 8 on experts.gate_up_proj, experts.down_proj on" in shown
    assert run(tmp_path / "model", *options, *budgets, "--method", "lora") == 2
    assert "name --lora-modules; the linear layers" in capsys.readouterr().err
    predicted = answer(capsys, tmp_path / "model", *options, *budgets, *lora, "--output", file)
    with pytest.raises(SystemExit) as done:
        main(["train", str(file), "--dry-run", "--json"])
    assert not done.value.code, capsys.readouterr().err
    dry = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert dry["config"]["lora"]["target_modules"] is None  # PEFT's choice, there as here
    assert dry["config"]["lora"]["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert dry["config"]["train"]["mlp_parts"] == 2
    assert dry["plan"]["microbatches"] == predicted["microbatches"]
