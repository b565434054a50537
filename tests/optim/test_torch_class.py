"""Classes of torch over planes at home, beside one object of the class on separate fp32 parameters."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim.reference import Reference, Unit, groups
from optim.test_step import master_of, odd_unit, planes_of, random
from outsize.errors import ConfigError
from outsize.optim.optimizer_names import factor_shape, factored
from outsize.optim.optimizer_spec import GRADIENT
from outsize.optim.planes import StatePlanes
from outsize.optim.step import step_state
from outsize.optim.torch_class import ElementRule, rule_of_class
from outsize.optim.torch_trial import torch_class

# Each with whether pieces of a parameter step as the whole does.
CLASSES: list[tuple[str, dict[str, Any], bool]] = [
    ("SGD", {}, True),
    ("SGD", {"momentum": 0.9, "dampening": 0.1}, True),
    ("SGD", {"momentum": 0.9, "nesterov": True, "fused": True}, False),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}, True),
    ("Adadelta", {}, True),
    ("Adam", {"betas": [0.8, 0.95]}, True),
    ("Adam", {"amsgrad": True, "fused": True}, False),
    ("torch.optim.AdamW", {"amsgrad": True, "maximize": True}, True),
    ("torch.optim.AdamW", {"foreach": True}, True),
    ("Adamax", {}, True),
    ("NAdam", {"decoupled_weight_decay": True}, False),
    ("RAdam", {}, True),
    ("RMSprop", {"momentum": 0.9, "centered": True}, True),
    ("Rprop", {}, True),
    ("ASGD", {"t0": 3}, False),
    ("Adafactor", {"eps": [1e-6, 1e-2], "d": 1.5}, False),
]
IDS = [f"{name} {arguments}" for name, arguments, _ in CLASSES]


@pytest.mark.parametrize(("name", "arguments", "by_element"), CLASSES, ids=IDS)
@pytest.mark.parametrize("masters", ["own", "separate", "split"])
def test_steps_over_planes_are_bit_equal_to_the_class(name, arguments, by_element, masters):
    """Masters, weights and state, in pieces of a unit where that may be."""
    about, unit = torch_class(name, arguments), odd_unit()
    assert about.by_element == by_element
    decay = 0.1 if about.decays else 0.0
    rule = rule_of_class(about, decay)
    ours = Unit(
        unit,
        random(unit.numel, 0),
        masters,
        num_moments=0,
        state_of=about.state_of,
        temporaries=0 if by_element else about.temporaries,
    )
    made = getattr(torch.optim, about.path.removeprefix("torch.optim."))
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    resident = Reference(
        unit,
        random(unit.numel, 0),
        lambda t, p: made(groups(t, p, decay) if about.decays else p, lr=1.0, **given),
    )
    clip = torch.tensor(0.7)
    for number in range(1, 6):
        gradient = random(unit.numel, number) * 10.0 ** (number % 3 - 2)
        resident.step(gradient * clip, 0.1 / number)
        if not isinstance(rule, ElementRule):
            ours.step(rule, gradient, number, 0.1 / number, clip_coefficient=clip)
            continue
        kept = {
            key: plane[: unit.numel // 8 if key == "master_ties" else unit.numel]
            for key, plane in ours.planes.items()
            if key != GRADIENT
        }
        planes = StatePlanes.of(kept)
        for first in range(0, unit.numel, 4096):
            last = min(first + 4096, unit.numel)
            step_state(
                rule, unit, planes.cut(first, last), gradient[first:last], start=first, step=number,
                lr=0.1 / number, clip_coefficient=clip,
            )  # fmt: skip
    master = resident.flat(None, random(unit.numel, 0))
    assert torch.equal(ours.master, master)
    assert torch.equal(ours.planes["weights"], master if masters == "own" else master.to(torch.bfloat16))
    for entry in about.entries:
        seen = unit if entry.factor is None else factored(unit, entry.factor)
        found = {
            t.name: ours.planes[f"state.{entry.key}"][t.offset : t.offset + t.numel] for t in seen.tensors
        }
        for tensor, parameter in zip(resident.tensors, resident.parameters, strict=True):
            wanted = resident.optimizer.state[parameter].get(entry.key)
            assert (wanted is not None) == (tensor.name in found)
            assert wanted is None or torch.equal(found[tensor.name].view(wanted.shape), wanted)


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple))
def test_what_adafactor_keeps_has_the_shapes_of_torch(shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = torch.optim.Adafactor([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    for entry in torch_class("Adafactor").entries:
        found = tuple(state[entry.key].shape) if entry.key in state else None
        assert factor_shape(shape, entry.factor) == found


class OneForAll(torch.optim.SGD):
    """Steps each parameter by what it has of the norm of all gradients."""

    def step(self, closure=None):
        total = sum(p.grad.norm() for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= total
        return super().step(closure)


class InBytes(torch.optim.SGD):
    """Keeps a plane of bytes."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["codes"] = torch.zeros_like(p, dtype=torch.uint8)
        return super().step(closure)


class Outside(torch.optim.SGD):
    """Counts outside of its state."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= self.steps
        return super().step(closure)


HERE = __name__


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("LBFGS", {}, "optimizer.name: LBFGS calls the model several times in a step"),
        ("SparseAdam", {}, "SparseAdam does not support dense gradients"),
        ("torch.optim.Muon", {}, "only supports 2D parameters.*; outsize has optimizer.name=muon"),
        ("lion", {}, "torch has no Lion; .* optimizer.name=lion_pytorch.Lion"),
        ("adagrid", {}, r"there is no adagrid; did you mean Adagrad\?"),
        ("SGD", {"momentun": 0.9}, "optimizer.args: SGD takes no momentun; it takes dampening, .*momentum"),
        ("SGD", {"momentum": -1.0}, "optimizer.args: SGD refuses them: Invalid momentum"),
        ("SGD", {"lr": 1.0}, "optimizer.args: lr is said in optimizer.lr"),
        ("no_such_package.Lion", {}, "cannot be imported .* is its package installed"),
        ("torch.nn.Linear", {}, "is no class of an optimizer"),
        (f"{HERE}.OneForAll", {}, "steps a parameter otherwise beside others than by itself"),
        (f"{HERE}.Outside", {}, "keeps what is not in its state"),
        (f"{HERE}.InBytes", {}, r"keeps codes \(torch.uint8\), which no plane of a home holds"),
    ],
)
def test_what_no_run_can_step_by_is_refused_by_name(name, arguments, words):
    with pytest.raises(ConfigError, match=words):
        torch_class(name, arguments)


def test_a_weight_decay_of_a_class_that_has_none_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay: torch.optim.Rprop has none"):
        rule_of_class(torch_class("Rprop"), 0.1)


def test_planes_of_other_state_are_checked():
    planes = planes_of(random(64, 0), masters="own")
    with pytest.raises(ValueError, match=r"state.sum: need 64 of fp32"):
        StatePlanes(weights=master_of(planes), others={"state.sum": torch.zeros(3)})
