"""Counted from a config, held to what a run measures on the model itself."""

from dataclasses import replace
from pathlib import Path

import peft
import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from outsize.accelerators import CPU, Devices
from outsize.config import parse_config
from outsize.model.adapters import put_in
from outsize.model.block_kernels import take_kernels
from outsize.model.build import build_skeleton
from outsize.model.sizes.lora_from_config import adapted_workload, with_adapters, with_frozen
from outsize.model.sizes.spec_from_config import read_shape, spec_from_config
from outsize.model.sizes.workload import count_workload
from outsize.model.tiled_mlp import take_in_parts
from outsize.model.walk import Boundaries
from outsize.session.job import prepare

SIZES = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": LlamaConfig(intermediate_size=512, **SIZES),
    "qwen3": Qwen3Config(intermediate_size=768, head_dim=64, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        intermediate_size=768,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=64,
        **SIZES,
    ),
}
# The proportions of Qwen3-235B-A22B.
CONFIGS["many_experts"] = Qwen3MoeConfig(
    moe_intermediate_size=48,
    num_experts=32,
    num_experts_per_tok=8,
    head_dim=32,
    **{**SIZES, "hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 1},
)
SEQUENCES, SEQ_LEN = 2, 512
# Of experts it depends on the router how much they save.
MIXTURES = {("qwen3_moe", 1): 0.1, ("many_experts", 1): 0.2}


def measure(config, dtype, mlp_parts=1, lora=None, kernels="none"):
    method = "full" if lora is None else "lora"
    run = parse_config(
        {
            "model": {"path": "unused"},
            "data": {"path": "unused", "seq_len": SEQ_LEN},
            "train": {"tokens_per_step": SEQUENCES * SEQ_LEN, "method": method},
            "lora": lora or {},
        }
    )
    model = build_skeleton(config, dtype, frozen=lora is not None)
    take_kernels(model, kernels, CPU, lambda _: None)
    adapters = None if lora is None else put_in(model, prepare.lora_of(run, model), 0)
    parts = prepare.split_model(model, dtype, run, adapters)
    take_in_parts(parts, mlp_parts)
    with Boundaries(parts.modules) as boundaries:
        return prepare._measure(run, config, parts, boundaries, lambda _: None, num_ranks=1)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "mlp_parts"),
    [
        *((family, 1) for family in CONFIGS),
        ("llama", 4),
        ("qwen3", 8),
        ("qwen3_moe", 2),
        ("many_experts", 4),
        ("many_experts", 16),
    ],
)
def test_counts_are_what_a_run_measures(family, mlp_parts, dtype):
    config = CONFIGS[family]
    measured = measure(config, dtype, mlp_parts)
    shape = replace(read_shape(config.to_dict()), mlp_parts=mlp_parts)
    counted = count_workload(shape, dtype, sequences=SEQUENCES, seq_len=SEQ_LEN)
    assert counted.boundary_bytes[1:] == measured.boundary_bytes[1:]
    units = {"embedding": 0, "block": 1, "head": -1}
    for kind, unit in units.items():
        assert counted.backward_workspace_bytes[kind] == pytest.approx(measured.backward_bytes[unit], rel=0.1)
    assert counted.forward_workspace_bytes["block"] == pytest.approx(measured.forward_bytes[1], rel=0.1)
    assert counted.saved_bytes[1] == pytest.approx(
        measured.saved_bytes[1], rel=MIXTURES.get((family, mlp_parts), 0.001)
    )
    assert measured.saved_bytes[-1] == counted.saved_bytes[-1] == 0
    attention, products = measured.attention[1], measured.products[1]
    assert counted.attention_bytes[1] == attention.num_bytes
    assert counted.attention_flops[1] == attention.flops
    assert counted.attention_bytes[-1] == counted.products_bytes[-1] == products_of_head(measured) == 0
    if (family, mlp_parts) not in MIXTURES:  # its experts run in operations of their own
        assert counted.products_bytes[1] == products.num_bytes
        assert counted.recompute_flops[1] == products.flops
    assert (counted.recompute_flops[1] < counted.forward_flops[1]) == (1 in measured.needed)
    assert counted.held_bytes == pytest.approx(measured.held_bytes, rel=0.1)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "mlp_parts", "modules", "parameters"),
    [
        ("llama", 1, ("q_proj", "k_proj", "v_proj", "o_proj"), ()),
        ("llama", 4, ("q_proj", "v_proj"), ()),
        ("qwen3", 2, ("q_proj", "v_proj"), ()),
        ("qwen3_moe", 1, ("q_proj", "v_proj"), ()),
        ("many_experts", 1, ("q_proj", "v_proj"), ()),
        ("many_experts", 4, ("q_proj", "v_proj"), ()),
        ("qwen3_moe", 1, ("q_proj",), EXPERTS),
        ("qwen3_moe", 1, ("q_proj",), EXPERTS[:1]),
        ("qwen3_moe", 1, ("q_proj",), EXPERTS[1:]),
        ("qwen3_moe", 8, ("q_proj",), EXPERTS),
        ("many_experts", 2, ("q_proj",), EXPERTS),
        ("many_experts", 16, ("q_proj",), EXPERTS),
        ("many_experts", 16, ("q_proj",), EXPERTS[1:]),
    ],
)
def test_counts_of_a_frozen_block_with_adapters(family, mlp_parts, modules, parameters, dtype):
    config = CONFIGS[family]
    measured = measure(
        config, dtype, mlp_parts, {"r": 4, "target_modules": modules, "target_parameters": parameters or None}
    )
    spec = with_adapters(spec_from_config(config.to_dict(), dtype), 4, modules, parameters)
    shape = replace(with_frozen(read_shape(config.to_dict()), spec), mlp_parts=mlp_parts)
    work = count_workload(shape, dtype, sequences=SEQUENCES, seq_len=SEQ_LEN)
    counted = adapted_workload(work, spec)
    assert counted.backward_workspace_bytes["block"] == pytest.approx(measured.backward_bytes[1], rel=0.1)
    assert counted.forward_workspace_bytes["block"] == pytest.approx(measured.forward_bytes[1], rel=0.1)
    assert counted.saved_bytes[1] == pytest.approx(measured.saved_bytes[1], rel=0.02)
    assert spec.num_trainable == measured_trainable(config, dtype, modules, parameters)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "lora"), [("llama", None), ("qwen3", None), ("llama", {"r": 4})])
def test_what_liger_saves_less_is_counted(family, lora, dtype, monkeypatch):
    """By the trial of a run on an accelerator, which saves what the kernels would, and runs none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "stand_in"))
    monkeypatch.setattr(Devices, "own_processor", True)
    modules = ("q_proj", "v_proj")
    config = CONFIGS[family]
    measured = measure(config, dtype, 1, lora and {**lora, "target_modules": modules}, "liger")
    shape = replace(read_shape(config.to_dict()), trains=lora is None, fused=True)
    counted = count_workload(shape, dtype, sequences=SEQUENCES, seq_len=SEQ_LEN)
    if lora is not None:
        counted = adapted_workload(
            counted, with_adapters(spec_from_config(config.to_dict(), dtype), 4, modules)
        )
    assert counted.saved_bytes[1] == pytest.approx(
        measured.saved_bytes[1], rel=0.001 if lora is None else 0.02
    )
    for counts, found in (
        (counted.backward_workspace_bytes, measured.backward_bytes),
        (counted.forward_workspace_bytes, measured.forward_bytes),
    ):
        assert counts["block"] > 0.9 * found[1]


def measured_trainable(config, dtype, modules, parameters):
    settings = peft.LoraConfig(
        r=4, target_modules=list(modules), target_parameters=list(parameters) or None, task_type="CAUSAL_LM"
    )
    model = build_skeleton(config, dtype)
    return sum(p.numel() for p in put_in(model, settings, 0).initial.values())


def products_of_head(measured):
    return measured.products[-1].num_bytes


def test_a_block_takes_a_token_s_share_each():
    shape = read_shape(CONFIGS["llama"].to_dict())
    one = count_workload(shape, "bf16", sequences=1, seq_len=1024)
    four = count_workload(shape, "bf16", sequences=4, seq_len=1024)
    assert four.tokens == 4 * one.tokens
    assert four.backward_workspace_bytes["block"] == 4 * one.backward_workspace_bytes["block"]
    assert sum(four.forward_flops) == pytest.approx(4 * sum(one.forward_flops))
