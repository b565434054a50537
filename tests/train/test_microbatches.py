"""Where nobody says into how many microbatches a step is cut, the planner does, and a run keeps the number."""

from pathlib import Path

import pytest
import torch

from outsize.accelerators import Devices
from outsize.config import load_config
from outsize.errors import InfeasiblePlanError
from outsize.hardware.cards import parse_gpus
from outsize.session.job.machine import assumed_machine
from outsize.session.job.planning import question_of
from outsize.session.job.prepare import Job, prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.run_dir import as_before
from outsize.training.short_runs import verify
from support import make_run

SEQUENCES, SEQ_LEN = 8, 32
DATA = {"seq_len": SEQ_LEN}
CUT = {"microbatches": None, "tokens_per_step": SEQUENCES * SEQ_LEN}
TWO = {"device": "emulated:2"}


def prepared(tmp_path: Path, **sections) -> Job:
    config = make_run(tmp_path, data=DATA, **{"train": CUT, **sections})
    return prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None)


def test_one_microbatch_where_it_fits_and_otherwise_as_few_as_fit(tmp_path):
    roomy = prepared(tmp_path)
    assert roomy.config.train.microbatches == roomy.plan.layout.num_microbatches == 1
    emulated = {"device": "emulated:1", "activations": "recompute", "slots": 1}
    whole = prepared(tmp_path, memory=emulated).plan.total_bytes("device")

    def chosen(share):
        return prepared(
            tmp_path, memory={**emulated, "device_memory": int(share * whole)}
        ).config.microbatches

    found = [chosen(share) for share in (1.0, 0.9, 0.8, 0.7)]
    assert found[0] == 1 < found[-1]
    assert found == sorted(found)
    with pytest.raises(InfeasiblePlanError) as raised:
        chosen(0.1)
    assert raised.value.short_by["device"] > 0


def test_several_workers_have_microbatches_to_hand_on(tmp_path):
    found = prepared(tmp_path, memory=TWO)
    assert found.config.microbatches == found.plan.layout.num_microbatches == SEQUENCES


def test_a_step_of_no_said_size_is_one_sequence(tmp_path):
    config = make_run(tmp_path, data=DATA, train={"microbatches": None, "tokens_per_step": None})
    assert (config.tokens_per_step, config.microbatches) == (SEQ_LEN, 1)
    assert prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None).config.microbatches == 1


def test_what_was_chosen_is_what_runs_and_what_is_written(tmp_path):
    said: list[str] = []
    config = make_run(tmp_path, data=DATA, train={**CUT, "steps": 2}, memory=TWO)
    result = train(config, announce=said.append)
    assert f"steps of {SEQUENCES} sequences are cut into {SEQUENCES} microbatches" in said
    assert load_config(Path(result.run_dir) / "config.yaml").train.microbatches == SEQUENCES
    assert verify(make_run(tmp_path / "again", data=DATA, train={**CUT, "steps": 2}, memory=TWO)).equal


def test_a_run_goes_on_with_the_number_it_had(tmp_path):
    """One device would have taken one microbatch; the run began on two."""

    def run(directory, steps, memory, resume="auto"):
        settings = {**CUT, "steps": steps, "resume": resume, "run_dir": str(tmp_path / directory)}
        return train(make_run(tmp_path, data=DATA, train=settings, memory=memory)).loss

    run("run", 1, TWO)
    elsewhere = run("other", 2, {}, str(tmp_path / "run"))
    assert run("run", 2, {}) == elsewhere == run("whole", 2, TWO)


def test_a_number_of_its_own_or_of_another_step_is_left_alone(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {path: m}\ndata: {path: d, seq_len: 32}\ntrain: {microbatches: 8}\n"
    )

    def told(**train):
        config = make_run(tmp_path / "other", data=DATA, train=train)
        return as_before(config, tmp_path, None).train.microbatches

    assert told(**CUT, resume="auto") == 8
    assert told(**{**CUT, "microbatches": 2}, resume="auto") == 2
    assert told(**CUT, resume="none") is None
    assert told(microbatches=None, tokens_per_step=4 * SEQ_LEN, resume="auto") is None


def test_each_rank_goes_on_with_the_number_that_its_memory_wanted(tmp_path):
    """Rank 1 had less of it; rank 2 was not there."""
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000001"
    (run / "rank-001").mkdir(parents=True)
    (run / "config.yaml").write_text("{model: {path: m}, data: {path: d}, train: {microbatches: 1}}")
    (run / "rank-001" / "plan.json").write_text('{"microbatches": 4}')

    def told(rank_dir, run_dir=run, resumed=None, num_ranks=2, **train):
        config = make_run(tmp_path / "other", data=DATA, train={**CUT, "resume": "auto", **train})
        return as_before(config, run_dir, resumed, rank_dir, num_ranks).train.microbatches

    assert [told(name) for name in ("", "rank-001", "rank-002")] == [1, 4, 1]
    assert told("rank-001", tmp_path / "new", checkpoint, resume=str(checkpoint)) == 4
    assert told("rank-001", num_ranks=4) is None  # eight sequences are too few for as many now
    (run / "rank-001" / "plan.json").write_text("{")
    assert told("rank-001") == 1
    (run / "config.yaml").unlink()  # of another machine, which has no such disk
    assert told("rank-001") is None


@pytest.mark.parametrize("rank_dir", ["", "rank-001"])
def test_each_rank_goes_on_with_the_rounds_that_its_home_is_laid_out_for(rank_dir, tmp_path):
    """Its home on disk holds sums of gradients where it took several; the number was the planner's."""
    run = tmp_path / "run"
    (run / "rank-001").mkdir(parents=True)
    (run / "config.yaml").write_text("{model: {path: m}, data: {path: d}, train: {microbatches: 4}}")
    (run / rank_dir / "plan.json").write_text('{"microbatches": 4, "round_microbatches": 2}')

    def told(num_ranks=2, **train):
        config = make_run(tmp_path / "other", data=DATA, train={**CUT, "resume": "auto", **train})
        return as_before(config, run, None, rank_dir, num_ranks).train.round_microbatches

    assert told() == told(microbatches=4) == 2
    assert told(microbatches=1) is None
    assert told(round_microbatches=4) == 4
    (run / rank_dir / "plan.json").write_text('{"microbatches": 4, "round_microbatches": 4}')
    assert told() == 4  # one round


def test_the_plan_of_a_run_that_goes_on_from_another_has_its_microbatches(tmp_path):
    train(make_run(tmp_path, data=DATA, train={**CUT, "microbatches": 2, "steps": 1}))
    again = {**CUT, "steps": 2, "run_dir": str(tmp_path / "again"), "resume": str(tmp_path / "run")}
    assert plan(make_run(tmp_path, data=DATA, train=again)).layout.num_microbatches == 2


def test_files_of_other_people_say_nothing_of_microbatches(tmp_path):
    """Beside a checkpoint of the Trainer a config.yaml is anybody's; one without a number is not a run's."""
    config = make_run(tmp_path, data=DATA, train={**CUT, "resume": "auto"})
    (tmp_path / "config.yaml").write_text("learning_rate: 1\n")
    assert as_before(config, tmp_path / "run", tmp_path / "out" / "checkpoint-4") == config
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{model: {path: m}, data: {path: d}}\n")
    assert as_before(config, tmp_path / "run", None) == config


def test_stages_are_cut_by_times_of_the_same_microbatch(tmp_path):
    """A recompute takes no longer than the forward, and neither is of another number of tokens."""
    found = prepared(tmp_path, memory=TWO)
    question = question_of(found)
    one, two = (question.microbatch(count).times for count in (SEQUENCES, SEQUENCES // 2))
    pairs = zip(one.recompute_s, one.forward_s, strict=True)
    assert all(0.5 * forward < again <= forward for again, forward in pairs if again)
    assert two.forward_s == pytest.approx([2 * forward for forward in one.forward_s])


def test_numbers_of_microbatches_of_several_workers_are_compared_by_what_is_counted(tmp_path, monkeypatch):
    """As long as filling and draining shows, smaller ones are taken; what they are found by is no clock's."""
    sections = {"memory": {"device": "emulated:4"}}

    def cut(sequences: int, **changes) -> int:
        train = {"microbatches": None, "tokens_per_step": sequences * 32}
        return prepared(tmp_path, **{**sections, "train": train, **changes}).config.microbatches

    monkeypatch.setattr("outsize.planner.predict.decision_search.cuts_to_try", lambda *_: [16, 32])
    found = cut(128)
    assert found in (16, 32)
    assert cut(128) == found
    monkeypatch.setattr("outsize.planner.predict.decision_search.may_shorten", lambda *_: False)
    assert cut(128) == 16


def test_gpus_without_figures_are_taken_for_usual_ones(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda index: ["NVIDIA H100 80GB HBM3", "GPU of 2030"][index]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert assumed_machine(Devices.parse("cuda:0,1")).gpus == parse_gpus("2xh100").gpus
    assert (
        assumed_machine(Devices.parse("cuda:1,0"))
        == assumed_machine(Devices.parse("emulated:2"))
        == parse_gpus("2x4090")
    )
