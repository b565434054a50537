"""Two processes that share their steps, over gloo: as one process would train, whatever ends one of them."""

import json

import pytest
import torch

from outsize.telemetry.run_reading import Line
from outsize.training.run import train
from train.rank_runs import SAVED, STEPS, beats, config_of, losses, state, told

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def alone(rank_runs, tmp_path_factory):
    """A single process with the same batches, in as many microbatches as the ranks have together."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train(config_of(rank_runs[0], run_dir, train={"microbatches": 4}))
    return run_dir


def test_two_ranks_train_what_one_process_trains(rank_runs, alone):
    root, codes = rank_runs
    assert codes["host"] == [0, 0], told(root, "host", 0) + told(root, "host", 1)
    assert losses(root / "host") == pytest.approx(losses(alone), rel=1e-5)
    assert losses(root / "host" / "rank-001") == losses(root / "host")
    predicted = [
        json.loads((own / "prediction.json").read_text())
        for own in (root / "host", root / "host" / "rank-001")
    ]
    assert all(found["predicted_step_s"] > 0 for found in predicted)
    ours, single = state(root / "host"), state(alone)
    assert ours.keys() == single.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize(("name", "whole"), [("lost", "coded"), ("disk", "host")])
def test_a_killed_rank_ends_the_other_and_both_go_on_from_what_both_have(name, whole, rank_runs):
    """From a checkpoint, or from the last step that both have committed, and bit for bit to the same end.

    They were killed in a second round, and what they are compared with has taken one round.
    """
    root, codes = rank_runs
    assert codes[name] == [2, -9], told(root, name, 0)
    assert "rank 1" in told(root, name, 0)
    again = f"{name} again"
    assert codes[again] == [0, 0], told(root, again, 0) + told(root, again, 1)
    assert "resumed from step" in told(root, again, 0)
    assert losses(root / name) == losses(root / whole)
    expected, found = state(root / whole), state(root / name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["host", "disk"])
def test_each_line_holds_the_bytes_that_the_plan_says(name, rank_runs):
    """Of the run on disk only what was trained after it was started again."""
    root, _ = rank_runs
    for own in (root / name, root / name / "rank-001"):
        planned = json.loads((own / "plan.json").read_text())["bytes_per_step"]
        for beat in beats(own)[0 if name == "host" else 3 :]:
            found = {"up": beat["bytes_up"], "down": beat["bytes_down"]}
            found |= {"disk_read": beat["bytes_read"], "disk_written": beat["bytes_written"]}
            assert found == {key: planned[key] for key in found}, (own, beat["step"])


def test_fewer_bytes_on_the_wire_train_nearly_the_same(rank_runs):
    root, codes = rank_runs
    assert codes["coded"] == [0, 0], told(root, "coded", 0)
    assert losses(root / "coded") == pytest.approx(losses(root / "host"), rel=1e-3)
    beat = json.loads((root / "coded" / "heartbeat.jsonl").read_text().splitlines()[-1])
    assert beat["logical_bytes"]["net:reduce"] >= 3.5 * beat["wire_bytes"]["net:reduce"]


def test_rank_0_speaks_and_each_has_a_heartbeat(rank_runs):
    root, _ = rank_runs
    result = json.loads(told(root, "host", 0).splitlines()[-1])
    assert result["steps"] == STEPS
    assert "step 1" not in told(root, "host", 1)
    assert "rank 1 of 2" in (root / "host" / "rank-001" / "log.txt").read_text()


def test_one_process_goes_on_from_a_checkpoint_of_two(rank_runs, tmp_path):
    root, _ = rank_runs
    resumed = root / "host" / "checkpoints" / f"step-{SAVED:08}"
    train(config_of(root, tmp_path, train={"microbatches": 4, "resume": str(resumed)}))
    expected = {step: loss for step, loss in losses(root / "host").items() if step > SAVED}
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(rank_runs):
    """One that was due after the last step failed before; that is told, and is not taken for saved."""
    root, codes = rank_runs
    assert codes["full"] == [2, 2], told(root, "full", 0)
    assert "No space left on device; free some space" in told(root, "full", 0)
    assert "the run goes on, there is no checkpoint yet" in told(root, "full", 0)
    assert "outsize (rank 0): StorageError: " in told(root, "full", 0)


def test_each_rank_tells_what_it_moved_and_what_it_waited_for(rank_runs):
    root, _ = rank_runs
    for own in (root / "host", root / "host" / "rank-001"):
        for beat in beats(own):
            Line.model_validate_json(json.dumps(beat))
            assert beat["wire_bytes"]["net:reduce"] == beat["logical_bytes"]["net:reduce"] > 10_000
            assert beat["busy_s"]["compute:w0"] > 0
            assert beat["busy_s"]["net:reduce"] > 0
            if booked := beat["waits_s"].get("compute:w0"):
                waited_s = sum(seconds for owners in booked.values() for seconds in owners.values())
                assert waited_s == pytest.approx(beat["idle_s"]["compute:w0"], rel=0.02)
        assert any("ranks" in beat["waits_s"].get("compute:w0", {}) for beat in beats(own))
        assert json.loads((own / "timeline.json").read_text())["traceEvents"]


def test_all_ranks_say_why_a_run_cannot_start(rank_runs):
    """Rank 0 finds a run in the directory; the others do not wait for it."""
    root, codes = rank_runs
    assert codes["refused"] == [2, 2]
    assert "holds a run already" in told(root, "refused", 0)
    assert "rank 0 has ended: ConfigError" in told(root, "refused", 1)
