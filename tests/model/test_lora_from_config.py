"""Adapters counted from a config, held to what PEFT makes and a run measures."""

import warnings
from dataclasses import replace

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from model.test_workload import CONFIGS, EXPERTS
from outsize.errors import ConfigError
from outsize.model.build import build_skeleton
from outsize.model.sizes.lora_from_config import MODULES, adapted_workload, parse_modules, with_adapters
from outsize.model.sizes.spec_from_config import read_shape, spec_from_config
from outsize.model.sizes.workload import count_workload
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.program.ops import Kind
from outsize.planner.search.step_plan import Budgets, PlanOptions, plan_step
from planner.questions import CONFIG, GIB, ask


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("modules", ["q_proj,v_proj", "all-linear"])
def test_the_adapters_are_those_that_peft_makes(family, modules):
    names = parse_modules(modules)
    config = CONFIGS[family]
    counted = with_adapters(spec_from_config(config.to_dict(), "bf16"), 4, names)
    model = build_skeleton(config, "bf16")
    attention = [name for name in names if config.model_type != "qwen3_moe" or name in MODULES[:4]]
    settings = peft.LoraConfig(r=4, target_modules=attention, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(model, settings)
    assert counted.num_trainable == sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert counted.num_parameters == sum(p.numel() for p in made.parameters())


def test_what_is_frozen_costs_its_weights_alone():
    plain = spec_from_config(CONFIG, "bf16")
    model = with_adapters(plain, 8, ("q_proj",))
    assert (model.dtype, model.compute_dtype) == ("fp32", "bf16")
    block = model.units[1]
    assert home_bytes(block, "fp32") == 16 * block.numel + 2 * block.frozen[0].numel
    assert not model.units[0].trainable
    assert home_bytes(model.units[0], "fp32") == pytest.approx(plain.units[0].weight_bytes("bf16"), rel=0.01)


def test_a_frozen_base_comes_up_and_no_gradient_of_it_leaves():
    question = ask()
    model = with_adapters(question.model, 8, ("q_proj", "v_proj"))
    work = adapted_workload(question.workload_of(4), model)
    options = PlanOptions(home="host", below="host", clip=True, microbatches=4)
    demand = replace(question, model=model, workload_of=lambda _: work).microbatch(4).demand
    plan = plan_step(model, demand, Budgets(device=20 * GIB, host=100 * GIB), options)
    full = plan_step(question.model, demand, Budgets(device=20 * GIB, host=100 * GIB), options)
    ran = {op.unit for op in plan.program if op.kind is Kind.BACKWARD}
    assert 0 not in ran  # nothing trains below the first block
    assert plan.layout.first_backward == 1
    assert plan.traffic.down < 0.05 * full.traffic.down + 16 * 4 * max(work.boundary_bytes)
    assert sum(op.kind is Kind.GRAD for op in plan.program) == CONFIG["num_hidden_layers"]


def test_a_backward_of_what_is_frozen_is_one_product_of_two():
    shape, plain = read_shape(CONFIG), spec_from_config(CONFIG, "bf16")
    work = count_workload(shape, "bf16", sequences=2, seq_len=256)
    adapted = adapted_workload(work, with_adapters(plain, 8, ("q_proj", "v_proj")))
    assert adapted.gradient_flops[0] == 0
    for unit in range(1, 7):
        assert work.forward_flops[unit] < adapted.forward_flops[unit] < 1.05 * work.forward_flops[unit]
        assert adapted.gradient_flops[unit] < 0.6 * work.gradient_flops[unit]
    assert adapted.gradient_flops[-1] == work.forward_flops[-1]


ONES = torch.ones(4, 16, dtype=torch.long)


@pytest.mark.parametrize(
    "stacks", [(), EXPERTS[:1], EXPERTS[1:], EXPERTS], ids=["none", "first", "second", "both"]
)
def test_a_backward_of_experts_takes_the_products_that_torch_counts(stacks):
    """Of few tokens, of whose attention hardly anything is left; the embedding is taken to need a gradient."""
    config, modules, (rows, length) = CONFIGS["qwen3_moe"], ("q_proj", "v_proj"), ONES.shape
    plain = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    settings = peft.LoraConfig(r=4, target_modules=list(modules), target_parameters=list(stacks) or None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(plain, settings)
    model.enable_input_require_grads()
    loss = model(input_ids=ONES.cumsum(1), labels=ONES).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    spec = with_adapters(spec_from_config(config.to_dict(), "fp32"), 4, modules, stacks)
    work = count_workload(read_shape(config.to_dict()), "fp32", sequences=rows, seq_len=length)
    counted = adapted_workload(work, spec).gradient_flops
    assert sum(counted) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q_prj", "did you mean q_proj"),
        ("", "there are q_proj|did you mean"),
        ("lm_head,zzz", "no linear layer"),
    ],
)
def test_modules_that_are_none(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_modules(text)


def test_adapters_that_cannot_be():
    model = spec_from_config(CONFIGS["qwen3_moe"].to_dict(), "bf16")
    with pytest.raises(ConfigError, match="experts are stored as one tensor"):
        with_adapters(model, 8, ("gate_proj",))
    with pytest.raises(ConfigError, match="at least 1"):
        with_adapters(model, 0, ("q_proj",))
