"""Programs of several workers as they run: the bits of a resident run, whatever the cut, the rounds, the workers."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import reference
from outsize.compat.torch_private import watching
from outsize.errors import ExecutionError, ModelError, NonFiniteError
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Extent, Stages, spans_down, spans_up
from outsize.runtime.device.device import EmulatedDevice
from outsize.runtime.forward.saved_tensors import PRODUCTS
from outsize.runtime.forward.staged_run import StagedRun
from patience import PATIENCE_S
from planner.layouts import cuts
from reference import Recipe
from runtime.crews import crew_over, train_crew
from runtime.engines import contexts
from runtime.oddities import WIDTH, Sparse, batch


class Tied(Sparse):
    """A head that shares the embedding's table, positions added and a norm taken between units."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, self.embed.num_embeddings, bias=False)
        self.head.weight = self.embed.weight
        self.positions = nn.Embedding(8, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = torch.tanh(x * self.scale)  # its backward needs what it returned, which moves away meanwhile
        for block in self.blocks:
            x = block(x, input_ids)
        logits = self.head(self.norm(x))
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


class Direct(Sparse):
    """Blocks that return what a product returned, as it is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))


USERS_OF_TIED = (0, 1, 3)


def make(kind: type[nn.Module] = Sparse) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def batches(count: int, steps: int = 3) -> list[list[dict[str, torch.Tensor]]]:
    return [[batch(seed=10 * step + m, rows=1 + m % 2) for m in range(count)] for step in range(steps)]


def resident(count: int, kind: type[nn.Module] = Sparse, **changes):
    recipe = Recipe(steps=3, schedule="constant", causal=False, **changes)
    return reference.train(make(kind), batches(count), recipe)


def assert_same(got, want) -> None:
    assert got.losses == want.losses
    different = [name for name, weight in want.weights.items() if not torch.equal(got.weights[name], weight)]
    assert different == []


def cut(forward: list[int], backward: list[int], round_size: int) -> Stages:
    return Stages(forward=spans_up(forward), backward=spans_down(backward, 4), round_size=round_size)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_any_number_of_workers(num_workers: int, count: int, max_grad_norm: float):
    got = train_crew(make(), batches(count), num_workers, max_grad_norm=max_grad_norm)
    assert_same(got, resident(count, max_grad_norm=max_grad_norm))


@pytest.mark.parametrize(
    "stages",
    [
        cut([], [4], 1),
        cut([], [4], 3),
        cut([3], [1, 3], 2),
        cut([1, 1, 1], [1, 1, 1, 1], 2),
        cut([1, 1], [2, 1, 1], 2),
        cut([2], [2, 2], 1),
        cut([1], [3, 1], 3),
        cut([1, 2], [1, 2, 1], 5),
    ],
    ids=lambda stages: f"{len(stages.forward)}+{len(stages.backward)}x{stages.round_size}",
)
@pytest.mark.parametrize(("num_workers", "overlaps"), [(1, True), (2, True), (2, False)])
def test_any_cut_and_any_rounds(stages: Stages, num_workers: int, overlaps: bool):
    num_workers, stages = min(num_workers, stages.num_stages), replace(stages, overlaps=overlaps)
    got = train_crew(make(), batches(5), num_workers, stages=stages, max_grad_norm=0.5)
    assert_same(got, resident(5, max_grad_norm=0.5))


@pytest.mark.parametrize("kind", [Sparse, Direct])
@pytest.mark.parametrize(
    ("num_workers", "stages"),
    [
        (1, cut([1, 1, 1], [1, 1, 1, 1], 2)),
        (2, cut([3], [1, 3], 2)),
        (2, cut([2], [2, 2], 5)),
        (3, cut([1, 2], [1, 2, 1], 3)),
        (4, cut([1, 1, 1], [1, 1, 1, 1], 1)),
    ],
)
def test_what_forwards_keep_is_found_on_another_worker(
    kind: type[nn.Module], num_workers: int, stages: Stages
):
    options = {"stages": stages, "kept": Extent.PRODUCTS, "max_grad_norm": 0.5}
    got = train_crew(make(kind), batches(5), num_workers, **options)
    assert_same(got, resident(5, kind, max_grad_norm=0.5))


@pytest.mark.parametrize(("kind", "again"), [(Sparse, 0), (Direct, 2 * 2)])
def test_products_that_left_are_not_computed_again(
    kind: type[nn.Module], again: int, monkeypatch: pytest.MonkeyPatch
):
    """But for what a block returned, which goes ways of its own."""
    computed = []
    inner = StagedRun.recompute

    def recompute(self, unit, forward):
        def count(func, args, kwargs):
            computed.append(func in PRODUCTS)
            return func(*args, **kwargs)

        with watching(count):  # beneath the mode that hands results out
            inner(self, unit, forward)

    stages = cut([3], [1, 3], 1)

    def crossed(kept):
        with crew_over(make(kind), 2, microbatches=2, stages=stages, kept=kept) as rig:
            (context,) = contexts([batches(2)[0]])
            rig.engine.finish(rig.engine.begin(context))
            assert rig.engine.num_let_go == 0
            return rig.engine.link_bytes()

    without = crossed(None)
    monkeypatch.setattr(StagedRun, "recompute", recompute)
    moved = crossed(Extent.PRODUCTS)
    assert computed
    assert sum(computed) == again
    assert moved["down:w0"] - without["down:w0"] == moved["up:w0"] - without["up:w0"] > 0


def test_what_finds_no_room_below_is_computed_again():
    stages = cut([3], [1, 3], 1)
    with crew_over(make(), 2, microbatches=2, stages=stages, kept=Extent.PRODUCTS, room_bytes=16) as rig:
        for context in contexts(batches(2)):
            rig.engine.finish(rig.engine.begin(context))
        assert rig.engine.num_let_go == 3 * 2 * 2
        got = rig.weights()
        want = resident(2)
        assert all(torch.equal(got[name], weight) for name, weight in want.weights.items())


def ring(num_workers: int) -> frozenset[tuple[int, int]]:
    """All pairs of which one worker hands over to the other."""
    return frozenset((w, (w + 1) % num_workers) for w in range(num_workers) if num_workers > 1)


@pytest.mark.parametrize("kept", [None, Extent.PRODUCTS])
@pytest.mark.parametrize(
    ("num_workers", "stages", "peers"),
    [
        (2, cut([1, 1, 1], [1, 1, 1, 1], 2), ring(2)),
        (2, cut([3], [1, 3], 2), frozenset({(1, 0)})),
        (3, cut([1, 2], [1, 2, 1], 5), ring(3)),
        (3, cut([2], [2, 2], 1), frozenset({(0, 1), (2, 0)})),
        (4, cut([1, 1], [2, 1, 1], 2), ring(4)),
    ],
)
def test_what_goes_from_device_to_device_changes_no_bit(
    num_workers: int, stages: Stages, peers: frozenset[tuple[int, int]], kept: Extent | None
):
    options = {"stages": stages, "peers": peers, "kept": kept, "max_grad_norm": 0.5}
    got = train_crew(make(), batches(5), num_workers, **options)
    assert_same(got, resident(5, max_grad_norm=0.5))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_code_between_units_goes_backward_from_what_has_moved_to_another_device(num_workers: int):
    options = {"users": USERS_OF_TIED, "max_grad_norm": 0.5}
    got = train_crew(make(Tied), batches(3), num_workers, peers=ring(num_workers), **options)
    assert_same(got, train_crew(make(Tied), batches(3), num_workers, **options))


def test_bytes_from_device_to_device_are_those_of_the_plan():
    options = {"stages": cut([2], [2, 2], 2), "peers": ring(2)}
    with crew_over(make(), 2, microbatches=4, **options) as rig:
        (context,) = contexts([[batch(seed=m, rows=2) for m in range(4)]])
        rig.engine.finish(rig.engine.begin(context))
        crossed = rig.engine.link_bytes()
        moves = [op for op in rig.engine.plan.program if op.target is not None]
        assert {op.kind for op in moves} == {Kind.PASS, Kind.RETURN}
        assert rig.engine.plan.traffic.across == len(moves) * 2**10
        across = sum(size for lane, size in crossed.items() if lane.startswith("peer"))
        assert across == len(moves) * 2 * 5 * WIDTH * 4


@pytest.mark.parametrize("freeze", [("embed.*",), ("embed.*", "blocks.0.*"), ("embed.*", "blocks.*")])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_frozen_prefixes(freeze: tuple[str, ...], num_workers: int, max_grad_norm: float):
    got = train_crew(make(), batches(4), num_workers, freeze=freeze, max_grad_norm=max_grad_norm)
    assert_same(got, resident(4, freeze=freeze, max_grad_norm=max_grad_norm))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_rest_that_trains_is_summed_use_by_use(num_workers: int, count: int, max_grad_norm: float):
    """As one worker sums it, bit for bit; a resident loop sums microbatch by microbatch."""
    got = train_crew(
        make(Tied), batches(count), num_workers, users=USERS_OF_TIED, max_grad_norm=max_grad_norm
    )
    alone = cut([3], [1, 1, 1, 1], count)
    one = train_crew(
        make(Tied), batches(count), 1, users=USERS_OF_TIED, stages=alone, max_grad_norm=max_grad_norm
    )
    assert_same(got, one)
    want = resident(count, Tied, max_grad_norm=max_grad_norm)
    if count == 1:
        assert_same(got, want)
    for name, weight in want.weights.items():
        assert torch.allclose(got.weights[name], weight, atol=1e-6), name


def test_a_user_of_the_rest_that_nobody_knew_of_is_an_error():
    with pytest.raises(ModelError, match="was not known to use it"):
        train_crew(make(Tied), batches(2), 2, users=(0, 3))


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_nothing_deadlocks_whatever_the_lanes_wait_for(data: st.DataObject):
    """Ops take random times, in any cut, and the bits are the same."""
    fused = data.draw(st.integers(0, 3))
    below = data.draw(cuts(fused)) if fused else []
    stages = cut(data.draw(cuts(fused)) if fused else [], [4 - fused, *below], data.draw(st.integers(1, 4)))
    num_workers = data.draw(st.integers(1, min(4, stages.num_stages)))
    count = data.draw(st.integers(1, 4))
    rng = random.Random(data.draw(st.integers(0, 2**16)))
    slow = {kind: rng.choice([0.0, 0.0, 0.001, 0.004]) for kind in Kind}
    options = {"kept": data.draw(st.sampled_from([None, Extent.PRODUCTS])), "max_grad_norm": 0.5}
    options["peers"] = frozenset(pair for pair in sorted(ring(num_workers)) if data.draw(st.booleans()))
    with crew_over(make(), num_workers, stages=stages, microbatches=count, **options) as rig:
        executor = rig.engine._executor
        inner = executor._handler

        def delayed(op, context):
            time.sleep(slow[op.kind] * rng.random())
            inner(op, context)

        executor._handler = delayed

        def train():
            losses, handle = [], None
            for context in contexts(batches(count)):
                handle = rig.engine.begin(context)
                rig.engine.forward_backward_done(handle)
                losses.append(context.loss())
            rig.engine.finish(handle)
            return losses

        with ThreadPoolExecutor(1) as thread:
            losses = thread.submit(train).result(timeout=PATIENCE_S)
        got = rig.weights()
        want = resident(count, max_grad_norm=0.5)
        assert losses == want.losses
        assert all(torch.equal(got[name], weight) for name, weight in want.weights.items())


class SlowDevice(EmulatedDevice):
    """Computes for 20 times as long as the machine does."""

    @contextmanager
    def computing(self):
        started = time.perf_counter()
        yield
        time.sleep(19 * (time.perf_counter() - started))


def test_a_slow_worker_is_waited_for_and_changes_nothing_else():
    """Each op runs where the program says; the quick worker waits for ops of the slow one, and for no clock."""
    devices = [EmulatedDevice("quick"), SlowDevice("slow")]
    with crew_over(make(), 2, stages=cut([3], [1, 3], 2), microbatches=4, devices=devices) as rig:
        (context,) = contexts(batches(4, steps=1))
        rig.engine.finish(rig.engine.begin(context))
        events = rig.engine.take_timeline().events
        assert sorted(str(event.op) for event in events) == sorted(map(str, rig.engine.plan.program))
        waited = {str(event.waited_for) for event in events if event.lane.endswith(":w0")}
        assert any(op.endswith("@w1") for op in waited)
    assert context.loss() == resident(4).losses[0]


class Meeting:
    """Two units of two workers that go on only when both are there."""

    barrier = threading.Barrier(2)
    calls = 0

    class Block(Sparse.Block):
        def forward(self, x, ids):
            Meeting.calls += 1
            if Meeting.calls == 2:
                Meeting.barrier.wait(PATIENCE_S)
            return super().forward(x, ids)

    class Head(nn.Linear):
        met = False

        def forward(self, x):
            if not Meeting.Head.met:
                Meeting.Head.met = True
                Meeting.barrier.wait(PATIENCE_S)
            return super().forward(x)


def test_workers_compute_beside_each_other():
    """One runs the second microbatch through a block while the other has the first one in the head."""
    model = make()
    model.blocks[1], model.head = Meeting.Block(), Meeting.Head(WIDTH, model.head.out_features)
    got = train_crew(model, batches(4, steps=1), 2, stages=cut([3], [1, 3], 2))
    assert len(got.losses) == 1
    assert Meeting.Head.met


class Breaking(Sparse):
    """Raises in the second block where told to."""

    class Block(Sparse.Block):
        broken = False

        def forward(self, x, ids):
            if type(self).broken and torch.is_grad_enabled():
                raise IndexError("planted")
            return super().forward(x, ids)

    def __init__(self):
        super().__init__()
        self.blocks[0] = Sparse.Block()  # which another worker may recompute before the second one


def test_an_error_in_one_worker_stops_all_and_names_op_and_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Breaking.Block, "broken", True)
    stages = cut([3], [1, 1, 1, 1], 2)
    with crew_over(make(Breaking), 3, stages=stages, microbatches=4) as rig:
        (context,) = contexts(batches(4, steps=1))
        with pytest.raises(ModelError, match=r"raised in R 2\.0@w2, unit blocks.1: IndexError: planted"):
            rig.engine.forward_backward_done(rig.engine.begin(context))
    monkeypatch.setattr(Breaking.Block, "broken", False)
    assert_same(train_crew(make(Breaking), batches(2), 3), resident(2, Breaking))


def test_an_error_in_a_lane_names_it_too():
    with crew_over(make(), 2, stages=cut([3], [1, 3], 2)) as rig:
        send = rig.engine._crew.workers[1].activations

        def full(*_):
            raise OSError("planted")

        send._scratch = SimpleNamespace(put=full, take=full, read=full)
        (context,) = contexts(batches(2, steps=1))
        with pytest.raises(ExecutionError, match=r"@w1 failed on lane (up|down):w1: OSError: planted"):
            rig.engine.forward_backward_done(rig.engine.begin(context))


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_loss_that_is_not_finite_changes_no_weight(max_grad_norm: float):
    model = make()
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with crew_over(model, 2, microbatches=3, max_grad_norm=max_grad_norm) as rig:
        (context,) = contexts(batches(3, steps=1))
        handle = rig.engine.begin(context)
        with pytest.raises(NonFiniteError, match="no weight was changed"):
            rig.engine.finish(handle)
        after = rig.weights()
        assert all(torch.equal(after[n].nan_to_num(7.0), w.nan_to_num(7.0)) for n, w in before.items())


def test_the_model_is_its_own_again_when_the_engine_closes():
    model = make(Tied)
    before = dict(model.named_parameters())
    train_crew(model, batches(1), 2, users=USERS_OF_TIED)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    model(**batch()).loss.backward()


def test_a_forward_put_in_from_outside_cannot_be_replicated():
    model = make()
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda *args: inner(*args)
    before = dict(model.named_parameters())
    with pytest.raises(ModelError, match="put in from outside"), crew_over(model, 2):
        pass
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_bytes_over_the_link_are_those_of_the_plan():
    with crew_over(make(), 2, microbatches=4, stages=cut([2], [2, 2], 2)) as rig:
        program = rig.engine.plan.program
        moved = sum(op.kind in (Kind.SAVE, Kind.SEND) for op in program)
        assert moved
        (context,) = contexts([[batch(seed=m, rows=2) for m in range(4)]])
        rig.engine.finish(rig.engine.begin(context))
        crossed = rig.engine.link_bytes()
        up = sum(size for lane, size in crossed.items() if lane.startswith("up"))
        down = sum(size for lane, size in crossed.items() if lane.startswith("down"))
        traffic, nominal = rig.engine.plan.traffic, 2**10
        real = 2 * 5 * WIDTH * 4
        assert down == traffic.down - moved * (nominal - real)
        back = sum(op.kind in (Kind.FETCH, Kind.RECV) for op in program)
        assert up == traffic.up - back * (nominal - real)
