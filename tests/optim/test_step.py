import dataclasses
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize import native
from outsize.model.sizes.model_spec import UnitSpec, pack_unit
from outsize.optim.adamw import PlaneAdamW, agrees_with_torch
from outsize.optim.optimizer_spec import BLOCK_ELEMENTS
from outsize.optim.planes import StatePlanes, chance_key
from outsize.optim.split_masters import join_master, split_master, ties_bytes
from outsize.optim.step import step_state
from threads import num_threads

# Sizes with every kind of tail: none, below a vector, below 16; some span several tiles, and some touch.
SHAPES = [(61, 97), (3,), (64, 64), (64, 33), (129,), (17, 5, 3), (2048,), (4099,)]
ITEMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def odd_unit() -> UnitSpec:
    return pack_unit(
        0, "block", "block", [(f"p{i}", shape, i != 4, i % 3 > 0) for i, shape in enumerate(SHAPES)]
    )


def torch_ops() -> AbstractContextManager[object]:
    return mock.patch.object(native, "available", return_value=False)


def random(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def planes_of(master: torch.Tensor, moments: str = "fp32", masters: str = "split") -> StatePlanes:
    numel = master.numel()
    planes = {name: torch.zeros(numel, dtype=ITEMS[moments]) for name in ("exp_avg", "exp_avg_sq")}
    if moments == "int8":
        blocks = -(-numel // BLOCK_ELEMENTS)
        planes |= {f"{name}_scales": torch.zeros(blocks, dtype=torch.uint8) for name in list(planes)}
    if masters == "own":
        return StatePlanes(weights=master.clone(), **planes)
    planes["weights"] = master.to(torch.bfloat16)
    if masters == "separate":
        return StatePlanes(master=master.clone(), **planes)
    planes["master_low"] = torch.empty(numel, dtype=torch.int8 if masters == "split24" else torch.int16)
    if moments == "fp32" and masters == "split":
        planes["master_ties"] = torch.zeros(ties_bytes(numel), dtype=torch.uint8)
    split_master(master, planes["weights"], planes["master_low"], planes.get("master_ties"))
    return StatePlanes(**planes)


def master_of(planes: StatePlanes) -> torch.Tensor:
    if planes.master_low is None:
        return planes.weights if planes.master is None else planes.master
    master = torch.empty(planes.numel)
    join_master(planes.weights, planes.master_low, planes.master_ties, master)
    return master


def same(one: StatePlanes, other: StatePlanes) -> bool:
    pairs = [
        (getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(one)
        if field.name != "others"
    ]
    return all(a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def in_24_bits(bits, first: int = 0, key: int | None = None):
    """What is kept of numbers that are no NaN: the upper 24 of their bits, up by chance or to the nearest."""
    x = (np.arange(len(bits), dtype=np.uint64) + first + (key or 0)) % 2**32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32
        x = (x ^ x >> np.uint64(shift)) * factor % 2**32
    x ^= x >> np.uint64(16)
    chance = 0x80 if key is None else ((x >> np.uint64(24) ^ x >> np.uint64(8)) & 0xFF).astype(np.uint32)
    return (np.asarray(bits, np.uint32) + chance).astype(np.uint32) & np.uint32(0xFFFFFF00)


class Resident:
    """Separate fp32 parameters under ``torch.optim.AdamW(fused=True)``: the reference."""

    def __init__(self, unit: UnitSpec, master: torch.Tensor, settings: PlaneAdamW) -> None:
        self.tensors = [t for t in unit.tensors if t.trainable]
        self.parameters = [
            torch.nn.Parameter(master[t.offset : t.offset + t.numel].clone()) for t in self.tensors
        ]
        pairs = list(zip(self.tensors, self.parameters, strict=True))
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for t, p in pairs if t.decay], "weight_decay": settings.weight_decay},
                {"params": [p for t, p in pairs if not t.decay], "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        for t, parameter in zip(self.tensors, self.parameters, strict=True):
            parameter.grad = gradient[t.offset : t.offset + t.numel].clone()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def flat(self, key: str | None, like: torch.Tensor) -> torch.Tensor:
        plane = like.clone()
        for t, parameter in zip(self.tensors, self.parameters, strict=True):
            value = parameter.detach() if key is None else self.optimizer.state[parameter][key]
            plane[t.offset : t.offset + t.numel] = value
        return plane


OPTIONS = [
    (PlaneAdamW(betas=(0.9, 0.999), weight_decay=0.1), torch.bfloat16, "split", None),
    (PlaneAdamW(betas=(0.9, 0.95), weight_decay=0.0), torch.float32, "split", 0.3),
    (PlaneAdamW(betas=(0.3, 0.5), weight_decay=1.0, eps=1e-3), torch.bfloat16, "split", 0.5),
    (PlaneAdamW(betas=(0.0, 0.999), eps=0.0), torch.float32, "separate", None),
    (PlaneAdamW(betas=(0.95, 0.99), weight_decay=0.01), torch.bfloat16, "own", 2.0),
]


@pytest.mark.parametrize(("rule", "dtype", "masters", "clip"), OPTIONS)
def test_two_hundred_steps_are_bit_equal_to_torch(rule, dtype, masters, clip, use_native):
    """Weights, masters and both moments, for any options; masters split, separate, or the weights themselves."""
    unit = odd_unit()
    start = random(unit.numel, 0)
    planes, resident = planes_of(start, masters=masters), Resident(unit, start, rule)
    coefficient = None if clip is None else torch.tensor(clip)
    for number in range(1, 201):
        gradient = (random(unit.numel, number) * 10.0 ** (number % 7 - 4)).to(dtype)
        lr = 1e-2 / number
        step_state(rule, unit, planes, gradient, start=0, step=number, lr=lr, clip_coefficient=coefficient)
        clipped = gradient.float()
        resident.step(clipped if clip is None else clipped * coefficient, lr)
    master = resident.flat(None, start)
    assert torch.equal(master_of(planes).view(torch.int32), master.view(torch.int32))
    if masters != "own":
        assert torch.equal(planes.weights, master.to(torch.bfloat16))
    assert torch.equal(planes.exp_avg, resident.flat("exp_avg", torch.zeros(unit.numel)))
    assert torch.equal(planes.exp_avg_sq, resident.flat("exp_avg_sq", torch.zeros(unit.numel)))


@pytest.mark.skipif(not native.available(), reason="no kernels")
def test_the_kernel_agrees_with_the_torch_that_the_tests_run_with(use_native):
    """Else the tests above would hold, at the speed of the fallback."""
    assert agrees_with_torch(native.level())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_of_24_bits_are_those_of_torch_rounded_after_each_step(dtype, use_native):
    """Beside fp32 moments; what rounds them is written down once more above."""
    unit, rule = odd_unit(), PlaneAdamW(weight_decay=0.1)
    start = torch.from_numpy(in_24_bits(random(unit.numel, 0).numpy().view("u4")).view("f4").copy())
    planes, resident = planes_of(start, masters="split24"), Resident(unit, start, rule)
    for number in range(1, 21):
        gradient = (random(unit.numel, number) * 10.0 ** (number % 7 - 4)).to(dtype)
        step_state(rule, unit, planes, gradient, start=0, step=number, lr=1e-3, seed=5)
        resident.step(gradient.float(), 1e-3)
        key = chance_key(5, unit.index, number)
        for tensor, parameter in zip(resident.tensors, resident.parameters, strict=True):
            bits = parameter.detach().view(-1).numpy().view("u4")
            bits[:] = in_24_bits(bits, tensor.offset, key)
    assert torch.equal(master_of(planes), resident.flat(None, start))
    assert torch.equal(planes.exp_avg, resident.flat("exp_avg", torch.zeros(unit.numel)))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("masters", ["split", "split24", "separate", "own"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fewer_bits_are_the_same_bits_in_every_form(moments, masters, dtype, use_native):
    unit = odd_unit()
    start = random(unit.numel, 0)
    forms = [planes_of(start, moments, masters) for _ in range(2)]
    for number in range(1, 6):
        gradient = (random(unit.numel, number) * 10.0 ** (number % 3 - 2)).to(dtype)
        gradient[::7] = 0.0
        for planes, form in zip(forms, (torch_ops(), nullcontext()), strict=True):
            with form:  # type: ignore[attr-defined]
                step_state(
                    PlaneAdamW(weight_decay=0.1), unit, planes, gradient, start=0, step=number, lr=1e-2,
                    clip_coefficient=torch.tensor(0.7), seed=3,
                )  # fmt: skip
    assert same(*forms)


FORMS = [("fp32", "split"), ("bf16", "split"), ("int8", "split"), ("fp32", "split24"), ("int8", "split24")]


@pytest.mark.parametrize(("moments", "masters"), FORMS)
@pytest.mark.parametrize("tile", [2048, 3 * 2048])
def test_tiles_and_threads_change_nothing(moments, masters, tile, use_native):
    unit = odd_unit()
    start = random(unit.numel, 0)
    whole, tiled = planes_of(start, moments, masters), planes_of(start, moments, masters)
    for number in range(1, 4):
        gradient = random(unit.numel, number).bfloat16()
        common = {"step": number, "lr": 1e-2, "seed": 1}
        with num_threads(1):
            step_state(PlaneAdamW(), unit, whole, gradient, start=0, **common)
        with num_threads(3):
            for first in range(0, unit.numel, tile):
                last = min(first + tile, unit.numel)
                step_state(
                    PlaneAdamW(), unit, tiled.cut(first, last), gradient[first:last], start=first, **common
                )
    assert same(whole, tiled)


@given(
    sizes=st.lists(st.integers(1, 3000) | st.integers(1, 40).map(lambda n: 64 * n), min_size=1, max_size=5),
    form=st.sampled_from(FORMS),
    scale=st.integers(-30, 10),
    seed=st.integers(0, 9),
)
@settings(max_examples=20)
def test_any_sizes_and_magnitudes_give_the_same_bits_in_both_forms(sizes, form, scale, seed):
    unit = pack_unit(0, "u", "block", [(f"p{i}", (n,), True, True) for i, n in enumerate(sizes)])
    forms = [planes_of(random(unit.numel, seed), *form) for _ in range(2)]
    for number in (1, 2):
        gradient = random(unit.numel, number) * 10.0**scale * torch.exp(4 * random(unit.numel, seed + 9))
        for planes, form in zip(forms, (torch_ops(), nullcontext()), strict=True):
            with form:
                step_state(PlaneAdamW(), unit, planes, gradient, start=0, step=number, lr=0.1)
    assert same(*forms)


@pytest.mark.parametrize(("moments", "masters"), FORMS)
def test_what_does_not_step_keeps_what_it_has(moments, masters, use_native):
    unit = odd_unit()
    planes = planes_of(random(unit.numel, 0), moments, masters)
    gradient = random(unit.numel, 1)
    step_state(PlaneAdamW(), unit, planes, gradient, start=0, step=1, lr=0.1)
    before = planes_of(random(unit.numel, 0), moments, masters)
    for field in dataclasses.fields(planes)[:-1]:
        if (plane := getattr(planes, field.name)) is not None:
            getattr(before, field.name).copy_(plane)
    outside = torch.ones(unit.numel, dtype=torch.bool)
    for t in unit.tensors:
        if t.trainable and t.name != "p1":
            outside[t.offset : t.offset + t.numel] = False
    gradient[outside] = torch.nan
    step_state(PlaneAdamW(), unit, planes, gradient, start=0, step=2, lr=0.1, skip={"p1"})
    for name in ("weights", "master_low", "exp_avg", "exp_avg_sq"):
        now, then = getattr(planes, name), getattr(before, name)
        assert torch.equal(now[outside], then[outside]), name
        assert not torch.equal(now[~outside], then[~outside]), name


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_another_seed_rounds_otherwise_and_the_same_seed_the_same(moments, use_native):
    unit = odd_unit()
    results = []
    for seed in (1, 1, 2):
        planes = planes_of(random(unit.numel, 0), moments)
        gradient = random(unit.numel, 1)
        step_state(PlaneAdamW(), unit, planes, gradient, start=0, step=1, lr=0.1, seed=seed)
        results.append(planes)
    assert same(results[0], results[1])
    assert not torch.equal(results[0].exp_avg.view(torch.uint8), results[2].exp_avg.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient": torch.zeros(4096, dtype=torch.float16)}, "fp32 or bf16, not torch.float16"),
        ({"gradient": torch.zeros(2048)}, "need a gradient of 4096"),
        ({"lr": -1.0}, "learning rate"),
        ({"start": 64}, "multiples of 2048"),
        ({"planes": StatePlanes(weights=torch.zeros(4096))}, "need planes of 2 moments, not 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"planes": planes_of(torch.zeros(4096)), "gradient": torch.zeros(4096)}
    arguments |= {"start": 0, "step": 1, "lr": 0.1} | change
    with pytest.raises(ValueError, match=message):
        step_state(PlaneAdamW(), odd_unit(), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(64)}, "one of them"),
        ({"master": torch.zeros(64)}, "one of them"),
        ({"master_low": torch.zeros(64)}, "master_low: need 64 items"),
        ({"master_ties": torch.zeros(9, dtype=torch.uint8)}, "master_ties: need 8 items"),
        ({"exp_avg_sq": torch.zeros(64, dtype=torch.bfloat16)}, "one dtype"),
        ({"exp_avg_scales": torch.zeros(1, dtype=torch.uint8)}, "have scales"),
        ({"exp_avg": torch.zeros(64, dtype=torch.uint8)}, "have scales"),
        ({"exp_avg": None}, "exp_avg_sq without exp_avg"),
    ],
)
def test_planes_that_do_not_go_together_are_refused(change, message):
    planes = planes_of(torch.zeros(64))
    fields = {field.name: getattr(planes, field.name) for field in dataclasses.fields(planes)}
    with pytest.raises(ValueError, match=message):
        StatePlanes(**(fields | change))
