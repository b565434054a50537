import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.model.sizes.model_spec import ModelSpec, UnitSpec, pack_unit
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.planes import StatePlanes
from outsize.optim.step import clip_coefficient, gradient_norms, step_state
from threads import num_threads

SETTINGS = PlaneAdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
# Sizes with every kind of tail: none, below a vector, below 16; some span several tiles, and some touch their
# neighbour.
SHAPES = [(61, 97), (3,), (64, 64), (64, 33), (129,), (17, 5, 3), (2048,), (4099,)]
DECAY = [True, False, True, True, False, True, True, False]


def odd_unit() -> UnitSpec:
    return pack_unit(
        0, "block", "block", [(f"p{i}", shape, i != 4, DECAY[i]) for i, shape in enumerate(SHAPES)]
    )


class Resident:
    """Separate parameters under ``torch.optim.AdamW(fused=True)`` and ``clip_grad_norm_``: the reference."""

    def __init__(self, unit: UnitSpec, master: torch.Tensor, settings: PlaneAdamW) -> None:
        self.unit = unit
        self.parameters = [
            torch.nn.Parameter(master[t.offset : t.offset + t.numel].clone().view(t.shape))
            for t in unit.tensors
        ]
        pairs = [(t, p) for t, p in zip(unit.tensors, self.parameters, strict=True) if t.trainable]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for t, p in pairs if t.decay], "weight_decay": settings.weight_decay},
                {"params": [p for t, p in pairs if not t.decay], "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def step(self, gradient: torch.Tensor, lr: float, max_norm: float, skip: set[str]) -> torch.Tensor:
        for t, parameter in zip(self.unit.tensors, self.parameters, strict=True):
            taken = t.trainable and t.name not in skip
            parameter.grad = gradient[t.offset : t.offset + t.numel].clone().view(t.shape) if taken else None
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm

    def flat(self, key: str | None, like: torch.Tensor) -> torch.Tensor:
        """Return the parameters, or a moment of them, laid out as ``like`` is."""
        plane = like.clone()
        for t, parameter in zip(self.unit.tensors, self.parameters, strict=True):
            value = parameter.detach() if key is None else self.optimizer.state[parameter].get(key)
            if value is not None:
                plane[t.offset : t.offset + t.numel] = value.flatten()
        return plane


def random_plane(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def run_both(unit: UnitSpec, num_steps: int, tile: int, *, max_norm: float, skip_at: dict[int, set[str]]):
    planes = {"weights": random_plane(unit.numel, 0)}
    planes |= {name: torch.zeros(unit.numel) for name in ("exp_avg", "exp_avg_sq")}
    start_values = {name: plane.clone() for name, plane in planes.items()}
    resident = Resident(unit, planes["weights"], SETTINGS)
    counts = {t.name: 0 for t in unit.tensors}
    for number in range(num_steps):
        gradient = random_plane(unit.numel, 1000 + number) * 10.0 ** (number % 7 - 4)
        skip, lr = skip_at.get(number, set()), 1e-3 / (number + 1)
        expected_norm = resident.step(gradient, lr, max_norm, skip)
        norms = gradient_norms(unit, gradient)
        pairs = zip(unit.tensors, norms, strict=True)
        total, coefficient = clip_coefficient(
            [norm for t, norm in pairs if t.trainable and t.name not in skip], max_norm
        )
        assert torch.equal(total, expected_norm)
        counts = {name: count + (name not in skip) for name, count in counts.items()}
        for start in range(0, unit.numel, tile):
            stop = min(start + tile, unit.numel)
            step_state(
                SETTINGS, unit, StatePlanes(**{name: plane[start:stop] for name, plane in planes.items()}),
                gradient[start:stop], start=start, step=counts, lr=lr, clip_coefficient=coefficient, skip=skip,
            )  # fmt: skip
    return resident, planes, start_values


@pytest.mark.parametrize("tile", [2048, 3 * 2048, 2**20])
@pytest.mark.parametrize("count", [1, 2])
def test_fifty_steps_are_bit_equal_to_torch_over_separate_parameters(tile, count, use_native):
    with num_threads(count):
        resident, planes, start = run_both(odd_unit(), 50, tile, max_norm=1.0, skip_at={})
    assert torch.equal(planes["weights"], resident.flat(None, start["weights"]))
    assert torch.equal(planes["exp_avg"], resident.flat("exp_avg", start["exp_avg"]))
    assert torch.equal(planes["exp_avg_sq"], resident.flat("exp_avg_sq", start["exp_avg_sq"]))


def test_parameters_without_a_gradient_are_left_alone_and_count_their_own_steps():
    skip_at = {0: {"p0"}, 3: {"p0", "p6"}, 4: {f"p{i}" for i in range(8)}}
    resident, planes, start = run_both(odd_unit(), 8, 2048, max_norm=0.5, skip_at=skip_at)
    assert torch.equal(planes["weights"], resident.flat(None, start["weights"]))
    assert torch.equal(planes["exp_avg_sq"], resident.flat("exp_avg_sq", start["exp_avg_sq"]))


@given(
    sizes=st.lists(st.integers(1, 5000) | st.integers(1, 80).map(lambda n: 64 * n), min_size=1, max_size=6),
    tiles=st.integers(1, 4),
    max_norm=st.sampled_from([1e-3, 1.0, 1e9]),
)
@settings(max_examples=40)
def test_any_sizes_and_tiles_are_bit_equal(sizes, tiles, max_norm):
    unit = pack_unit(0, "u", "block", [(f"p{i}", (n,), True, i % 3 > 0) for i, n in enumerate(sizes)])
    resident, planes, start = run_both(unit, 3, tiles * 2048, max_norm=max_norm, skip_at={})
    assert torch.equal(planes["weights"], resident.flat(None, start["weights"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_the_rounded_masters_and_others_stay(dtype, use_native):
    unit = odd_unit()
    master = random_plane(unit.numel, 0)
    weights = torch.full((unit.numel,), 7.0, dtype=dtype)
    moments = {name: torch.zeros(unit.numel) for name in ("exp_avg", "exp_avg_sq")}
    planes = StatePlanes(weights=weights, master=master, **moments)
    step_state(SETTINGS, unit, planes, random_plane(unit.numel, 1), start=0, step=1, lr=1e-3, skip={"p1"})
    for t in unit.tensors:
        part = slice(t.offset, t.offset + t.numel)
        stepped = t.trainable and t.name != "p1"
        assert torch.equal(weights[part], master[part].to(dtype)) == stepped, t.name
        assert (weights[part] == 7).all() != stepped, t.name


def test_padding_and_frozen_parameters_keep_weights_and_moments():
    unit = odd_unit()
    outside = torch.ones(unit.numel, dtype=torch.bool)
    for t in unit.tensors:
        if t.trainable:
            outside[t.offset : t.offset + t.numel] = False
    planes = {
        name: random_plane(unit.numel, seed).abs()
        for seed, name in enumerate(("weights", "exp_avg", "exp_avg_sq"))
    }
    before = {name: plane.clone() for name, plane in planes.items()}
    gradient = torch.where(outside, torch.nan, 1.0)
    step_state(SETTINGS, unit, StatePlanes(**planes), gradient, start=0, step=1, lr=0.1)
    for name, plane in planes.items():
        assert torch.equal(plane[outside], before[name][outside])
        assert not torch.equal(plane[~outside], before[name][~outside])
        assert plane[~outside].isfinite().all()


@pytest.mark.parametrize(
    "bad",
    [
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9,)},
        {"betas": (0.9, float("nan"))},
        {"eps": -1e-8},
        {"eps": float("nan")},
        {"weight_decay": -0.1},
        {"weight_decay": float("inf")},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PlaneAdamW(**bad)


def test_settings_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SETTINGS.eps = 1.0


def test_a_unit_without_tensors_steps_nothing():
    unit = ModelSpec(units=(pack_unit(0, "tied", "head", []),), dtype="fp32").units[0]
    empty = torch.empty(0)
    step_state(
        SETTINGS, unit, StatePlanes(weights=empty, exp_avg=empty, exp_avg_sq=empty), empty,
        start=0, step=1, lr=0.1,
    )  # fmt: skip
    assert gradient_norms(unit, empty).shape == (0,)
