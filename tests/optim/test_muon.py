"""Muon over whole units, beside ``torch.optim.Muon`` and ``torch.optim.AdamW`` on separate fp32 parameters."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from optim.reference import Reference, Unit, groups
from optim.test_step import random
from outsize.model.sizes.model_spec import UnitSpec, pack_unit
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.muon import Muon
from outsize.optim.optimizer_names import factored, muon_matrices, newton_schulz_flops
from outsize.optim.optimizer_spec import StateLayout
from outsize.storage.home_layout import ITEM_DTYPE

# Matrices that are wide, tall, square and narrow; vectors, stacks and a number are AdamW's, and some do not train.
SHAPES = [
    (61, 97),
    (65,),
    (3, 700),
    (200, 130),
    (40, 10),
    (64, 64),
    (33, 1),
    (1, 33),
    (5, 31, 17),
    (),
    (129, 3),
]
FROZEN = 4
ADAMW = PlaneAdamW(betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)


def unit_of_all_shapes() -> UnitSpec:
    tensors = [(f"p{i}", shape, i != FROZEN, i % 3 > 0) for i, shape in enumerate(SHAPES)]
    return pack_unit(0, "block", "block", tensors)


def at_home(unit: UnitSpec, master: Tensor, masters: str, gradients: str = "fp32", **state: object) -> Unit:
    return Unit(unit, master, masters, gradients, newton_schulz=5, **state)


def resident(unit: UnitSpec, master: Tensor, rule: Muon) -> tuple[Reference, Reference]:
    """The matrices under torch's Muon, and all else under its AdamW."""
    names = {tensor.name for tensor in muon_matrices(unit)}
    matrices, others = (
        replace(unit, tensors=tuple(t for t in unit.tensors if (t.name in names) == inside and t.trainable))
        for inside in (True, False)
    )
    muon = {
        "momentum": rule.momentum,
        "nesterov": rule.nesterov,
        "ns_steps": rule.ns_steps,
        "adjust_lr_fn": rule.adjust_lr_fn,
    }
    adamw = {"betas": rule.adamw.betas, "eps": rule.adamw.eps, "fused": True}
    return (
        Reference(
            matrices, master, lambda t, p: torch.optim.Muon(groups(t, p, rule.weight_decay), lr=1.0, **muon)
        ),
        Reference(
            others,
            master,
            lambda t, p: torch.optim.AdamW(groups(t, p, rule.adamw.weight_decay), lr=1.0, **adamw),
        ),
    )


RULES = [
    (Muon(adamw=ADAMW), "split", "fp32", None),
    (Muon(momentum=0.9, nesterov=False, weight_decay=0.5, adamw=ADAMW), "separate", "fp32", 0.3),
    (Muon(adjust_lr_fn="original", ns_steps=3, adamw=ADAMW), "own", "fp32", 2.0),
    (Muon(ns_steps=4, adamw=ADAMW), "split", "bf16", 0.7),
    (Muon(momentum=0.0, weight_decay=0.0, adamw=ADAMW), "separate", "bf16", None),
]


@pytest.mark.parametrize(("rule", "masters", "gradients", "clip"), RULES)
def test_steps_are_bit_equal_to_torch(rule, masters, gradients, clip, use_native):
    """Masters, weights and moments, for any options and forms."""
    unit = unit_of_all_shapes()
    start = random(unit.numel, 0)
    ours, references = at_home(unit, start, masters, gradients), resident(unit, start, rule)
    coefficient = None if clip is None else torch.tensor(clip)
    for number in range(1, 13):
        gradient = random(unit.numel, number) * 10.0 ** (number % 7 - 4)
        gradient = gradient.to(ITEM_DTYPE[gradients]).float()
        ours.step(rule, gradient, number, 0.1 / number, clip_coefficient=coefficient)
        for reference in references:
            reference.step(gradient if clip is None else gradient * coefficient, 0.1 / number)
    muon, adamw = references
    master = adamw.flat(None, muon.flat(None, start))
    assert torch.equal(ours.master.view(torch.int32), master.view(torch.int32))
    if masters != "own":
        assert torch.equal(ours.planes["weights"], master.to(torch.bfloat16))
    first = adamw.flat("exp_avg", muon.flat("momentum_buffer", torch.zeros(unit.numel)))
    assert torch.equal(ours.planes["exp_avg"], first)
    second = adamw.flat("exp_avg_sq", torch.zeros(unit.numel))
    for tensor, seen in zip(adamw.tensors, factored(unit, "beside_muon").tensors, strict=True):
        found = ours.planes["exp_avg_sq"][seen.offset : seen.offset + seen.numel]
        assert torch.equal(found, second[tensor.offset : tensor.offset + tensor.numel])


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_momentum_of_fewer_bits_goes_where_an_exact_one_goes(moments, use_native):
    unit, rule = unit_of_all_shapes(), Muon(adamw=ADAMW)
    start = random(unit.numel, 0)
    exact, rounded = at_home(unit, start, "split"), at_home(unit, start, "split", moments=moments)
    for number in range(1, 9):
        for one in (exact, rounded):
            one.step(rule, random(unit.numel, number), number, 0.02)
    moved, apart = (exact.master - start).norm(), (exact.master - rounded.master).norm()
    assert 0 < apart < {"bf16": 0.05, "int8": 0.2}[moments] * moved


def test_a_matrix_keeps_one_moment_and_everything_else_two():
    unit = unit_of_all_shapes()
    layout = StateLayout(dtype="bf16", masters="split", gradients="none", newton_schulz=5)
    matrices = {tensor.name for tensor in muon_matrices(unit)}
    assert matrices == {"p0", "p2", "p3", "p5", "p6", "p7", "p10"}
    others = [t for t in unit.tensors if t.trainable and t.name not in matrices]
    plane = layout.planes["exp_avg_sq"]
    assert [t.name for t in factored(unit, plane.factor).tensors] == [t.name for t in others]
    assert plane.items_of(unit) < layout.planes["exp_avg"].items_of(unit) / 2
    assert layout.bytes_per_parameter == 8.125
    table = replace(unit, kind="embedding")
    assert plane.items_of(table) >= sum(t.numel for t in table.tensors if t.trainable)
    # A step of an embedding costs as AdamW's does, one of a block its products as well.
    adamw = StateLayout(dtype="bf16", masters="split", gradients="none")
    assert layout.step_bytes_of(table, table.numel) == adamw.step_bytes_of(table, table.numel)
    assert (layout.step_flops_of(table), adamw.step_flops_of(unit)) == (0.0, 0.0)
    one = pack_unit(0, "block", "block", [("w", (3, 5), True, True)])
    assert newton_schulz_flops(one, 2) == 2 * (2 * 3 * 5 * 3 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 5)


def test_what_is_frozen_or_skipped_stays_and_so_does_what_lies_between():
    unit = unit_of_all_shapes()
    start = random(unit.numel, 0)
    ours, before = at_home(unit, start, "split"), at_home(unit, start, "split")
    ours.step(Muon(), random(unit.numel, 1), 1, 0.1, skip={"p2", "p8"})
    stepped = torch.zeros(unit.numel, dtype=torch.bool)
    for index, tensor in enumerate(unit.tensors):
        stepped[tensor.offset : tensor.offset + tensor.numel] = index not in (FROZEN, 2, 8)
    assert torch.equal(ours.master[~stepped], before.master[~stepped])
    assert (ours.master != before.master)[stepped].float().mean() > 0.99


@pytest.mark.parametrize(
    "wrong",
    [{"momentum": 1.0}, {"momentum": -0.1}, {"ns_steps": 0}, {"ns_steps": 100}, {"weight_decay": -0.1}],
)
def test_settings_outside_their_range_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Muon(**wrong)
