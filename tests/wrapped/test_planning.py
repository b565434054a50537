"""What a plan of a wrapped model has room for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import outsize
import zoo
from outsize.errors import BudgetExceededError, ConfigError
from outsize.model.walk import Modes
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.predict import question
from outsize.planner.program.stages import Choice
from outsize.runtime.device.heap import ResidentLimit
from outsize.session import session
from outsize.session.job import demand, machine
from outsize.wrapped.module import runner_of
from outsize.wrapped.wrap_planning import BatchShape, held_copies, shape_of
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

BATCH = zoo.batch("llama", num_sequences=4)


def test_room_for_a_loss_of_one_s_own_will_do_for_that_of_the_model():
    ids = BATCH["input_ids"]
    own, scored = (shape_of(ids, 4, inputs, Modes(), True) for inputs in ({"input_ids": ids}, BATCH))
    assert not own.scored
    assert scored.scored
    assert own.covers(scored)
    assert not scored.covers(own)
    assert BatchShape(4, 12, scored=True).covers(BatchShape(2, 12, scored=True))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_outputs_held_between_forward_and_backward(count: int):
    """Of one microbatch they are in the workspace of the head, as in a step of the trainer."""
    assert held_copies(count, count, scored=True, in_fp32=True) == 2 * (count - 1)
    assert held_copies(count, count, scored=True, in_fp32=False) == 3 * (count - 1)
    assert held_copies(count, 1, scored=True, in_fp32=False) == count - 1
    assert held_copies(count, 1, scored=False, in_fp32=True) == 3 * count


def test_a_call_without_labels_is_planned_with_more_room():
    with wrapped(zoo.build("llama"), microbatches=2) as model:
        taken = []
        for inputs in (BATCH, {"input_ids": BATCH["input_ids"]}, BATCH):
            model(**inputs)
            taken.append(runner_of(model)._plan.memory["device"]["shared"])  # type: ignore[union-attr]
        assert taken[0] < taken[1] == taken[2]


def test_a_budget_that_is_too_small_to_keep_all_keeps_what_is_dear(monkeypatch: pytest.MonkeyPatch):
    """What products returned, as in a run; the rest is made again, and no bit changes."""
    monkeypatch.setattr(question, "LEAST_SELECTED_S", 0.0)
    monkeypatch.setattr(demand, "FLOPS_PER_BYTE", 0.0)
    room = {"slots": 2, "offload": False, "microbatches": 2}

    def needs(activations: str) -> int:
        with wrapped(zoo.build("llama"), activations=activations, **room) as model:
            model(**BATCH)
            plan = runner_of(model)._plan
            assert plan is not None
            return plan.total_bytes("device")

    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), device_memory=needs("keep-products"), **room) as model:
        for _ in range(2):  # onto the gradients that are there
            assert torch.equal(streamed_backward(model, BATCH), resident_backward(plain, BATCH, 2))
        assert_equal(gradients(model), gradients(plain))
        plan = runner_of(model)._plan
        assert plan is not None
        kept = {choice for choices in plan.layout.kept for choice in choices}
        assert Choice.KEEP_PRODUCTS in kept
        assert plan.state == StateLayout(dtype="fp32")


def test_free_memory_goes_back_where_a_cpu_is_over_its_budget(monkeypatch: pytest.MonkeyPatch):
    """What is there already belongs to the caller, and counts to no budget."""
    limits: list[tuple[int, ...]] = []
    looks = []

    class Watched(ResidentLimit):
        def __init__(self, *given: int) -> None:
            super().__init__(*given)
            limits.append(given)

        def keep(self) -> None:
            looks.append(1)
            super().keep()

    monkeypatch.setattr(session, "ResidentLimit", Watched)
    with wrapped(zoo.build("llama"), device_memory="64MiB") as model:
        streamed_backward(model, BATCH)
        ((before, budget, host),) = limits
        assert before > 0
        assert budget == 64 * 2**20
        assert host == runner_of(model)._plan.total_bytes("host")  # type: ignore[union-attr]
        assert len(looks) > 20  # at every tensor that a forward saves or a backward uses
    with wrapped(zoo.build("llama"), device="emulated:1") as model:
        streamed_backward(model, BATCH)
    assert len(limits) == 1


def test_a_home_that_does_not_fit_says_what_would():
    model = zoo.build("llama")
    with pytest.raises(
        BudgetExceededError, match=r'rest at home: wrap with home="disk", or a larger host_memory'
    ):
        outsize.wrap(model, **{**ROOM, "host_memory": 2**14}, home="host")
    with pytest.raises(BudgetExceededError, match=r"wrap with a larger disk_memory"):
        outsize.wrap(model, **{**ROOM, "disk_memory": 2**14}, home="disk")


def test_a_store_in_no_directory_is_refused_and_one_in_memory_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match=r"store_dir=.*there is no directory .*/typo; make it"):
        outsize.wrap(zoo.build("llama"), **ROOM, home="disk", store_dir=tmp_path / "typo" / "store")
    assert not (tmp_path / "typo").exists()
    kinds = iter(["tmpfs", "ext4"])
    seen = SimpleNamespace(file_system=SimpleNamespace(value=None))
    monkeypatch.setattr(machine, "read_disk", lambda *given: seen)
    for seen.file_system.value in kinds:
        with wrapped(zoo.build("llama"), home="disk", store_dir=tmp_path / "store"):
            pass
    assert caplog.text.count("/store is tmpfs, whose files take RAM") == 1
    assert len(caplog.records) == 1
