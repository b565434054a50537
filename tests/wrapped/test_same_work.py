"""A step in a loop of one's own does the work of a step of the trainer, and no choice of what is kept changes a bit."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

import outsize
import zoo
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice
from outsize.planner.search.step_plan import Plan
from outsize.runtime.forward import short_recompute
from outsize.session.job.prepare import prepare
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.wrapped.module import runner_of
from support import make_batches, make_config, save_model
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

BATCH = zoo.batch("llama", num_sequences=4)
CHOICES = ["recompute", "keep"]
NUM_STEPS = 3


class Work:
    """What steps did.

    Attributes:
        forwards: of each block, how often it ran.
        left_out: operations that recomputes did not compute.
        moved: bytes on the link, by lane.
        losses: of the steps.
    """

    def __init__(self) -> None:
        self.forwards: Counter[str] = Counter()
        self.skips: list[list[Any]] = []
        self.moved: dict[str, int] = {}
        self.losses: list[float] = []

    @property
    def left_out(self) -> int:
        return sum(map(len, self.skips))

    def restart(self) -> None:
        self.forwards.clear()
        self.skips.clear()


@contextmanager
def watching(model: nn.Module, work: Work, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count the forwards of the blocks of a Llama, and what is left out of them."""

    class Counted(short_recompute._Skip):
        def __init__(self) -> None:
            super().__init__()
            work.skips.append(self.made)

    def counted(name: str, forward: Any) -> Any:
        def run(*args: Any) -> Any:
            work.forwards.update([name])
            return forward(*args)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(short_recompute, "_Skip", Counted)
        for name, block in model.get_submodule("model.layers").named_children():
            part = block.get_submodule("mlp")
            patched.setattr(part, "forward", counted(name, part.forward), raising=False)
        yield


def work_of_trainer(
    directory: Path, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Work:
    batches = make_batches("llama", NUM_STEPS)
    config = make_config(
        directory,
        batches,
        train={"microbatches": 2},
        memory={"device": "emulated:1", "slots": 2, "activations": activations},
    )
    prepared, work = prepare(RunSpec.of(config, tmp_path), lambda _: None), Work()
    with (
        StreamedTrainer(prepared, tmp_path / "store") as trainer,
        watching(prepared.split.model, work, monkeypatch),
    ):
        trainer.fill()
        work.losses = [outcome.loss for outcome in trainer.steps(batches)]
        trainer.settle()
        work.moved = {lane: num_bytes // NUM_STEPS for lane, num_bytes in trainer.engine.link_bytes().items()}
    work.forwards = Counter({name: count // NUM_STEPS for name, count in work.forwards.items()})
    del work.skips[len(work.skips) // NUM_STEPS :]
    return work


def work_of_wrap(directory: Path, activations: str, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Of the last step; the first measures as well."""
    settings: dict[str, Any] = {**ROOM, "device": "emulated:1", "slots": 2, "activations": activations}
    model, work = outsize.load(directory, dtype="fp32", home="host", microbatches=2, **settings), Work()
    try:
        optimizer = outsize.AdamW(model, lr=1e-3, weight_decay=0.0)
        with watching(model, work, monkeypatch):
            for batch in make_batches("llama", NUM_STEPS):
                work.restart()
                engine = runner_of(model)._engine
                before = engine.link_bytes() if engine is not None else {}
                loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
                loss.backward()
                work.losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                model.state_dict()  # waits for the step
                engine = runner_of(model)._engine
                assert engine is not None
                work.moved = {
                    lane: num_bytes - before.get(lane, 0) for lane, num_bytes in engine.link_bytes().items()
                }
    finally:
        outsize.unwrap(model)
    return work


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_a_step_does_what_the_trainer_does(activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As many forwards of each block, as many operations left out of recomputes, as many bytes each way."""
    directory = save_model(zoo.build("llama"), tmp_path / "model")
    want = work_of_trainer(directory, activations, tmp_path, monkeypatch)
    got = work_of_wrap(directory, activations, monkeypatch)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-6)  # a run adds microbatches up in fp64
    assert got.forwards == want.forwards
    assert set(want.forwards.values()) == {2 if activations == "auto" else 4}
    assert got.left_out == want.left_out
    assert (want.left_out > 0) is (activations == "recompute")
    assert got.moved == want.moved


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi3", "mamba2", "gpt_oss"])
@pytest.mark.parametrize("activations", [*CHOICES, "keep-products"])
def test_what_is_kept_changes_no_bit(name: str, activations: str):
    plain, batch = zoo.build(name), zoo.batch(name, num_sequences=3)
    with wrapped(zoo.build(name), microbatches=2, slots=2, activations=activations) as model:
        for _ in range(2):  # onto the gradients that are there
            assert torch.equal(streamed_backward(model, batch), resident_backward(plain, batch, 2))
        assert_equal(gradients(model), gradients(plain))


def ops_of_forward(model: nn.Module) -> Counter[Kind]:
    runner = runner_of(model)
    assert runner._engine is not None
    kinds = [str(event.op).split()[0] for event in runner._engine.take_timeline().events]
    return Counter(Kind(kind) for kind in kinds if kind in ("F", "FK"))


def test_what_is_kept_has_room_once():
    """A second forward before the backward of the first one keeps inputs only; then there is room again."""
    plain = zoo.build("llama")
    for _ in range(2):
        plain(**BATCH).loss.backward()
    with wrapped(zoo.build("llama"), activations="keep") as model:
        first = model(**BATCH).loss
        assert set(ops_of_forward(model)) == {Kind.FORWARD_KEEP}
        second = model(**BATCH).loss
        assert set(ops_of_forward(model)) == {Kind.FORWARD}
        second.backward()
        first.backward()
        assert_equal(gradients(model), gradients(plain))
        first = model(**BATCH).loss
        assert set(ops_of_forward(model)) == {Kind.FORWARD_KEEP}
        del first, second
        gc.collect()
        model(**BATCH)
        assert Kind.FORWARD_KEEP in ops_of_forward(model)


def num_kept(plan: Plan) -> int:
    return sum(choice is not Choice.RECOMPUTE for choices in plan.layout.kept for choice in choices)


def test_a_budget_keeps_some_and_a_larger_batch_fewer_without_beginning_anew():
    """The first forward's backward comes after the second has been planned for."""
    small, large = zoo.batch("llama", num_sequences=2), zoo.batch("llama", seed=1, num_sequences=8)
    room: dict[str, Any] = {"slots": 2, "offload": False}

    def needs(activations: str) -> int:
        with wrapped(zoo.build("llama"), activations=activations, **room) as model:
            model(**large)
            plan = runner_of(model)._plan
            assert plan is not None
            return plan.total_bytes("device")

    budget = (needs("recompute") + needs("keep")) // 2
    plain = zoo.build("llama")
    for one in (large, small):
        plain(**one).loss.backward()
    with wrapped(zoo.build("llama"), device_memory=budget, **room) as model:
        runner = runner_of(model)
        first = model(**small).loss
        engine, before = runner._engine, runner._plan
        second = model(**large).loss
        assert runner._engine is engine
        assert before is not None
        assert runner._plan is not None
        assert num_kept(before) > num_kept(runner._plan) > 0
        second.backward()
        first.backward()
        assert_equal(gradients(model), gradients(plain))


def test_an_autocast_is_measured_and_its_recomputes_are_short(monkeypatch: pytest.MonkeyPatch):
    def run(activations: str) -> tuple[Work, dict[str, torch.Tensor]]:
        work = Work()
        with wrapped(zoo.build("llama"), slots=2, activations=activations) as model:
            streamed_backward(model, BATCH)
            model.zero_grad()
            with watching(model, work, monkeypatch):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**BATCH).loss
                work.restart()  # that was a trial, too
                loss.backward()
            return work, gradients(model)

    short, want = run("recompute")
    kept, got = run("keep")
    assert short.left_out > 0
    assert set(short.forwards.values()) == {1}
    assert not kept.forwards
    assert_equal(got, want)


def test_a_mask_is_measured_wherever_the_padding_is(monkeypatch: pytest.MonkeyPatch):
    """The models of transformers make none where nothing is padded, as in the first rows of this batch."""
    plain, work = zoo.build("llama"), Work()
    mask = torch.ones_like(BATCH["input_ids"])
    mask[3, -5:] = 0
    padded = {**BATCH, "attention_mask": mask}
    with wrapped(zoo.build("llama"), slots=2, activations="recompute") as model:
        streamed_backward(model, BATCH)
        resident_backward(plain, BATCH, 1)
        before = runner_of(model)._measured
        with watching(model, work, monkeypatch):
            for batch in (padded, BATCH, padded):
                model(**batch).loss.backward()
                left_out = work.left_out
                work.restart()
                streamed_backward(model, batch)
                assert work.left_out == left_out > 0
                assert set(work.forwards.values()) == {2}  # one forward, one recompute
                for _ in range(2):
                    resident_backward(plain, batch, 1)
                work.restart()
        assert_equal(gradients(model), gradients(plain))
        assert before is not None
        assert runner_of(model)._measured.held_bytes > before.held_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize("activations", CHOICES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_inside_units_see_what_was_computed(when: str, activations: str):
    """In the recompute as well, which computes everything then; they may copy, and come before the trial or after."""
    plain = zoo.build("llama")

    def watch(model: nn.Module, seen: SimpleQueue[torch.Tensor]) -> Any:
        part = model.get_submodule("model.layers.1.mlp.down_proj")
        return part.register_forward_hook(lambda module, args, output: seen.put(output.clone()))

    want: SimpleQueue[torch.Tensor] = (
        SimpleQueue()
    )  # of which a recompute takes nothing back, as it does of a list
    watch(plain, want)
    plain(**BATCH).loss.backward()
    with wrapped(zoo.build("llama"), activations=activations) as model:
        queue: SimpleQueue[torch.Tensor] = SimpleQueue()
        handle = watch(model, queue) if when == "before" else None
        streamed_backward(model, BATCH)
        handle = handle or watch(model, queue)
        while not queue.empty():
            queue.get()
        streamed_backward(model, BATCH)
        handle.remove()
    seen, expected = [queue.get() for _ in range(queue.qsize())], want.get()
    assert len(seen) == (2 if activations == "recompute" else 1)
    assert all(torch.equal(one, expected) for one in seen)


def test_what_dropout_saves_is_measured_although_evaluation_came_first():
    with wrapped(zoo.build("gpt2", dropout=0.3)) as model:
        runner = runner_of(model)
        model.eval()
        with torch.no_grad():
            model(**BATCH)
        before = runner._measured
        streamed_backward(model, BATCH)  # evaluation, too
        assert runner._measured is before
        model.train()
        streamed_backward(model, BATCH)
        assert before is not None
        assert runner._measured is not None
        assert runner._measured.saved_bytes[1] > before.saved_bytes[1]
