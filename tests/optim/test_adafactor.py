"""Adafactor over whole units, beside ``torch.optim.Adafactor`` on separate fp32 parameters."""

import pytest
import torch
from torch import Tensor

from optim.test_other_rules import Reference, groups
from optim.test_step import random
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec, pack_unit
from outsize.optim import factored_kernel
from outsize.optim.adafactor import Adafactor
from outsize.optim.factors import FACTORS, factored
from outsize.optim.optimizer_spec import GRADIENT, StateLayout
from outsize.optim.split_masters import join_master, split_master, ties_bytes
from outsize.optim.step import step_whole
from outsize.optim.update import WholeRule
from outsize.storage.home_layout import ITEM_DTYPE

# Matrices of any form, stacks of them, vectors, a number; some do not train.
SHAPES = [(61, 97), (65,), (3, 700), (200, 300), (40, 10), (1, 33), (5, 31, 17), (4, 3, 64, 3), ()]
FROZEN = 4


def unit_of_all_shapes() -> UnitSpec:
    tensors = [(f"p{i}", shape, i != FROZEN, i % 3 > 0) for i, shape in enumerate(SHAPES)]
    return pack_unit(0, "block", "block", tensors)


class Unit:
    """A unit as it lies at home, its planes whole."""

    def __init__(
        self, unit: UnitSpec, master: Tensor, masters: str, gradients: str = "fp32", **state: object
    ) -> None:
        self.unit = unit
        self.layout = StateLayout(
            dtype="fp32" if masters == "own" else "bf16",
            masters="split" if masters == "split" else "separate",
            gradients=gradients,  # type: ignore[arg-type]
            **(state or {"num_moments": 0, "factored": True}),  # type: ignore[arg-type]
        )
        self.planes = {
            name: torch.zeros(plane.items_of(unit), dtype=ITEM_DTYPE[plane.item])
            for name, plane in self.layout.planes.items()
        }
        if masters == "split":
            split_master(master, *self._halves())
        else:
            self.planes["master" if masters == "separate" else "weights"].copy_(master)
            self.planes["weights"].copy_(master)
        model = ModelSpec(units=(unit,), dtype=self.layout.dtype)
        elements, count = self.layout.scratch_elements(model), self.layout.num_scratches
        self.scratches = [torch.full((elements,), float("nan")) for _ in range(count)]

    def _halves(self) -> tuple[Tensor, Tensor, Tensor | None]:
        ties = self.planes.get("master_ties")
        ties = None if ties is None else ties[: ties_bytes(self.unit.numel)]
        return self.planes["weights"], self.planes["master_low"], ties

    def step(self, rule: WholeRule, gradient: Tensor, number: int, lr: float, **options: object) -> None:
        self.planes[GRADIENT].copy_(gradient)
        counts = {tensor.name: number for tensor in self.unit.tensors}
        step_whole(rule, self.unit, self.planes, self.scratches, step=counts, lr=lr, **options)  # type: ignore[arg-type]

    @property
    def master(self) -> Tensor:
        if "master_low" not in self.planes:
            return self.planes.get("master", self.planes["weights"])
        joined = torch.empty(self.unit.numel)
        join_master(*self._halves(), joined)
        return joined

    def factors(self) -> dict[tuple[str, str], Tensor]:
        """By parameter and factor, in its shape."""
        return {
            (t.name, factor): self.planes[factor][t.offset : t.offset + t.numel].view(t.shape)
            for factor in FACTORS
            for t in factored(self.unit, factor).tensors
        }


def resident(unit: UnitSpec, master: Tensor, rule: Adafactor) -> Reference:
    options = {"beta2_decay": rule.beta2_decay, "eps": rule.eps, "d": rule.d}
    return Reference(
        unit,
        master,
        lambda t, p: torch.optim.Adafactor(groups(t, p, rule.weight_decay), lr=1.0, **options),
    )


RULES = [
    (Adafactor(), "split", "fp32", None, 2**17),
    (Adafactor(weight_decay=0.1), "separate", "fp32", 0.3, 1000),
    (Adafactor(beta2_decay=-0.5, eps=(1e-6, 1e-2), d=1.5, weight_decay=1.0), "own", "fp32", 2.0, 100),
    (Adafactor(eps=(0.0, 0.0)), "split", "bf16", 0.7, 2**17),
    (Adafactor(d=4.0), "separate", "bf16", None, 3000),
]


@pytest.mark.parametrize(("rule", "masters", "gradients", "clip", "piece"), RULES)
def test_sixty_steps_are_bit_equal_to_torch(rule, masters, gradients, clip, piece, use_native, monkeypatch):
    """Masters, weights and factors, for any options and forms, whatever pieces an estimate is made in."""
    monkeypatch.setattr(factored_kernel, "_PIECE_ELEMENTS", piece)
    unit = unit_of_all_shapes()
    start = random(unit.numel, 0)
    ours, reference = Unit(unit, start, masters, gradients), resident(unit, start, rule)
    coefficient = None if clip is None else torch.tensor(clip)
    for number in range(1, 61 if masters == "split" else 6):
        gradient = random(unit.numel, number) * 10.0 ** (number % 7 - 4)
        gradient = gradient.to(ITEM_DTYPE[gradients]).float()
        lr = 0.5 / number
        ours.step(rule, gradient, number, lr, clip_coefficient=coefficient)
        reference.step(gradient if clip is None else gradient * coefficient, lr)
    master = reference.flat(None, start)
    assert torch.equal(ours.master.view(torch.int32), master.view(torch.int32))
    if masters != "own":
        assert torch.equal(ours.planes["weights"], master.to(torch.bfloat16))
    found = ours.factors()
    for tensor, parameter in zip(reference.tensors, reference.parameters, strict=True):
        state = reference.optimizer.state[parameter]
        for factor in FACTORS:
            assert (factor in state) == ((tensor.name, factor) in found)
            assert factor not in state or torch.equal(state[factor], found[tensor.name, factor])


def test_what_is_frozen_or_skipped_stays_and_so_does_what_lies_between(monkeypatch):
    unit = unit_of_all_shapes()
    start = random(unit.numel, 0)
    ours, before = Unit(unit, start, "split"), Unit(unit, start, "split")
    ours.step(Adafactor(), random(unit.numel, 1), 1, 0.1, skip={"p2", "p5"})
    stepped = torch.zeros(unit.numel, dtype=torch.bool)
    for index, tensor in enumerate(unit.tensors):
        stepped[tensor.offset : tensor.offset + tensor.numel] = index not in (FROZEN, 2, 5)
    assert torch.equal(ours.master[~stepped], before.master[~stepped])
    changed = (ours.master != before.master)[stepped]
    assert changed.float().mean() > 0.99
    assert not any(factor.any() for (name, _), factor in ours.factors().items() if name in ("p2", "p5"))


def test_weights_beside_separate_masters_can_be_left_to_the_caller():
    unit = unit_of_all_shapes()
    ours = Unit(unit, random(unit.numel, 0), "separate")
    before = ours.planes["weights"].clone()
    ours.step(Adafactor(), random(unit.numel, 1), 1, 0.1, rounds=False)
    assert torch.equal(ours.planes["weights"], before)


@pytest.mark.parametrize(
    "wrong",
    [{"beta2_decay": 0.1}, {"eps": (-1.0, 1e-3)}, {"eps": (None, -1.0)}, {"d": 0.5}, {"weight_decay": -0.1}],
)
def test_settings_outside_their_range_are_refused_as_torch_does(wrong):
    with pytest.raises(ValueError, match="must be"):
        Adafactor(**wrong)
    with pytest.raises(ValueError, match="should be"):
        torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(1))], **wrong)
