"""Rates by layer and by group of parameters: streamed as torch steps groups, and each where it belongs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from outsize.errors import ModelError
from outsize.model.split import split
from outsize.optim.rate_groups import RateGroup, parameter_groups, with_rates
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_run
from train.test_states import BF16, DISK

GROUPS = [{"params": ["*norm*"], "lr": 2.0, "weight_decay": 0.5}, {"params": ["*q_proj*"], "lr": 0.3}]
RATES: dict[str, Any] = {"layer_decay": 0.7, "groups": GROUPS}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": RATES},
    "adamw, bf16, on disk": {"model": BF16, "optimizer": RATES, "memory": DISK},
    "SGD": {"optimizer": {**RATES, "name": "SGD", "lr": 0.1, "weight_decay": 0.1}},
    "Adam": {"optimizer": {**RATES, "name": "Adam", "weight_decay": 0.1}},
    "Adafactor": {"optimizer": {**RATES, "name": "Adafactor", "weight_decay": 0.1}},
    "LoRA": {"train": {"method": "lora"}, "optimizer": {"layer_decay": 0.7}},
}


@pytest.mark.parametrize("case", RUNS)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(make_run(tmp_path, **RUNS[case]))
    assert (result.equal, result.differing) == (True, [])


def test_a_layer_has_the_rate_of_the_one_above_it_times_the_factor() -> None:
    model = zoo.build("llama")
    spec = with_rates(split(model).spec, 0.5, [RateGroup(params=("*.1.*q_proj*",), lr=3.0, weight_decay=0.0)])
    scales = {unit.name: {t.lr_scale for t in unit.tensors} for unit in spec.units}
    assert scales == {
        "model.embed_tokens": {0.5**4},
        "model.layers.0": {0.5**3},
        "model.layers.1": {0.5**2, 3 * 0.5**2},
        "model.layers.2": {0.5},
        "lm_head": {1.0},
        "rest": {1.0},
    }
    groups = parameter_groups(spec, dict(model.named_parameters()), 0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    (own,) = (group for group in groups if group["lr_scale"] == 0.75)
    assert own["weight_decay"] == 0.0
    assert own["params"][0] is model.model.layers[1].self_attn.q_proj.weight


def test_what_has_no_rate_stays_as_it_is(tmp_path: Path) -> None:
    config = make_run(tmp_path, optimizer={"groups": [{"params": ["*embed_tokens*"], "lr": 0.0}]})
    before = dict(AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(train(config).export_dir).named_parameters())
    stayed = [name for name, value in before.items() if torch.equal(value, after[name])]
    assert stayed == ["model.embed_tokens.weight"]


def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    frozen = {"freeze": ["*embed_tokens*"]}
    for pattern, model in (("*absent*", {}), ("*embed_tokens*", frozen)):
        with pytest.raises(ModelError, match="matches no parameter that trains; names look like"):
            train(make_run(tmp_path, model=model, optimizer={"groups": [{"params": [pattern]}]}))
