"""Moments of `outsize.AdamW` in fewer bits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
import zoo
from outsize.errors import ConfigError, OutsizeError
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.optimizer_spec import GRADIENT
from outsize.optim.planes import StatePlanes
from outsize.optim.step import step_state
from outsize.wrapped.module import runner_of
from outsize.wrapped.optimizer_state import as_kept
from wrapped.loops import ROOM, assert_equal, streamed_backward, wrapped

BATCHES = [zoo.batch("llama", seed=step, num_sequences=2) for step in range(4)]
HALF = torch.bfloat16


def planes_at_home(model: nn.Module) -> list[dict[str, Tensor]]:
    """Copies of the planes of each unit, over a host home."""
    runner = runner_of(model)
    runner.settle()
    home: Any = runner.session.home
    return [
        {name: home.view(unit.index, name).clone() for name in runner.state.planes}
        for unit in runner.split.spec.units
    ]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_a_step_is_the_rule_s_own(state: str, dtype: torch.dtype):
    """Unit by unit, with the number of the step, and clipped."""
    rule = PlaneAdamW(betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)
    with wrapped(zoo.build("llama", dtype=dtype), state=state, microbatches=2) as model:
        optimizer = outsize.AdamW(model, lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)
        for number, batch in enumerate(BATCHES[:3], start=1):
            streamed_backward(model, batch)
            outsize.clip_grad_norm_(model, 0.3)
            coefficient = next(iter(runner_of(model).parameters.factors.values()))
            want = planes_at_home(model)
            for unit, planes in zip(runner_of(model).split.spec.units, want, strict=True):
                state_planes = _state_planes(planes, unit.numel, runner_of(model).state.planes)
                step_state(
                    rule,
                    unit,
                    state_planes,
                    planes[GRADIENT],
                    start=0,
                    step=number,
                    lr=1e-2,
                    clip_coefficient=coefficient,
                )
            optimizer.step()
            for planes, expected in zip(planes_at_home(model), want, strict=True):
                assert_equal(planes, expected)
            optimizer.zero_grad()


def _state_planes(planes: dict[str, Tensor], numel: int, made: Any) -> StatePlanes:
    kept = {
        name: plane[: -(-numel // made[name].group)] for name, plane in planes.items() if name != GRADIENT
    }
    return StatePlanes(**kept)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_run_goes_on_from_its_state_bit_for_bit_over_either_home(dtype: torch.dtype):
    def go(home: str, steps: range, state: tuple[Any, Any] | None) -> tuple[Any, Any]:
        settings = {"home": home, "state": "int8", "slots": 2}
        with wrapped(zoo.build("llama", dtype=dtype), **settings) as model:
            optimizer = outsize.AdamW(model, lr=1e-3)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            for step in steps:
                streamed_backward(model, BATCHES[step])
                optimizer.step()
                optimizer.zero_grad()
            weights = {name: value.clone() for name, value in dict(model.state_dict()).items()}
            return weights, copy.deepcopy(optimizer.state_dict())

    whole, state = go("host", range(4), None)
    resumed, its_state = go("host", range(2, 4), go("disk", range(2), None))
    assert_equal(resumed, whole)
    moments = state["state"][3]
    assert moments["exp_avg"].dtype is moments["exp_avg_sq_scales"].dtype is torch.uint8
    for number, values in state["state"].items():
        assert_equal(its_state["state"][number], values)


def test_a_loaded_state_is_compared_once_and_let_go_where_nobody_holds_it():
    with wrapped(zoo.build("llama"), home="disk", slots=2) as model:
        optimizer, links = outsize.AdamW(model, lr=1e-3), runner_of(model).parameters.links
        streamed_backward(model, BATCHES[0])
        optimizer.step()
        loaded = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(loaded)
        model(**BATCHES[1])
        assert links  # the program may change it still
        del loaded
        model(**BATCHES[1])
        assert not links


def test_the_state_of_torch_s_own_adamw_is_taken():
    plain = zoo.build("llama")
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain(**BATCHES[0]).loss.backward()
    reference.step()
    with wrapped(zoo.build("llama"), state="bf16") as model:
        optimizer = outsize.AdamW(model, lr=1e-3)
        optimizer.load_state_dict(reference.state_dict())
        found, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert all(torch.equal(found[n]["exp_avg"], wanted[n]["exp_avg"].to(HALF)) for n in wanted)


def test_moments_of_each_form_become_those_of_each_other():
    torch.manual_seed(0)
    exact = {"exp_avg": torch.randn(5, 30), "exp_avg_sq": torch.rand(5, 30), "step": torch.tensor(3.0)}
    codes = as_kept(exact, "int8")
    assert codes["exp_avg"].shape == (5, 30)
    assert len(codes["exp_avg_scales"]) == 3
    back = as_kept(codes, "fp32")
    for name in ("exp_avg", "exp_avg_sq"):  # to the nearest of three bits of fraction
        assert torch.allclose(back[name], exact[name], rtol=1 / 16, atol=1e-4)
    again = as_kept(back, "int8")
    assert_equal(as_kept(again, "fp32"), back)
    assert as_kept(codes, "bf16")["exp_avg"].dtype is HALF
    assert as_kept(codes, "int8")["exp_avg"] is codes["exp_avg"]
    assert back["step"] is exact["step"]


def test_fewer_bits_take_less_of_the_home():
    taken = {}
    for state in ("fp32", "bf16", "int8"):
        with wrapped(zoo.build("llama"), state=state) as model:
            taken[state] = runner_of(model).session.home.num_bytes
    assert 1.3 < taken["fp32"] / taken["bf16"] < 1.34  # 16 bytes and 12
    assert taken["bf16"] > taken["int8"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"state": "int4"}, "moments are kept in fp32, bf16, int8"),
        (
            {"masters": "split"},
            "masters: it is of outsize train; a wrapped model keeps masters and gradients",
        ),
        ({"device_memroy": "1GiB"}, "device_memroy: no such argument; did you mean device_memory"),
        ({"load_in_4bit": True}, "load_in_4bit: no such argument; did you mean base_codec"),
        ({"nonsense": 1}, "nonsense: no such argument; there is activations, base_codec"),
    ],
)
def test_what_is_no_argument_is_refused_with_what_is(settings: dict[str, Any], says: str):
    model = zoo.build("llama")
    with pytest.raises(ConfigError, match=says):
        outsize.wrap(model, **{**ROOM, **settings})
    model(**BATCHES[0]).loss.backward()  # as it was


def test_arguments_without_effect_are_told(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    def told(**settings: Any) -> list[str]:
        caplog.clear()
        with pytest.raises(OutsizeError):  # before which they are read
            outsize.load(tmp_path / "none", **settings)
        return [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]

    host = "the home is in host memory"
    assert told(home="host", disk_memory="1GiB", store_dir=tmp_path / "store") == [
        f"outsize.load: {key} has no effect: {host}" for key in ("disk_memory", "store_dir")
    ]
    assert told(device="cpu", link_gb_per_s=2.0) == [
        "outsize.load: link_gb_per_s has no effect: only emulated devices have a throttled link"
    ]
    assert told(home="disk", disk_memory="1GiB", device="emulated:1", slots=3) == []


def test_what_is_no_argument_of_load_is_refused_as_such():
    with pytest.raises(
        ConfigError, match=r"^outsize\.load: atention: no such argument; did you mean attention"
    ):
        outsize.load("no/such/model", atention="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^outsize\.load: commits"):
        outsize.load("no/such/model", commits="none")
