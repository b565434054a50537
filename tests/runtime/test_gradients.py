import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from contracts.home_contract import planes_for
from outsize.errors import NonFiniteError
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.planner.program.program import parse_op
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.forward.binding import GradientSums, tensor_views
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.gradient_ops import GradientOps, GradientSettings
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool

SPEC = ModelSpec(
    dtype="fp32",
    units=(
        pack_unit(0, "a", "block", [("z", (40,), True, True), ("y", (3, 5), True, True)]),
        pack_unit(1, "b", "block", [("x", (70,), True, True)]),
    ),
)
ORDER = {"x": 0, "y": 1, "z": 2}  # another order than that of the units


@pytest.fixture
def arena():
    with Arena() as arena:
        yield arena


@pytest.fixture
def home(arena):
    with HostHome(SPEC, planes_for("fp32"), arena) as home:
        yield home


def make(
    home,
    arena,
    sums,
    *,
    max_grad_norm=1.0,
    clips=True,
    skip=False,
    observe=None,
    host_buffers=(),
    in_place=False,
):
    return GradientOps(
        SPEC,
        CpuDevice(),
        home,
        sums,
        [arena.take(unit.gradient_bytes, "accumulator") for unit in SPEC.units],
        list(host_buffers),
        GradientSettings(
            parameter_order=ORDER,
            max_grad_norm=max_grad_norm,
            clips=clips,
            skip_nonfinite=skip,
            in_place=in_place,
        ),
        observe=observe,
    )


def step(loss: float = 2.0, loss_scale: float = 1.0) -> StepContext:
    nothing = SimpleNamespace(inputs={}, divisor=1.0, targets=1)
    context = StepContext(number=4, learning_rate=0.1, microbatches=(nothing,), loss_scale=loss_scale)
    context.losses[0] = torch.tensor(loss)
    return context


def add(sums: GradientSums, unit: int, position: int, gradient: torch.Tensor) -> None:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    sums.hook(unit, position)(parameter)


def run(ops: GradientOps, context: StepContext, text: str) -> None:
    op = parse_op(text)
    handler = {"ACC": ops.accumulate, "NORM": ops.norm, "GRAD": ops.bring_home, "CLIP": ops.clip}
    handler[op.kind.value](op, context)


def backward(ops: GradientOps, sums: GradientSums, context: StepContext, gradients) -> None:
    """The gradient part of a step: ACC, sums, NORM, GRAD of both units."""
    for unit in (1, 0):
        run(ops, context, f"ACC {unit}@w0.{unit}")
        for position, gradient in gradients[unit].items():
            add(sums, unit, position, gradient)
        run(ops, context, f"NORM {unit}@w0")
        run(ops, context, f"GRAD {unit}@w0")


def random_gradients(scale: float = 1.0):
    torch.manual_seed(0)
    return {
        0: {0: torch.randn(40) * scale, 1: torch.randn(3, 5) * scale},
        1: {0: torch.randn(70) * scale},
    }


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_come_home_and_their_norm_is_that_of_torch(home, arena, in_place: bool):
    sums, gradients = GradientSums(), random_gradients()
    ops, context = make(home, arena, sums, max_grad_norm=0.5, in_place=in_place), step()
    backward(ops, sums, context, gradients)
    run(ops, context, "CLIP")
    parameters = [
        nn.Parameter(torch.zeros_like(g)) for g in (gradients[1][0], gradients[0][1], gradients[0][0])
    ]
    for parameter, gradient in zip(
        parameters, (gradients[1][0], gradients[0][1], gradients[0][0]), strict=True
    ):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert context.gradient_norm == norm.item()
    assert torch.equal(gradients[1][0] * context.coefficient, parameters[0].grad)
    for unit, position in ((0, 0), (0, 1), (1, 0)):
        found = tensor_views(SPEC.units[unit], home.view(unit, "gradient"))[position]
        assert torch.equal(found, gradients[unit][position])
    assert ops.bytes_down == sum(unit.gradient_bytes for unit in SPEC.units)
    assert not context.skipped
    assert any(buffer.any() for buffer in ops._accumulators) is not in_place


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_gradients_of_microbatches_add_up_in_their_order(home, arena, num_microbatches: int, in_place: bool):
    """The first ones may wait for the second ones beside the plane; what NORM and GRAD see is the sum all the same."""
    torch.manual_seed(1)
    found = [torch.randn(70) for _ in range(num_microbatches)]
    total = found[0].clone()
    for gradient in found[1:]:
        total += gradient
    sums = GradientSums()
    ops, context = make(home, arena, sums, in_place=in_place), step()
    run(ops, context, "ACC 1@w0.1")
    for gradient in found:
        add(sums, 1, 0, gradient)
    run(ops, context, "NORM 1@w0")
    assert torch.equal(context.norms[1][0], total.norm())
    run(ops, context, "GRAD 1@w0")
    assert torch.equal(tensor_views(SPEC.units[1], home.view(1, "gradient"))[0], total)


def test_first_gradients_wait_only_where_there_is_room_for_them():
    sums, plane = GradientSums(), torch.full((SPEC.units[1].numel,), math.nan)
    sums.open(SPEC.units[1], plane, keeps_first=True)
    add(sums, 1, 0, torch.ones(70))
    assert plane.isnan().all()
    sums.settle(1)
    assert torch.equal(plane[:70], torch.ones(70))
    add(sums, 1, 0, torch.ones(70))  # one more is added to what is there
    assert sums.close(1) == {0}
    assert torch.equal(plane[:70], torch.full((70,), 2.0))


def test_a_first_gradient_that_is_part_of_something_larger_is_copied():
    sums, plane = GradientSums(), torch.full((SPEC.units[1].numel,), math.nan)
    sums.open(SPEC.units[1], plane, keeps_first=True)
    parameter = nn.Parameter(torch.zeros(70))
    parameter.grad = torch.ones(1000)[:70]
    sums.hook(1, 0)(parameter)
    assert torch.equal(plane[:70], torch.ones(70))


def test_first_gradients_of_another_dtype_are_summed_in_that_of_the_plane():
    sums, plane = GradientSums(), torch.full((SPEC.units[1].numel,), math.nan)
    sums.open(SPEC.units[1], plane, keeps_first=True)
    for _ in range(2):
        add(sums, 1, 0, torch.full((70,), 1 / 3, dtype=torch.bfloat16))
    third = torch.tensor(1 / 3, dtype=torch.bfloat16).float()
    assert torch.equal(plane[:70], (third + third).expand(70))


def test_what_got_no_gradient_does_not_count(home, arena):
    sums, gradients = GradientSums(), random_gradients()
    del gradients[0][1]
    for buffer in (ops := make(home, arena, sums))._accumulators:
        buffer.fill_(255)  # NaN in what nobody writes
    context = step()
    backward(ops, sums, context, gradients)
    run(ops, context, "CLIP")
    assert context.touched == {0: {0}, 1: {0}}
    total = torch.stack([gradients[1][0].norm(), gradients[0][0].norm()]).norm()
    assert context.gradient_norm == pytest.approx(total.item())


def test_a_step_without_any_gradient_has_norm_zero(home, arena):
    sums = GradientSums()
    ops, context = make(home, arena, sums), step()
    backward(ops, sums, context, {0: {}, 1: {}})
    run(ops, context, "CLIP")
    assert context.gradient_norm == 0
    assert not context.skipped


def test_a_loss_scale_is_taken_out_of_norm_and_coefficient(home, arena):
    found = []
    for scale in (1.0, 1024.0):
        sums = GradientSums()
        ops, context = make(home, arena, sums, max_grad_norm=0.5), step(loss_scale=scale)
        backward(ops, sums, context, random_gradients(scale))
        run(ops, context, "CLIP")
        found.append((context.gradient_norm, context.coefficient.item() * scale))
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_refused_at_clip(bad: float, where: str, home, arena):
    sums, gradients = GradientSums(), random_gradients()
    context = step(loss=bad if where == "loss" else 1.0)
    if where == "gradient":
        gradients[0][1][2, 3] = bad
    ops = make(home, arena, sums)
    backward(ops, sums, context, gradients)
    with pytest.raises(NonFiniteError, match=r"step 5: loss .*gradient norm .*no weight was changed"):
        run(ops, context, "CLIP")
    assert context.skipped


def test_without_clipping_a_step_is_judged_by_its_loss(home, arena):
    sums = GradientSums()
    ops, context = make(home, arena, sums, clips=False), step(loss=math.nan)
    run(ops, context, "ACC 0@w0.0")
    with pytest.raises(NonFiniteError, match="step 5: loss nan; no weight"):
        run(ops, context, "GRAD 0@w0")


@pytest.mark.parametrize("clips", [True, False])
def test_or_the_step_is_skipped(clips: bool, home, arena):
    sums = GradientSums()
    ops, context = make(home, arena, sums, clips=clips, skip=True), step(loss=math.nan)
    backward(ops, sums, context, random_gradients())
    if clips:
        run(ops, context, "CLIP")
    assert context.skipped


def test_an_observer_sees_each_gradient_once_before_it_leaves(home, arena):
    seen = []
    sums, gradients = GradientSums(), random_gradients()
    ops = make(home, arena, sums, observe=lambda *what: seen.append((what[0], what[1], what[2].clone())))
    backward(ops, sums, step(), gradients)
    assert [(unit, touched) for unit, touched, _ in seen] == [(1, {0}), (0, {0, 1})]
    assert torch.equal(tensor_views(SPEC.units[0], seen[1][2])[1], gradients[0][1])


def test_a_gradient_for_a_disk_two_tiers_below_waits_in_a_host_buffer(arena, tmp_path):
    sums, gradients = GradientSums(), random_gradients()
    buffer = arena.take(max(unit.gradient_bytes for unit in SPEC.units), "host buffer")
    with IOPool(1) as pool, DiskHome(SPEC, planes_for("fp32"), tmp_path / "home", pool) as home:
        ops, context = make(home, arena, sums, host_buffers=[buffer]), step()
        run(ops, context, "ACC 1@w0.1")
        add(sums, 1, 0, gradients[1][0])
        run(ops, context, "GRAD 1@w0>h0")
        assert home.file.statistics().bytes_written == 0
        ops.write(parse_op("WRITE 1<h0"), context)
        into = arena.take(SPEC.units[1].gradient_bytes, "into").view(torch.float32)
        home.read(1, "gradient", 0, into)
        assert torch.equal(tensor_views(SPEC.units[1], into)[0], gradients[1][0])


def test_on_a_disk_right_below_it_goes_straight_there(arena, tmp_path):
    sums, gradients = GradientSums(), random_gradients()
    with IOPool(1) as pool, DiskHome(SPEC, planes_for("fp32"), tmp_path / "home", pool) as home:
        ops = make(home, arena, sums)
        backward(ops, sums, step(), gradients)
        assert home.file.statistics().bytes_written == ops.bytes_down
