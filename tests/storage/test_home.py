import itertools
from types import SimpleNamespace

import pytest
import torch

from contracts import HOME_CONTRACT, pattern, same_values, small_model
from contracts.home_contract import planes_for
from outsize.errors import BudgetExceededError
from outsize.storage.committed import CommittedHome
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Arena, Ledger


@pytest.fixture(params=["host", "disk", "disk-small-requests", "committed", "committed-small-requests"])
def make_home(request, tmp_path, pool, arena, monkeypatch):
    count = itertools.count()
    request_bytes = 4096 if request.param.endswith("small-requests") else 2**20
    monkeypatch.setattr("outsize.storage.committed.DEFAULT_REQUEST_BYTES", request_bytes)

    def make(model):
        planes = planes_for(model.dtype)
        if request.param == "host":
            return HostHome(model, planes, arena)
        path = tmp_path / f"{next(count)}"
        if request.param.startswith("committed"):
            return CommittedHome(model, planes, path, pool, arena=arena)
        return DiskHome(model, planes, path, pool, request_bytes=request_bytes)

    return make


@pytest.mark.parametrize("check", HOME_CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, make_home):
    check(make_home)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_home_is_exactly_its_planes(dtype, tmp_path, pool, arena):
    model = small_model(dtype)
    planes = planes_for(dtype)
    expected = sum(
        unit.numel * (sum(planes.values()) if unit.trainable else planes["weights"]) for unit in model.units
    )
    ledger = Ledger({"host": expected, "disk": expected})
    with Arena(ledger=ledger) as owned, HostHome(model, planes, owned) as home:
        assert home.num_bytes == ledger.used("host") == expected
    with DiskHome(model, planes, tmp_path / "home", pool, ledger=ledger) as home:
        assert home.num_bytes == ledger.used("disk") == expected
        assert (tmp_path / "home").stat().st_size == expected
    assert ledger.used("host") == ledger.used("disk") == 0


def test_a_view_is_the_plane_itself(arena):
    model = small_model()
    with HostHome(model, planes_for("bf16"), arena) as home:
        view = home.view(1, "exp_avg")
        assert (view.dtype, view.shape) == (torch.float32, (model.units[1].numel,))
        view.copy_(pattern(len(view), torch.float32, 3, arena))
        into = arena.take(view.nbytes, "into").view(torch.float32)
        home.read(1, "exp_avg", 0, into)
        assert same_values(into, view)
        with pytest.raises(ValueError, match="unit 2 has no plane 'exp_avg'; it has weights"):
            home.view(2, "exp_avg")


def test_the_disk_refuses_tensors_that_direct_io_cannot_take(tmp_path, pool, arena):
    with DiskHome(small_model(), planes_for("bf16"), tmp_path / "home", pool) as home:
        memory = arena.take(16384, "x")
        with pytest.raises(ValueError, match=r"outsize\.storage\.ledger"):
            home.read(0, "exp_avg", 0, memory[64 : 64 + 8192].view(torch.float32))


def test_weights_without_optimizer_state_make_a_home_too(arena):
    with HostHome(small_model(), {"weights": 2}, arena) as home:
        assert home.num_bytes == sum(unit.numel * 2 for unit in small_model().units)


@pytest.mark.parametrize("planes", [{}, {"exp_avg": 4}, {"weights": 4}, {"weights": 2, "exp_avg": 2}])
def test_planes_that_fit_no_dtype_are_refused(arena, planes):
    with pytest.raises(ValueError, match=r"lack 'weights'|bytes per element"):
        HostHome(small_model("bf16"), planes, arena)


def test_a_host_home_that_does_not_fit_says_what_is_held():
    with Arena(ledger=Ledger({"host": 100_000})) as arena, pytest.raises(BudgetExceededError, match="home: "):
        HostHome(small_model(), planes_for("bf16"), arena)


def test_parameters_can_be_sources_and_targets(tmp_path, pool, arena):
    model = small_model("fp32")
    with DiskHome(model, planes_for("fp32"), tmp_path / "home", pool) as disk:
        for home in (disk, HostHome(model, planes_for("fp32"), arena)):
            leaf = arena.take(8192, "x").view(torch.float32).fill_(2).requires_grad_()
            home.write(0, "weights", 0, leaf)
            home.read(0, "weights", 0, leaf)
            assert leaf.requires_grad
            assert leaf.is_leaf


def test_weights_are_pinned_before_gradients_and_masters_and_moments_never():
    pinned: list[int] = []
    pinner = SimpleNamespace(
        pin=lambda address, num_bytes: pinned.append(address), unpin=lambda address: None
    )
    model, planes = small_model("bf16"), planes_for("bf16")
    with Arena(pinner=pinner) as arena, HostHome(model, planes, arena) as home:
        assert pinned == []
        home.pin()
        units = range(len(model.units))
        crossing = [(unit, plane) for plane in ("weights", "gradient") for unit in units]
        lent = [home.lend(*key) for key in crossing]
        assert pinned == [plane.data_ptr() for plane in lent if plane is not None]
        home.pin()
        assert len(pinned) == len(set(pinned))
