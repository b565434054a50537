"""What lies apart from what trains."""

import pytest
import torch
from torch import nn

import zoo
from outsize.errors import ModelError
from outsize.model.compiled import dtype_and_parts
from outsize.model.split import split


def small_part_of_blocks(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    return model


def test_a_model_of_one_dtype_that_trains_whole_has_no_parts():
    dtype, apart = dtype_and_parts(zoo.build("llama"))
    assert dtype == "fp32"
    assert apart("lm_head.weight") is None


def test_frozen_weights_beside_something_small_that_trains_lie_apart():
    model = small_part_of_blocks(zoo.build("llama"))
    dtype, apart = dtype_and_parts(model)
    spec = split(model, dtype, apart=apart).spec
    block = next(unit for unit in spec.units if unit.kind == "block")
    assert {t.name.split(".")[-2] for t in block.tensors} == {"input_layernorm", "post_attention_layernorm"}
    assert [part.plane for part in block.frozen] == ["frozen_fp32"]
    assert block.gradient_bytes == 4 * block.numel < block.weight_bytes("fp32")
    # A unit that is frozen as a whole holds no state in any case, and may train later.
    assert not spec.units[0].frozen
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())


def test_frozen_weights_of_another_dtype_lie_apart():
    model = zoo.build("llama").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
        if "norm" in name:
            parameter.data = parameter.data.float()
    dtype, apart = dtype_and_parts(model)
    spec = split(model, dtype, apart=apart).spec
    assert dtype == "fp32"
    assert {part.dtype for unit in spec.units for part in unit.frozen} == {"bf16"}
    assert spec.units[0].weight_bytes("fp32") == 2 * spec.units[0].frozen[0].numel


def test_what_lies_apart_cannot_train():
    model = small_part_of_blocks(zoo.build("llama"))
    dtype, apart = dtype_and_parts(model)
    model.requires_grad_(True)
    with pytest.raises(ModelError, match="lies with what did not"):
        split(model, dtype, apart=apart)
