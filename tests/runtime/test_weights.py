import pytest
import torch

from contracts import pattern, same_values, small_model
from contracts.home_contract import planes_for
from outsize.planner.program.program import parse_op
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.ops.load_ops import WeightOps, typed_plane
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool


@pytest.fixture
def arena():
    with Arena() as arena:
        yield arena


@pytest.fixture(params=["host", "disk"])
def home(request, arena, tmp_path):
    model = small_model("bf16")
    with IOPool(1) as pool:
        if request.param == "host":
            made = HostHome(model, planes_for("bf16"), arena)
        else:
            made = DiskHome(model, planes_for("bf16"), tmp_path / "home", pool)
        with made:
            yield made


def fill(home, unit: int, arena: Arena) -> torch.Tensor:
    weights = pattern(small_model().units[unit].numel, torch.bfloat16, unit, arena)
    home.write(unit, "weights", 0, weights)
    return weights


def test_a_load_puts_the_weights_into_the_slot_that_it_names(home, arena):
    model = small_model("bf16")
    size = max(unit.weight_bytes("bf16") for unit in model.units)
    slots = [arena.take(size, "slot") for _ in range(2)]
    ops = WeightOps(model, CpuDevice(), home, slots, [])
    expected = {unit: fill(home, unit, arena) for unit in (0, 1, 2)}
    for unit, slot in ((0, 1), (1, 0), (2, 1)):
        ops.load(parse_op(f"LOAD {unit}@w0.{slot}"), None)
        assert same_values(ops.planes(unit, slot)[0], expected[unit])
        assert ops.planes(unit, slot)[0].data_ptr() == slots[slot].data_ptr()
    assert same_values(ops.planes(1, 0)[0], expected[1])
    assert ops.bytes_up == sum(model.units[unit].weight_bytes("bf16") for unit in (0, 1, 2))


def test_what_is_used_in_place_lies_at_home_and_slots_stay_as_they_are(home, arena):
    model = small_model("bf16")
    size = max(unit.weight_bytes("bf16") for unit in model.units)
    slots = [arena.take(size, "slot").zero_() for _ in range(2)]
    ops = WeightOps(model, CpuDevice(), home, slots, [], in_place=True)
    expected = {unit: fill(home, unit, arena) for unit in (0, 1)}
    for unit, slot in ((0, 1), (1, 0)):
        ops.load(parse_op(f"LOAD {unit}@w0.{slot}"), None)
        (plane,) = ops.planes(unit, slot)
        assert same_values(plane, expected[unit])
        at_home = isinstance(home, HostHome)  # from a disk they come up
        assert (plane.data_ptr() == slots[slot].data_ptr()) is not at_home
        assert bool(slots[slot].any()) is not at_home
        if at_home:
            assert plane.data_ptr() == home.view(unit, "weights").data_ptr()
    assert ops.bytes_up == sum(model.units[unit].weight_bytes("bf16") for unit in (0, 1))


def test_a_step_of_weights_at_home_is_no_change_to_the_graph_that_keeps_them(arena):
    model = small_model("bf16")
    with HostHome(model, planes_for("bf16"), arena) as home:
        ops = WeightOps(model, CpuDevice(), home, [arena.take(2**20, "slot")], [], in_place=True)
        (plane,) = ops.planes(0, 0)
        home.view(0, "weights").add_(1)
        assert plane._version == 0


def test_by_way_of_a_host_buffer(home, arena):
    model = small_model("bf16")
    size = max(unit.weight_bytes("bf16") for unit in model.units)
    ops = WeightOps(
        model, CpuDevice(), home, [arena.take(size, "slot")], [arena.take(size, "host") for _ in range(2)]
    )
    expected = fill(home, 1, arena)
    ops.read(parse_op("READ 1>h1"), None)
    assert ops.bytes_up == 0
    ops.load(parse_op("LOAD 1@w0.0<h1"), None)
    assert same_values(ops.planes(1, 0)[0], expected)


def test_a_plane_is_the_beginning_of_a_buffer_in_the_compute_dtype():
    unit = small_model().units[1]
    buffer = torch.zeros(2 * unit.weight_bytes("fp32"), dtype=torch.uint8)
    for dtype, torch_dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        plane = typed_plane(buffer, unit, dtype)
        assert (plane.dtype, plane.shape) == (torch_dtype, (unit.numel,))
        assert plane.data_ptr() == buffer.data_ptr()
