"""What a streamed run moves: never more than its plan says, however many microbatches it has."""

import math
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
import torch

import zoo
from outsize.data.batch import IGNORED, Batch
from outsize.errors import BudgetExceededError, InfeasiblePlanError, NonFiniteError
from outsize.planner.program.program import Kind
from outsize.runtime.ops.context import Microbatch
from outsize.session.job.prepare import prepare
from outsize.session.steps import microbatches_of, schedule_of
from outsize.session.stream import StreamedTrainer
from outsize.storage.home import DiskHome
from outsize.streamed.spec import RunSpec
from support import make_batches, make_config, read_weights, save_model

MIB = 2**20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(zoo.build("llama"), tmp_path_factory.mktemp("model"))


def config_of(model_dir: Path, num_sequences: int = 8, steps: int = 3, **sections):
    return make_config(model_dir, make_batches("llama", steps, num_sequences), **sections)


def silent(line: str) -> None:
    pass


# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize(("device", "home"), [("cpu", "host"), ("cpu", "disk"), ("emulated:1", "disk")])
def test_a_step_loads_a_unit_at_most_twice_and_returns_its_gradient_once(
    count: int, device: str, home: str, model_dir: Path, tmp_path: Path
):
    memory = {"device": device, "home": home, "slots": 2}
    prepared = prepare(
        RunSpec.of(config_of(model_dir, train={"microbatches": count}, memory=memory), tmp_path), silent
    )
    program = prepared.plan.program
    kinds = Counter((op.kind, op.unit) for op in program if op.tile is None)
    # Without clipping gradients leave in tiles, each of them once.
    kinds.update((op.kind, op.unit) for op in program if op.kind is Kind.GRAD and op.tile == 0)
    for unit in prepared.split.spec.units:
        assert 1 <= kinds[Kind.LOAD, unit.index] <= 2
        assert kinds[Kind.GRAD, unit.index] == 1
        assert kinds[Kind.READ, unit.index] <= 2
        assert kinds[Kind.WRITE, unit.index] <= 1


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("device", ["cpu", "emulated:1"])
def test_disk_and_link_move_exactly_what_the_plan_says(
    device: str, count: int, dtype: str, offload: bool, model_dir: Path, tmp_path: Path
):
    config = config_of(
        model_dir,
        model={"dtype": dtype},
        train={"microbatches": count},
        memory={"device": device, "home": "disk", "slots": 2, "offload": offload},
        optimizer={"max_grad_norm": 1.0},
    )
    batches = make_batches("llama", num_sequences=8)
    prepared = prepare(RunSpec.of(config, tmp_path), silent)
    traffic = prepared.plan.traffic
    with StreamedTrainer(prepared, tmp_path) as trainer:
        trainer.fill()
        outcomes = list(trainer.steps(batches))
        assert len(outcomes) == 3
        trainer.settle()
        moved = [outcome.moved() for outcome in outcomes]
        read, written = (sum(step[way].wire for step in moved) for way in ("disk:read", "disk:write"))
        engine = trainer.engine
        up = engine.weights.bytes_up + engine.activations.bytes_up
        down = engine.gradients.bytes_down + engine.activations.bytes_down
    assert (read, written) == (3 * traffic.disk_read, 3 * traffic.disk_written)
    assert (up, down) == (3 * traffic.up, 3 * traffic.down)
    weights = sum(unit.weight_bytes(dtype) for unit in prepared.split.spec.units)
    gradients = sum(unit.gradient_bytes for unit in prepared.split.spec.units)
    if not offload:
        assert up <= 3 * 2 * weights
        assert down == 3 * gradients


def test_filling_writes_each_weight_once(model_dir: Path, tmp_path: Path):
    progress: list[tuple[int, int]] = []
    optimizer = {"masters": "separate"}
    config = config_of(model_dir, model={"dtype": "bf16"}, optimizer=optimizer, memory={"home": "disk"})
    prepared = prepare(RunSpec.of(config, tmp_path), silent)
    with StreamedTrainer(prepared, tmp_path) as trainer:
        trainer.fill(lambda done, total: progress.append((done, total)))
        total = sum(unit.numel for unit in trainer.spec.units)
        moved = cast(DiskHome, trainer.home).file.statistics()
        assert (moved.bytes_read, moved.bytes_written) == (0, total * (2 + 4))  # weights and masters
        assert progress[-1] == (total, total)
        masters = read_weights(trainer, "master")
        weights = read_weights(trainer)
    for name, parameter in zoo.build("llama").named_parameters():
        assert torch.equal(masters[name], parameter)
        assert torch.equal(weights[name], parameter.bfloat16())


# --- budgets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("offload", [False, True])
def test_the_ledger_never_holds_more_than_the_plan(home: str, offload: bool, model_dir: Path, tmp_path: Path):
    memory = {"home": home, "offload": offload, "device_memory": "40MiB"}
    prepared = prepare(RunSpec.of(config_of(model_dir, memory=memory), tmp_path), silent)
    with StreamedTrainer(prepared, tmp_path) as trainer:
        ledger = trainer.ledger
        trainer.fill()
        list(trainer.steps(make_batches("llama", num_sequences=8)))
        trainer.settle()
        for tier in ("device", "host", "disk"):
            used = ledger.statistics()[tier].high_water_bytes
            assert used <= prepared.plan.total_bytes(tier) + 64 * 4096, tier  # memory comes in pages
            assert used <= getattr(prepared.plan.budgets, tier)
    assert all(ledger.used(tier) == 0 for tier in ("device", "host", "disk"))


def test_a_budget_that_is_too_small_says_by_how_much(model_dir: Path, tmp_path: Path):
    with pytest.raises(InfeasiblePlanError) as raised:
        prepare(RunSpec.of(config_of(model_dir, memory={"device_memory": 1000}), tmp_path), silent)
    short_by = raised.value.short_by["device"]
    prepare(RunSpec.of(config_of(model_dir, memory={"device_memory": 1000 + short_by}), tmp_path), silent)
    with pytest.raises(InfeasiblePlanError):
        prepare(RunSpec.of(config_of(model_dir, memory={"device_memory": 999 + short_by}), tmp_path), silent)


def test_a_trainer_that_cannot_be_made_gives_everything_back(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prepared = prepare(RunSpec.of(config_of(model_dir, memory={"home": "disk"}), tmp_path), silent)

    def full(*_: object, **__: object) -> None:
        raise BudgetExceededError("planted")

    monkeypatch.setattr("outsize.session.session.open_device", full)
    with pytest.raises(BudgetExceededError, match="planted"):
        StreamedTrainer(prepared, tmp_path / "store")
    monkeypatch.undo()
    with StreamedTrainer(prepared, tmp_path / "store") as trainer:  # the same one works afterwards
        trainer.fill()


# --- steps --------------------------------------------------------------------------------------------------


def test_outcomes_tell_what_happened(model_dir: Path, tmp_path: Path):
    config = config_of(model_dir, optimizer={"max_grad_norm": 1.0, "warmup_steps": 1, "schedule": "linear"})
    batches = make_batches("llama", num_sequences=8)
    with StreamedTrainer(prepare(RunSpec.of(config, tmp_path), silent), tmp_path) as trainer:
        trainer.fill()
        outcomes = list(trainer.steps(batches, first=0))
    assert [outcome.number for outcome in outcomes] == [0, 1, 2]
    assert [outcome.learning_rate for outcome in outcomes] == [0.0, 1e-3, 5e-4]
    assert [outcome.tokens for outcome in outcomes] == [batch.num_target_tokens for batch in batches]
    assert all(outcome.seconds > 0 and not outcome.skipped for outcome in outcomes)
    assert all(math.isfinite(outcome.gradient_norm) for outcome in outcomes)


def test_without_clipping_there_is_no_norm(model_dir: Path, tmp_path: Path):
    with StreamedTrainer(prepare(RunSpec.of(config_of(model_dir), tmp_path), silent), tmp_path) as trainer:
        trainer.fill()
        (outcome,) = trainer.steps(make_batches("llama", 1, 8))
    assert math.isnan(outcome.gradient_norm)


def test_steps_go_on_where_others_stopped(model_dir: Path, tmp_path: Path):
    """Numbers seed dropout and set the learning rate, so 2 + 1 steps are the 3 steps."""
    batches = make_batches("llama", num_sequences=8)
    found = []
    for cuts in ((3,), (2, 1)):
        with StreamedTrainer(
            prepare(RunSpec.of(config_of(model_dir), tmp_path), silent), tmp_path
        ) as trainer:
            trainer.fill()
            first = 0
            for cut in cuts:
                list(trainer.steps(batches[first : first + cut], first))
                trainer.settle()
                first += cut
            found.append(read_weights(trainer))
    assert all(torch.equal(found[0][name], weight) for name, weight in found[1].items())


def test_what_is_written_to_a_unit_is_what_it_computes_with(model_dir: Path, tmp_path: Path):
    with StreamedTrainer(prepare(RunSpec.of(config_of(model_dir), tmp_path), silent), tmp_path) as trainer:
        trainer.fill()
        unit = trainer.spec.units[1]
        zeros = {name: torch.zeros_like(tensor) for name, tensor in trainer.read_unit(unit).items()}
        trainer.write_unit(unit, "weights", zeros)
        assert not any(tensor.any() for tensor in trainer.read_unit(unit).values())
        other = trainer.read_unit(trainer.spec.units[2])
        assert any(tensor.any() for tensor in other.values())


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_frozen_unit_that_is_larger_than_any_gradient_can_be_read(
    home: str, model_dir: Path, tmp_path: Path
):
    config = config_of(model_dir, model={"freeze": ("model.*",)}, memory={"home": home})
    with StreamedTrainer(prepare(RunSpec.of(config, tmp_path), silent), tmp_path) as trainer:
        trainer.fill()
        weights = read_weights(trainer)
    assert all(torch.equal(weights[name], p) for name, p in zoo.build("llama").named_parameters())


def poison(config, tmp_path: Path) -> StreamedTrainer:
    trainer = StreamedTrainer(prepare(RunSpec.of(config, tmp_path), silent), tmp_path)
    trainer.fill()
    unit = trainer.spec.units[2]
    weights = {name: tensor.clone() for name, tensor in trainer.read_unit(unit).items()}
    for tensor in weights.values():
        tensor.fill_(math.nan)
    trainer.write_unit(unit, "weights", weights)
    return trainer


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_nan_ends_the_run_and_the_next_one_works(max_grad_norm: float, model_dir: Path, tmp_path: Path):
    config = config_of(model_dir, optimizer={"max_grad_norm": max_grad_norm})
    with poison(config, tmp_path) as trainer, pytest.raises(NonFiniteError, match="step 1: loss nan"):
        list(trainer.steps(make_batches("llama", num_sequences=8)))
    with StreamedTrainer(prepare(RunSpec.of(config, tmp_path), silent), tmp_path) as trainer:
        trainer.fill()
        assert len(list(trainer.steps(make_batches("llama", num_sequences=8)))) == 3


def test_or_is_counted(model_dir: Path, tmp_path: Path):
    config = config_of(model_dir, train={"on_nonfinite": "skip"}, optimizer={"max_grad_norm": 1.0})
    with poison(config, tmp_path) as trainer:
        before = read_weights(trainer)
        outcomes = list(trainer.steps(make_batches("llama", num_sequences=8)))
        trainer.settle()
        after = read_weights(trainer)
    assert [outcome.skipped for outcome in outcomes] == [True] * 3
    assert all(torch.equal(after[name].nan_to_num(9.0), w.nan_to_num(9.0)) for name, w in before.items())


def test_closing_in_the_middle_of_a_step_leaves_nothing(model_dir: Path, tmp_path: Path):
    trainer = StreamedTrainer(
        prepare(RunSpec.of(config_of(model_dir, memory={"home": "disk"}), tmp_path), silent), tmp_path
    )
    trainer.fill()
    steps = trainer.steps(make_batches("llama", num_sequences=8))
    next(steps)
    trainer.close()  # its optimizer may still be under way
    trainer.close()
    steps.close()  # type: ignore[attr-defined]


# --- microbatches -------------------------------------------------------------------------------------------


def batch_with_targets(*counts: int) -> Batch:
    """Rows of 5 tokens of which the last ``count`` are targets."""
    labels = torch.full((len(counts), 5), IGNORED)
    for row, count in enumerate(counts):
        labels[row, 5 - count :] = 1
    return Batch(torch.ones(len(counts), 5, dtype=torch.long), labels)


def test_divisors_make_microbatches_add_up_to_the_mean_over_all_targets():
    parts = microbatches_of(batch_with_targets(4, 2, 0, 1), 4)
    assert all(isinstance(part, Microbatch) for part in parts)
    assert [part.divisor for part in parts] == [7 / 4, 7 / 2, math.inf, 7.0]
    assert [part.targets for part in parts] == [7] * 4
    assert sum(1 / part.divisor for part in parts) == pytest.approx(1.0)


def test_a_model_that_shifts_nothing_has_a_target_more_per_full_row():
    full = Batch(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long))
    assert [part.targets for part in microbatches_of(full, 1, shifted=True)] == [8]
    assert [part.targets for part in microbatches_of(full, 1, shifted=False)] == [10]


def test_a_batch_without_any_target_divides_by_nothing():
    parts = microbatches_of(batch_with_targets(0, 0), 2)
    assert [(part.divisor, part.targets) for part in parts] == [(math.inf, 1)] * 2


def test_masks_go_along_where_there_are_any():
    batch = batch_with_targets(1, 1)
    assert microbatches_of(batch, 1)[0].inputs.keys() == {"input_ids", "labels"}
    masked = Batch(batch.input_ids, batch.labels, torch.ones_like(batch.input_ids))
    assert microbatches_of(masked, 1)[0].inputs.keys() == {"input_ids", "labels", "attention_mask"}


def test_the_schedule_is_that_of_the_configuration(model_dir: Path):
    config = config_of(model_dir, steps=10, optimizer={"schedule": "linear", "warmup_ratio": 0.2, "lr": 1.0})
    schedule = schedule_of(config)
    assert [schedule.learning_rate(step) for step in (0, 1, 2, 6)] == [0.0, 0.5, 1.0, 0.5]
