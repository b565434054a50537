"""Plain data parallel in two processes: as one process would train, and what becomes of them when one is lost."""

import json

import pytest
import torch

from outsize.telemetry.run_reading import Line
from outsize.training.run import train
from train.rank_runs import SAVED, STEPS, beats, config_of, losses, state, told

pytestmark = pytest.mark.xdist_group("ranks")


def test_two_ranks_train_what_one_process_trains(rank_runs, tmp_path):
    root, codes = rank_runs
    assert codes["whole"] == [0, 0], told(root, "whole", 0)
    train(config_of(root, tmp_path / "alone", train={"microbatches": 2}))
    found, expected = losses(root / "whole"), losses(tmp_path / "alone")
    assert found == pytest.approx(expected, rel=1e-6)
    ours, single = state(root / "whole"), state(tmp_path / "alone")
    assert ours.keys() == single.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_rank_0_speaks_and_each_has_a_heartbeat(rank_runs):
    root, _ = rank_runs
    result = json.loads(told(root, "whole", 0).splitlines()[-1])
    assert result["steps"] == STEPS
    assert "step 1" not in told(root, "whole", 1)
    assert "rank 1 of 2" in (root / "whole" / "rank-001" / "log.txt").read_text()
    assert losses(root / "whole") == losses(root / "whole" / "rank-001")


def test_a_killed_rank_ends_the_other_by_name(rank_runs):
    root, codes = rank_runs
    assert codes["killed"] == [2, -9]
    assert "outsize (rank 0): LostRankError: rank 1 is lost" in told(root, "killed", 0)


def test_ranks_that_are_started_again_go_on_from_what_all_had_saved(rank_runs):
    """Bit for bit as if nothing had been: the same number of ranks adds in the same order."""
    root, codes = rank_runs
    assert codes["again"] == [0, 0], told(root, "again", 0)
    assert f"resumed from step-{SAVED:08}" in told(root, "again", 0)
    assert losses(root / "killed") == losses(root / "whole")
    ours, whole = state(root / "killed"), state(root / "whole")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_one_process_goes_on_from_a_checkpoint_of_two(rank_runs, tmp_path):
    root, _ = rank_runs
    resumed = root / "whole" / "checkpoints" / f"step-{SAVED:08}"
    train(config_of(root, tmp_path, train={"microbatches": 2, "resume": str(resumed)}))
    expected = {step: loss for step, loss in losses(root / "whole").items() if step > SAVED}
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["full", "full stream"])
def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(name, rank_runs):
    """One that was due after the last step failed before; that is told, and is not taken for saved."""
    root, codes = rank_runs
    assert codes[name] == [2, 2], told(root, name, 0)
    assert "No space left on device; free some space" in told(root, name, 0)
    assert "the run goes on, there is no checkpoint yet" in told(root, name, 0)
    assert "outsize (rank 0): StorageError: " in told(root, name, 0)


def test_each_rank_tells_what_it_moved_and_what_it_waited_for(rank_runs):
    root, _ = rank_runs
    for own in (root / "whole", root / "whole" / "rank-001"):
        for beat in beats(own):
            Line.model_validate_json(json.dumps(beat))
            # A ring of two sends a gradient once: half of it twice.
            assert beat["wire_bytes"]["net:reduce"] == beat["logical_bytes"]["net:reduce"] > 4 * 10_000
            assert beat["busy_s"]["compute:w0"] > 0
            assert beat["busy_s"]["net:reduce"] > 0
            if booked := beat["waits_s"].get("compute:w0"):
                assert booked["ranks"]["net:reduce"] > 0
                waited_s = sum(seconds for owners in booked.values() for seconds in owners.values())
                assert waited_s == pytest.approx(beat["idle_s"]["compute:w0"], rel=0.02)
        assert any(beat["waits_s"] for beat in beats(own))
        assert json.loads((own / "timeline.json").read_text())["traceEvents"]
    result = json.loads(told(root, "whole", 0).splitlines()[-1])
    assert result["stall_share"] > 0
    assert result["stall_owner"] in ("net:reduce", "dispatch")
    halved = beats(root / "fp16")[-1]
    assert halved["logical_bytes"]["net:reduce"] == 2 * halved["wire_bytes"]["net:reduce"]


def test_other_settings_train_nearly_the_same(rank_runs):
    """Gradients as fp16, in several buckets, of a static graph, over microbatches of which only the last sends."""
    root, codes = rank_runs
    assert codes["fp16"] == [0, 0], told(root, "fp16", 0)
    compressed, exact = losses(root / "fp16"), losses(root / "whole")
    assert compressed != exact
    assert compressed == pytest.approx(exact, rel=1e-3)


def test_all_ranks_say_why_a_run_cannot_start(rank_runs):
    """Rank 0 finds a run in the directory; the others do not wait for it."""
    root, codes = rank_runs
    assert codes["refused"] == [2, 2]
    assert "holds a run already" in told(root, "refused", 0)
    assert "rank 0 has ended: ConfigError" in told(root, "refused", 1)
