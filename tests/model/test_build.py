import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BartConfig, LlamaConfig, ViTConfig

import zoo
from outsize.errors import CheckpointError, ModelError
from outsize.model.build import build_skeleton, load_hf_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEPT_FP32 = ("correction_bias", "expert_bias")  # stored in checkpoints, see test_checkpoint


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_skeleton_is_the_model_without_its_weights(name: str, dtype: str):
    model = zoo.build(name, dtype=DTYPES[dtype])
    skeleton = build_skeleton(zoo.ARCHITECTURES[name](), dtype)
    assert type(skeleton) is type(model)
    assert skeleton.training
    assert skeleton.config._attn_implementation == model.config._attn_implementation
    assert [n for n, _ in skeleton.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]  # ties, too
    ours = dict(skeleton.named_parameters(remove_duplicate=False))
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        ghost = ours[parameter_name]
        assert ghost.is_meta
        assert (ghost.shape, ghost.dtype) == (parameter.shape, parameter.dtype)
        assert ghost.requires_grad == parameter.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_buffers_are_those_of_a_model_really_built(name: str, dtype: str):
    model = zoo.build(name, dtype=DTYPES[dtype])
    ours = dict(build_skeleton(zoo.ARCHITECTURES[name](), dtype).named_buffers())
    assert list(ours) == [n for n, _ in model.named_buffers()]
    for buffer_name, buffer in model.named_buffers():
        if not any(part in buffer_name for part in KEPT_FP32):
            assert ours[buffer_name].dtype == buffer.dtype
            assert torch.equal(ours[buffer_name], buffer), buffer_name


def test_scaled_rotary_frequencies_are_right():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    config = LlamaConfig(**{**zoo.SIZES, "rope_parameters": rope})
    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    assert torch.equal(build_skeleton(config).model.rotary_emb.inv_freq, expected)


def test_buffers_kept_in_fp32_stay_so_under_bf16():
    skeleton = build_skeleton(zoo.ARCHITECTURES["deepseek_v3"](), "bf16")
    assert skeleton.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_large_parameters_are_never_allocated():
    config = LlamaConfig(
        vocab_size=2**20,
        hidden_size=2**14,
        intermediate_size=2**17,
        num_hidden_layers=4,
        num_attention_heads=64,
    )
    skeleton = build_skeleton(config)  # 250 GB in fp32: more than a machine that runs tests can promise
    assert sum(p.numel() for p in skeleton.parameters()) > 6e10


def test_experts_that_are_made_of_zeros_are_never_allocated():
    """Those of Llama 4 are; here they would take some 300 TB."""
    from transformers import Llama4TextConfig

    sizes = {"num_local_experts": 2**14, "hidden_size": 2**16, "intermediate_size": 2**15, "vocab_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = build_skeleton(Llama4TextConfig(**sizes, **layers, interleave_moe_layer_step=1))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.model.layers[0].feed_forward.experts.gate_up_proj.numel() == 2**14 * 2**16 * 2**16


def test_buffers_of_equal_elements_can_be_written_to(monkeypatch: pytest.MonkeyPatch):
    from transformers import LlamaForCausalLM

    made = LlamaForCausalLM.__init__

    def with_buffers(self, config):
        made(self, config)
        for name, value in (("zeros", torch.zeros(2048, 1024)), ("sevens", torch.full((2048, 1024), 7.0))):
            self.register_buffer(name, value)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_buffers)
    model = build_skeleton(
        LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    )
    assert torch.equal(model.sevens, torch.full((2048, 1024), 7.0))
    model.zeros[0] += 1
    assert model.zeros.sum() == 1024


def test_an_8b_model_builds_in_a_few_megabytes():
    script = """
import resource
from transformers import LlamaConfig, LlamaForCausalLM
from outsize.model.build import build_skeleton
config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                     num_attention_heads=32, num_key_value_heads=8)
build_skeleton(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = build_skeleton(config)
assert sum(p.numel() for p in model.parameters()) > 8e9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100 * 1024  # KiB


def test_the_config_of_the_caller_is_not_touched():
    config = zoo.make_config("llama")
    config.use_cache = True
    before = config.to_dict()
    skeleton = build_skeleton(config, "bf16", attention="eager")
    assert config.to_dict() == before
    assert skeleton.config.use_cache is False


def test_attention_is_chosen_and_told(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="outsize"):
        skeleton = build_skeleton(zoo.make_config("llama"), attention="eager")
    assert skeleton.config._attn_implementation == "eager"
    assert "LlamaForCausalLM: attention eager" in caplog.text
    assert build_skeleton(zoo.make_config("llama")).config._attn_implementation == "sdpa"


def test_an_unknown_attention_is_an_error():
    with pytest.raises(ModelError, match=r"attention='telepathy'.*attention=eager works"):
        build_skeleton(zoo.make_config("llama"), attention="telepathy")


@pytest.mark.parametrize("causal", [True, False])
def test_an_encoder_that_can_decode_is_what_its_config_says(causal: bool):
    config = zoo.make_config("bert")
    config.is_decoder = causal
    assert type(build_skeleton(config)).__name__ == ("BertLMHeadModel" if causal else "BertForMaskedLM")


@pytest.mark.parametrize(
    ("config", "reason"), [(BartConfig(), "encoder-decoder"), (ViTConfig(), "not a language model")]
)
def test_what_is_no_language_model_is_refused(config, reason: str):
    with pytest.raises(ModelError, match=reason):
        build_skeleton(config)


@pytest.mark.parametrize(
    ("quantisation", "name"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "bits": 4}, "compressed-tensors, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, 4 bits, gemv"),
        ({}, "a format without a name"),
    ],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_format_that_is_not_read_is_refused_by_its_name(quantisation: dict, name: str, frozen: bool):
    config = zoo.make_config("llama")
    config.quantization_config = quantisation
    with pytest.raises(ModelError, match=rf"stored as {name}, which outsize does not read.*dequantize\(\)"):
        build_skeleton(config, frozen=frozen)


def test_a_quantised_model_is_not_trained_but_built_where_it_is_frozen():
    config = zoo.make_config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ModelError, match=r"quantised \(gptq, 4 bits\).*--method lora"):
        build_skeleton(config)
    built = build_skeleton(config, frozen=True)
    assert not hasattr(built.config, "quantization_config")
    assert config.quantization_config


def test_a_config_is_read_from_a_directory_or_a_file(tmp_path: Path):
    zoo.make_config("qwen3").save_pretrained(tmp_path)
    assert load_hf_config(tmp_path).model_type == "qwen3"
    assert load_hf_config(str(tmp_path / "config.json")).hidden_size == 32


def test_a_directory_without_config_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_hf_config(tmp_path)


def test_a_config_that_is_not_json_is_an_error(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_hf_config(tmp_path)


def test_an_unknown_architecture_is_an_error(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(ModelError, match=r"cannot read the config of .*version of transformers knows"):
        load_hf_config(tmp_path)


def test_a_config_with_a_value_that_cannot_be_is_an_error(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": "small"}))
    with pytest.raises(ModelError, match="Validation error for field 'rms_norm_eps'"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "a/b/c", "~/nowhere", "missing.json"])
def test_a_path_that_does_not_exist_is_an_error_and_asks_no_hub(name: str):
    with pytest.raises(ModelError, match="no such file or directory"):
        load_hf_config(name)


def test_a_hub_id_that_is_not_there_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def absent(name: str, **_: object) -> None:
        raise OSError("no network\nlong advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(
        ModelError, match=r"no directory nobody/nothing, and the hub .*: no network; check"
    ) as error:
        load_hf_config("nobody/nothing")
    assert "long advice" not in str(error.value)


def test_a_hub_id_is_the_config_of_its_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert load_hf_config("somebody/something").hidden_size == 128
