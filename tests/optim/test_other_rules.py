"""SGD, Lion and Adafactor over split masters, beside torch on separate fp32 parameters."""

import pytest
import torch

from optim.test_step import Resident, master_of, odd_unit, planes_of, random, same
from outsize.optim.adafactor import Adafactor, factors_of, step_factored
from outsize.optim.lion import Lion
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
def test_sgd_is_bit_equal_to_torch(rule, masters):
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    planes = without(planes_of(start, masters=masters), rule.num_moments)
    options = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
    resident = Reference(
        unit,
        start,
        lambda t, p: torch.optim.SGD(groups(t, p, rule.weight_decay), lr=1.0, fused=True, **options),
    )
    for number in range(1, 51):
        gradient = random(unit.numel, number)
        step_state(rule, unit, planes, gradient, start=0, step=number, lr=0.1 / number)
        resident.step(gradient, 0.1 / number)
    master = resident.flat(None, start)
    assert torch.equal(master_of(planes), master)
    assert torch.equal(planes.weights, master if masters == "own" else master.to(torch.bfloat16))
    if rule.num_moments:
        assert torch.equal(planes.exp_avg, resident.flat("momentum_buffer", torch.zeros(unit.numel)))


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, in fp64."""

    def __init__(self, parameters, betas):
        super().__init__(parameters, {"lr": 1.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            share, kept = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float64))
                direction = (share * m + (1 - share) * p.grad.double()).sign()
                p -= (group["lr"] * (direction + group["weight_decay"] * p.double())).float()
                m.copy_(kept * m + (1 - kept) * p.grad.double())


def test_lion_is_its_published_algorithm():
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    rule = Lion(weight_decay=0.1)
    planes = without(planes_of(start), 1)
    plain = Reference(unit, start, lambda t, p: PlainLion(groups(t, p, rule.weight_decay), rule.betas))
    for number in range(1, 21):
        gradient = random(unit.numel, number)
        step_state(rule, unit, planes, gradient, start=0, step=number, lr=1e-3)
        plain.step(gradient, 1e-3)
    assert torch.allclose(master_of(planes), plain.flat(None, start), rtol=0, atol=1e-5)
    assert torch.allclose(planes.exp_avg, plain.flat("momentum", torch.zeros(unit.numel)), atol=1e-6)


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


@pytest.mark.parametrize("rule", [Adafactor(), Adafactor(eps=(1e-6, 1e-2), d=2.0, weight_decay=0.1)])
@pytest.mark.parametrize("masters", ["split", "separate", "own"])
def test_adafactor_is_bit_equal_to_torch(rule, masters):
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    planes, factors = without(planes_of(start, masters=masters), 0), factors_of(unit)
    resident = Reference(
        unit,
        start,
        lambda t, p: torch.optim.Adafactor(
            groups(t, p, rule.weight_decay), eps=rule.eps, d=rule.d, beta2_decay=rule.beta2_decay
        ),
    )
    for number in range(1, 21):
        gradient = random(unit.numel, number)
        step_factored(rule, unit, planes, gradient, factors, lr=1e-2, clip_coefficient=torch.tensor(0.5))
        resident.step(gradient * 0.5, 1e-2)
    assert torch.equal(master_of(planes), resident.flat(None, start))
    assert {name: part.numel() for name, part in factors["p0"].items()} == {
        "step": 1, "row_var": 61, "col_var": 97,
    }  # fmt: skip


def test_adafactor_leaves_alone_what_got_no_gradient():
    unit, start = odd_unit(), random(odd_unit().numel, 0)
    planes, factors = without(planes_of(start), 0), factors_of(unit)
    step_factored(Adafactor(), unit, planes, random(unit.numel, 1), factors, lr=1e-2, skip={"p0"})
    first = unit.tensors[0]
    part = slice(first.offset, first.offset + first.numel)
    assert torch.equal(master_of(planes)[part], start[part])
    assert factors["p0"]["step"] == 0
    with pytest.raises(ValueError, match="whole units"):
        step_factored(Adafactor(), unit, planes.cut(0, 2048), random(2048, 1), factors, lr=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay"),
        (lambda: SGD(nesterov=True, dampening=0.1), "nesterov"),
        (lambda: Lion(betas=(0.9, 1.0)), "betas"),
        (lambda: Adafactor(beta2_decay=0.1), "beta2_decay"),
        (lambda: Adafactor(d=0.5), "d must be"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
