"""Counted without weights, held to what a run measures on the model itself: parts, adapters, kernels; and to torch."""

from pathlib import Path

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from counting import counted
from outsize.accelerators import CPU, Devices
from outsize.config import parse_config
from outsize.model.adapters import put_in
from outsize.model.build import build_skeleton
from outsize.model.liger import take_liger
from outsize.model.tiled import take_in_parts
from outsize.model.walk import Boundaries
from outsize.runtime.trial.measured import KnownRows
from outsize.session.job import prepare
from outsize.session.job.model_setup import lora_of, split_model
from outsize.streamed.spec import RunSpec

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
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SEQUENCES, SEQ_LEN = 2, 512
# Of experts it depends on the router how much they save, and a run takes them one by one.
MIXTURES = ("qwen3_moe", "many_experts")


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
    if kernels == "liger":
        take_liger(model, CPU)
    adapters = None if lora is None else put_in(model, lora_of(run, model), 0)
    parts = split_model(model, dtype, run, adapters)
    take_in_parts(parts, mlp_parts)
    with Boundaries(parts.modules) as boundaries:
        return prepare._measure(
            RunSpec.of(run, Path()), 1, config, parts, boundaries, KnownRows(), lambda _: None
        )[0]


@pytest.mark.parametrize(
    ("family", "mlp_parts", "dtype"),
    [
        *(("llama", 1, "fp32"), ("llama", 4, "bf16"), ("qwen3", 1, "bf16"), ("qwen3", 8, "fp32")),
        *(("qwen3_moe", 1, "bf16"), ("qwen3_moe", 2, "bf16"), ("many_experts", 16, "bf16")),
    ],
)
def test_counts_are_what_a_run_measures(family, mlp_parts, dtype):
    config = CONFIGS[family]
    measured = measure(config, dtype, mlp_parts)
    work = counted(config.to_dict(), dtype, mlp_parts=mlp_parts, seq_len=SEQ_LEN).workload(SEQUENCES, SEQ_LEN)
    within = 0.25 if family in MIXTURES else 0.1
    assert work.boundary_bytes == measured.boundary_bytes
    for kind, unit in {"embedding": 0, "block": 1, "head": -1}.items():
        assert work.backward_workspace_bytes[kind] == pytest.approx(measured.backward_bytes[unit], rel=within)
    assert work.saved_bytes[1] == pytest.approx(measured.saved_bytes[1], rel=within)
    assert measured.saved_bytes[-1] == work.saved_bytes[-1] == 0
    assert work.attention_bytes[1] == measured.attention[1].num_bytes
    assert work.attention_flops[1] == measured.attention[1].flops
    assert (work.recompute_flops[1] < work.forward_flops[1]) == (1 in measured.needed)
    if family not in MIXTURES:
        assert work.products_bytes[1] == measured.products[1].num_bytes
        assert work.recompute_flops[1] == measured.products[1].flops
    # A run sees the operations of its trial.
    flops = measured.flops.of(SEQUENCES, SEQ_LEN)
    assert [one.forward for one in flops] == pytest.approx(work.forward_flops, rel=0.001)
    assert [one.gradient for one in flops] == pytest.approx(work.gradient_flops, rel=0.02)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("family", "mlp_parts", "modules", "parameters", "dtype"),
    [
        ("llama", 1, ("q_proj", "k_proj", "v_proj", "o_proj"), (), "bf16"),
        ("qwen3", 2, ("q_proj", "v_proj"), (), "fp32"),
        ("qwen3_moe", 1, ("q_proj",), EXPERTS, "bf16"),
        ("many_experts", 16, ("q_proj",), EXPERTS[1:], "bf16"),
    ],
)
def test_counts_of_a_frozen_block_with_adapters(family, mlp_parts, modules, parameters, dtype):
    config = CONFIGS[family]
    lora = {"r": 4, "target_modules": modules, "target_parameters": parameters or None}
    measured = measure(config, dtype, mlp_parts, lora)
    counts = counted(config.to_dict(), dtype, mlp_parts=mlp_parts, lora=lora, seq_len=SEQ_LEN)
    work = counts.workload(SEQUENCES, SEQ_LEN)
    within = 0.25 if family in MIXTURES else 0.1
    assert work.backward_workspace_bytes["block"] == pytest.approx(measured.backward_bytes[1], rel=within)
    assert work.saved_bytes[1] == pytest.approx(measured.saved_bytes[1], rel=within)
    assert counts.spec.num_trainable == measured_trainable(config, dtype, modules, parameters)


@pytest.mark.parametrize(
    ("family", "lora", "dtype"),
    [("llama", None, "fp32"), ("qwen3", None, "bf16"), ("llama", {"r": 4}, "bf16")],
)
def test_what_liger_saves_less_is_counted(family, lora, dtype, monkeypatch):
    """By the trial of a run on an accelerator, which saves what the kernels would, and runs none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "stand_in"))
    monkeypatch.setattr(Devices, "own_processor", True)
    config = CONFIGS[family]
    lora = lora and {**lora, "target_modules": ("q_proj", "v_proj")}
    measured = measure(config, dtype, 1, lora, "liger")
    counts = counted(config.to_dict(), dtype, lora=lora, kernels="liger", seq_len=SEQ_LEN)
    work = counts.workload(SEQUENCES, SEQ_LEN)
    plain = counted(config.to_dict(), dtype, lora=lora, seq_len=SEQ_LEN).workload(SEQUENCES, SEQ_LEN)
    # Cosines and sines of positions are taken to be the block's: nothing beside one of a real size.
    assert work.saved_bytes[1] == pytest.approx(measured.saved_bytes[1], rel=0.05)
    assert work.saved_bytes[1] < 0.9 * plain.saved_bytes[1]
    assert work.backward_workspace_bytes["block"] > 0.9 * measured.backward_bytes[1]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_operations_are_those_that_torch_counts(family):
    """Of few tokens, of whose attention, which torch counts as if it were not causal, hardly anything is left."""
    config, (rows, length) = CONFIGS[family], (4, 16)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    ids = torch.arange(rows * length).view(rows, length)
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    work = counted(config.to_dict(), "fp32", seq_len=length).workload(rows, length)
    assert sum(work.forward_flops) == pytest.approx(forward.get_total_flops(), rel=0.02)
    # The first block's inputs have gradients here, and none of an embedding is a product.
    assert sum(work.gradient_flops) == pytest.approx(backward.get_total_flops(), rel=0.02)


def test_operations_are_two_per_parameter_and_token_and_attention_besides():
    counts = counted(LLAMA_8B)
    flops = counts.workload(4, 2048).forward_flops
    assert counts.spec.num_parameters == 8_030_261_248
    assert (flops[0], len(flops)) == (0, 34)
    assert flops[-1] == 2 * 4 * 2048 * 4096 * 128256
    weights = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336)
    assert flops[1] == 2 * 4 * 2048 * weights + 2 * 4 * 2048**2 * 4096
    parted = counted(LLAMA_8B, mlp_parts=4).workload(4, 2048)
    assert parted.forward_flops[1] == flops[1]
    assert parted.recompute_flops[1] == flops[1] - 2 * 4 * 2048 * 3 * 4096 * 14336


def test_a_block_takes_a_token_s_share_each():
    one, four = (counted(CONFIGS["llama"].to_dict()).workload(rows, 1024) for rows in (1, 4))
    assert four.tokens == 4 * one.tokens
    assert sum(four.forward_flops) == pytest.approx(4 * sum(one.forward_flops))
    assert four.saved_bytes[1] == pytest.approx(4 * one.saved_bytes[1])


def measured_trainable(config, dtype, modules, parameters):
    settings = peft.LoraConfig(
        r=4, target_modules=list(modules), target_parameters=list(parameters) or None, task_type="CAUSAL_LM"
    )
    model = build_skeleton(config, dtype)
    return sum(p.numel() for p in put_in(model, settings, 0).initial.values())
