"""What PEFT leaves of a layer's weight, layer by layer, against a whole model."""

import copy

import peft
import torch
from torch import nn

from outsize.compat.transformers_private import changed_weight


def test_a_layer_alone_is_left_the_weight_that_it_is_left_in_its_model():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
    config = peft.LoraConfig(r=3, rank_pattern={"1": 2}, target_modules=["0", "1"], init_lora_weights="pissa")
    around = peft.get_peft_model(copy.deepcopy(plain), copy.deepcopy(config))
    for path in ("0", "1"):
        layer = copy.deepcopy(plain[int(path)])
        want = around.base_model.model[int(path)].base_layer.weight
        assert torch.equal(changed_weight(around, config, path, layer), want)
        assert not torch.equal(want, plain[int(path)].weight)
