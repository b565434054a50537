"""SGD and Lion over split masters, beside plain forms of them on separate fp32 parameters."""

from contextlib import nullcontext

import pytest
import torch

from optim.test_step import Resident, master_of, odd_unit, planes_of, random, same, torch_ops
from outsize import native
from outsize.optim.lion import Lion
from outsize.optim.momentum_kernel import form_of_torch
from outsize.optim.planes import StatePlanes
from outsize.optim.sgd import SGD
from outsize.optim.step import step_state


def without(planes: StatePlanes, num_moments: int) -> StatePlanes:
    """Return the planes with that many moments."""
    kept = {name: getattr(planes, name) for name in ("weights", "master", "master_low", "master_ties")}
    if num_moments:
        kept |= {"exp_avg": planes.exp_avg, "exp_avg_scales": planes.exp_avg_scales}
    return StatePlanes(**kept)


class Reference(Resident):
    """Separate fp32 parameters under another optimizer of torch's, or of the test's."""

    def __init__(self, unit, master, make):
        self.tensors = [t for t in unit.tensors if t.trainable]
        self.parameters = [
            torch.nn.Parameter(master[t.offset : t.offset + t.numel].clone().view(t.shape))
            for t in self.tensors
        ]
        self.optimizer = make(self.tensors, self.parameters)

    def step(self, gradient, lr):
        for t, parameter in zip(self.tensors, self.parameters, strict=True):
            parameter.grad = gradient[t.offset : t.offset + t.numel].clone().view(t.shape)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def flat(self, key, like):
        plane = like.clone()
        for t, parameter in zip(self.tensors, self.parameters, strict=True):
            value = parameter.detach() if key is None else self.optimizer.state[parameter][key]
            plane[t.offset : t.offset + t.numel] = value.flatten()
        return plane


def groups(tensors, parameters, weight_decay):
    pairs = list(zip(tensors, parameters, strict=True))
    return [
        {"params": [p for t, p in pairs if t.decay], "weight_decay": weight_decay},
        {"params": [p for t, p in pairs if not t.decay], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    "rule",
    [
        SGD(),
        SGD(momentum=0.0, weight_decay=0.1),
        SGD(momentum=0.95, dampening=0.2, weight_decay=0.01),
        SGD(nesterov=True),
    ],
)
@pytest.mark.parametrize("masters", ["split", "separate", "own"])
def test_sgd_is_bit_equal_to_torch(rule, masters, use_native):
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    planes = without(planes_of(start, masters=masters), rule.num_moments)
    options = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
    resident = Reference(
        unit,
        start,
        lambda t, p: torch.optim.SGD(groups(t, p, rule.weight_decay), lr=1.0, fused=True, **options),
    )
    for number in range(1, 21):
        gradient = random(unit.numel, number)
        clip = torch.tensor(0.7)
        step_state(rule, unit, planes, gradient, start=0, step=number, lr=0.1 / number, clip_coefficient=clip)
        resident.step(gradient * clip, 0.1 / number)
    master = resident.flat(None, start)
    assert torch.equal(master_of(planes), master)
    assert torch.equal(planes.weights, master if masters == "own" else master.to(torch.bfloat16))
    if rule.num_moments:
        assert torch.equal(planes.exp_avg, resident.flat("momentum_buffer", torch.zeros(unit.numel)))


@pytest.mark.skipif(not native.available(), reason="no kernels")
def test_the_kernel_agrees_with_the_torch_that_the_tests_run_with(use_native):
    """Else the test above would hold, at the speed of the fallback."""
    assert form_of_torch(native.level()) is not None


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, in the dtype of its parameters."""

    def __init__(self, parameters, betas):
        super().__init__(parameters, {"lr": 1.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            share, kept = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = (m * share + p.grad * (1 - share)).sign()
                p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - direction * group["lr"])
                m.copy_(m * kept + p.grad * (1 - kept))


@pytest.mark.parametrize("rule", [Lion(weight_decay=0.1), Lion(betas=(0.95, 0.98))])
@pytest.mark.parametrize("masters", ["split", "separate", "own"])
def test_lion_is_bit_equal_to_its_published_algorithm(rule, masters, use_native):
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    planes = without(planes_of(start, masters=masters), 1)
    plain = Reference(unit, start, lambda t, p: PlainLion(groups(t, p, rule.weight_decay), rule.betas))
    for number in range(1, 21):
        gradient = random(unit.numel, number)
        gradient[::9] = 0.0  # whose first step has no direction
        step_state(rule, unit, planes, gradient, start=0, step=number, lr=1e-3)
        plain.step(gradient, 1e-3)
    master = plain.flat(None, start)
    assert torch.equal(master_of(planes), master)
    assert torch.equal(planes.weights, master if masters == "own" else master.to(torch.bfloat16))
    assert torch.equal(planes.exp_avg, plain.flat("momentum", torch.zeros(unit.numel)))


@pytest.mark.parametrize(
    "rule", [SGD(dampening=0.1, weight_decay=0.1), SGD(nesterov=True), Lion(weight_decay=0.1)]
)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_momentum_in_fewer_bits_is_the_same_bits_in_every_form(rule, moments, dtype, use_native):
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    forms = [without(planes_of(start, moments), 1) for _ in range(2)]
    for number in range(1, 5):
        gradient = (random(unit.numel, number) * 10.0 ** (number % 3 - 2)).to(dtype)
        gradient[::7] = 0.0
        for planes, form in zip(forms, (torch_ops(), nullcontext()), strict=True):
            with form:
                step_state(
                    rule, unit, planes, gradient, start=0, step=number, lr=1e-2, seed=3,
                    clip_coefficient=torch.tensor(0.7),
                )  # fmt: skip
    assert same(*forms)


@pytest.mark.parametrize("rule", [SGD(), Lion()])
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_momentum_in_fewer_bits_does_not_depend_on_tiles(rule, moments):
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    whole, tiled = (without(planes_of(start, moments), 1) for _ in range(2))
    for number in (1, 2, 3):
        gradient = random(unit.numel, number).bfloat16()
        step_state(rule, unit, whole, gradient, start=0, step=number, lr=0.1)
        for first in range(0, unit.numel, 4096):
            last = min(first + 4096, unit.numel)
            step_state(
                rule, unit, tiled.cut(first, last), gradient[first:last], start=first, step=number, lr=0.1
            )
    assert same(whole, tiled)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay"),
        (lambda: SGD(nesterov=True, dampening=0.1), "nesterov"),
        (lambda: Lion(betas=(0.9, 1.0)), "betas"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
