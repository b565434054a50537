import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import reference
from outsize.errors import ExecutionError, ModelError, NonFiniteError
from patience import PATIENCE_S
from reference import Recipe
from runtime.engines import contexts, engine_over, train
from runtime.oddities import VOCAB, Odd, Sparse, batch

DEVICES = [("cpu", "host"), ("cpu", "disk"), ("emulated:1", "host"), ("emulated:1", "disk")]


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def batches(count: int, steps: int = 3) -> list[list[dict[str, torch.Tensor]]]:
    return [[batch(seed=10 * step + m, rows=1 + m) for m in range(count)] for step in range(steps)]


def recipe(**changes) -> Recipe:
    return Recipe(steps=3, schedule="constant", causal=False, **changes)


@pytest.mark.parametrize(("device", "home"), DEVICES)
@pytest.mark.parametrize("count", [1, 3])
def test_models_with_every_oddity_train_as_they_are(count: int, device: str, home: str, tmp_path: Path):
    """Tuples, dicts and None from blocks; other arguments per layer; glue that several units share."""
    model, plain = make(Odd), make(Odd)
    got = train(model, batches(count), tmp_path, device=device, home=home, max_grad_norm=0.5, slots=2)
    want = reference.train(plain, batches(count), recipe(max_grad_norm=0.5))
    assert got.losses == pytest.approx(want.losses, abs=1e-6)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    for name, weight in want.weights.items():
        assert torch.allclose(got.weights[name], weight, atol=1e-6), name


@pytest.mark.parametrize(("device", "home"), DEVICES)
def test_experts_that_are_not_asked_are_left_alone_step_by_step(device: str, home: str, tmp_path: Path):
    """An expert's moments, decay and number of updates move only in steps in which it got a gradient."""
    model, plain = make(Sparse), make(Sparse)
    steps = batches(2)
    for step, parts in enumerate(steps):
        for part in parts:
            part["input_ids"] = part["input_ids"] % (3 + 3 * step)  # ever more experts; the last two never
    with engine_over(model, tmp_path, device=device, home=home, microbatches=2, offload=True) as rig:
        for context in contexts(steps):
            handle = rig.engine.begin(context)
            rig.engine.finish(handle)
        got = {name: weight.clone() for name, weight in rig.weights().items()}
        updates = rig.engine.optimizer.updates
    want = reference.train(plain, steps, recipe())
    assert all(torch.equal(got[name], weight) for name, weight in want.weights.items())
    asked = [sum(name in gradients for gradients in want.gradients) for name in updates]
    assert list(updates.values()) == asked
    assert {0, 1, 3} <= set(asked)
    idle = f"blocks.0.experts.{VOCAB - 1}.weight"
    assert torch.equal(got[idle], dict(make(Sparse).named_parameters())[idle])


def test_the_model_is_its_own_again_when_the_engine_closes(tmp_path: Path):
    model = make(Sparse)
    before = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    train(model, batches(1), tmp_path)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    model(**batch()).loss.backward()


class Breaking(Sparse):
    """Raises in a block's forward when told to."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.break_at = 0
        inner = self.blocks[1].forward

        def forward(*args):
            self.calls += 1
            if self.calls == self.break_at:
                raise IndexError("planted")
            return inner(*args)

        self.blocks[1].forward = forward


@pytest.mark.parametrize(("call", "op"), [(1, "F 2.0@w0"), (2, "F 2.1@w0"), (3, "B 2.0@w0")])
def test_an_exception_in_a_unit_s_forward_names_op_and_unit(call: int, op: str, tmp_path: Path):
    model = make(Breaking)
    model.break_at = call
    with engine_over(model, tmp_path, microbatches=2) as rig:
        (context,) = contexts(batches(2, steps=1))
        with pytest.raises(ModelError, match=f"raised in {op}, unit blocks.1: IndexError: planted") as raised:
            rig.engine.forward_backward_done(rig.engine.begin(context))
        assert isinstance(raised.value.__cause__, IndexError)
    model.break_at = 0
    train(model, batches(2), tmp_path)  # the next run in this process works


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_loss_that_is_not_finite_changes_no_weight(max_grad_norm: float, home: str, tmp_path: Path):
    model = make(Sparse)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.head.bias[0] = before["head.bias"][0] = float("nan")
    with engine_over(model, tmp_path, home=home, max_grad_norm=max_grad_norm) as rig:
        (context,) = contexts(batches(1, steps=1))
        handle = rig.engine.begin(context)
        with pytest.raises(
            NonFiniteError, match=r"step 1: loss nan.*no weight was changed.*on_nonfinite=skip"
        ):
            rig.engine.finish(handle)
        after = rig.weights()
        for name, weight in before.items():
            assert torch.equal(after[name].nan_to_num(7.0), weight.nan_to_num(7.0)), name


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_steps_that_are_not_finite_can_be_skipped(max_grad_norm: float, home: str, tmp_path: Path):
    """The skipped step leaves no trace: weights, moments and updates are those of the other steps alone."""
    steps = batches(1)
    bad = [{"input_ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.full((1, 3), -100)}]  # 0 / 0
    model, plain = make(Sparse), make(Sparse)
    with engine_over(
        model, tmp_path, home=home, max_grad_norm=max_grad_norm, settings={"skip_nonfinite": True}
    ) as rig:
        good = list(contexts(steps))
        (nan,) = contexts(steps[:1])
        nan.microbatches = (type(nan.microbatches[0])(inputs=bad[0], divisor=1.0, targets=1),)
        for context in (good[0], nan, *good[1:]):
            handle = rig.engine.begin(context)
            rig.engine.finish(handle)
        assert [context.skipped for context in (good[0], nan, good[1])] == [False, True, False]
        got = rig.weights()
        want = reference.train(plain, steps, recipe(max_grad_norm=max_grad_norm))
        assert all(torch.equal(got[name], weight) for name, weight in want.weights.items())


def test_a_timeline_holds_every_op_once_and_begins_anew(tmp_path: Path):
    with engine_over(make(Sparse), tmp_path, microbatches=2) as rig:
        for context in contexts(batches(2, steps=2)):
            rig.engine.finish(rig.engine.begin(context))
            events = rig.engine.take_timeline().events
            assert sorted(str(event.op) for event in events) == sorted(map(str, rig.engine.plan.program))
            assert [event.start_s for event in events] == sorted(event.start_s for event in events)
        assert rig.engine.take_timeline().events == ()
        assert rig.engine.waiting() == {}


def test_bytes_over_the_link_are_those_of_the_plan(tmp_path: Path):
    with engine_over(make(Sparse), tmp_path, microbatches=2, slots=1) as rig:
        for step, context in enumerate(contexts(batches(2)), start=1):
            rig.engine.finish(rig.engine.begin(context))
            traffic = rig.engine.plan.traffic
            assert rig.engine.weights.bytes_up == step * traffic.up
            assert rig.engine.gradients.bytes_down == step * traffic.down


def test_a_checkpoint_that_an_error_cut_short_is_whole_when_its_rest_has_been_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error comes while the first unit is stored; the units after are skipped, and stored again."""
    begun, failed, waiting = (threading.Event() for _ in range(3))
    stored: list[int] = []

    def keep(resting):
        begun.set()
        assert failed.wait(PATIENCE_S)
        if stored:
            assert waiting.wait(PATIENCE_S)  # whoever does not wait for the rest goes on without it
        stored.append(resting.unit.index)

    with engine_over(make(Odd), tmp_path) as rig:
        handle = rig.engine.store(keep)
        assert begun.wait(PATIENCE_S)
        rig.engine._executor.fail(ExecutionError("something else"))
        failed.set()
        with pytest.raises(ExecutionError, match="something else"):
            rig.engine.wait(handle.tasks)
        assert len(stored) == 1
        ordinary = rig.engine._executor.wait

        def wait(tasks):
            waiting.set()
            ordinary(tasks)

        monkeypatch.setattr(rig.engine._executor, "wait", wait)
        rig.engine.store_rest(handle)
        assert len(stored) == len(handle.tasks) > 1
        waiting.set()
