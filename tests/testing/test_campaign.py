"""A sample of the faults that `bench/bench_faults.py` puts at every operation."""

import random
from pathlib import Path
from unittest import mock

import pytest

from crash.campaign import Campaign, does_harm, scenario
from crash.commands import CommandCampaign
from crash.faults import Fault, Key
from crash.tellers import Stage
from outsize.cli.text.records_text import ResumedLines

POINTS = 5
# Each once broke a promise: an error that was not ours, a descriptor left open.
KNOWN = {
    "host": ("open run", "pread run/data"),
    "disk": ("unlink run/store/activations.bin", "open run/data"),
    "home": ("pread run/store/home.bin", "fdatasync run/store/home.bin"),
    "resume": ("pread run/checkpoints/latest", "pread run/data"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_fault_is_a_clear_error_or_changes_nothing(tmp_path: Path, name: str):
    campaign = scenario(name, tmp_path)
    points = [point for point in campaign.points(does_harm) if point[0].kind != "look"]
    chosen = random.Random(7).sample(points, POINTS)
    for start in KNOWN[name]:
        chosen.append(next(p for p in points if f"{p[0].kind} {p[0].path}".startswith(start)))
    verdicts = {point: campaign.judge(*point) for point in chosen}
    assert {point: verdict.problems for point, verdict in verdicts.items() if verdict.problems} == {}
    assert {verdict.outcome for verdict in verdicts.values()} <= {"equal", "refused"}


@pytest.mark.parametrize("name", ["verify", "score", "logits", "serve", "report"])
def test_a_fault_under_another_command_is_a_clear_error_or_changes_nothing(tmp_path: Path, name: str):
    campaign = CommandCampaign(name, tmp_path)
    points = [point for point in campaign.points(does_harm) if point[1] in (Fault.EIO, Fault.TORN)]
    found = {point: campaign.judge(*point).problems for point in random.Random(7).sample(points, 6)}
    assert {point: problems for point, problems in found.items() if problems} == {}


def test_lines_that_are_written_twice_after_a_fault_are_found(tmp_path: Path):
    campaign = CommandCampaign("generate", tmp_path)
    points = campaign.points(lambda operation, fault: fault is Fault.ENOSPC and operation.kind == "pwrite")
    last = [point for point in points if point[0].path == "out/texts.jsonl"][-1]
    assert campaign.judge(*last).problems == ()
    read = ResumedLines._read
    with mock.patch.object(ResumedLines, "_read", lambda lines: list(read(lines))[:0]):
        found = campaign.judge(*last).problems
    assert found == ("ends with other weights, state or losses when resumed",)


def test_a_look_that_fails_or_a_clean_up_after_a_full_disk_is_a_clear_error(tmp_path: Path):
    """Libraries remember some looks, so that not every one comes by again."""
    campaign = scenario("home", tmp_path)
    looks = [point for point in campaign.points() if point[0].kind == "look" and "run/" in point[0].path]
    wrecks = [point for point in campaign.points() if point[1] is Fault.WRECK and "home.bin" in point[0].path]
    heartbeat = Key("pwrite", "run/heartbeat.jsonl", 0, 0, 0)
    chosen = [
        *random.Random(7).sample(looks, 3),
        *random.Random(7).sample(wrecks, 2),
        (heartbeat, Fault.WRECK),
    ]
    assert {point: found for point in chosen if (found := campaign.judge(*point).problems)} == {}


def test_late_calls_and_lost_syncs_change_nothing(tmp_path: Path):
    campaign = scenario("disk", tmp_path)
    for fault, kind in ((Fault.DELAY, "lane"), (Fault.DELAY, "pwrite"), (Fault.LOST, "fsync")):
        key, _ = next(point for point in campaign.points() if point[1] is fault and point[0].kind == kind)
        verdict = campaign.judge(key, fault)
        assert (verdict.outcome, verdict.problems) == ("equal", ()), key


def test_a_bit_that_flips_in_the_home_is_noticed(tmp_path: Path):
    campaign = scenario("disk", tmp_path)
    flips = [key for key, fault in campaign.points(does_harm) if fault is Fault.FLIP]
    for key in random.Random(3).sample(flips, 4):
        verdict = campaign.judge(key, Fault.FLIP)
        assert verdict.problems == (), key
        assert verdict.outcome == "equal" or "home.bin" in verdict.error


def test_a_wrong_weight_is_found(tmp_path: Path):
    """One bit of the model that is read: nobody can know, but the campaign does."""
    campaign: Campaign = scenario("host", tmp_path)
    flips = [
        key
        for key, fault in campaign.points()
        if fault is Fault.FLIP
        and key.path.endswith("model.safetensors")
        and key.length > 1000
        and key.offset > 8
    ]
    verdict = campaign.judge(flips[0], Fault.FLIP)
    assert verdict.problems == ("ends with other weights, state or losses",)


def test_an_operation_that_does_not_come_by_is_told(tmp_path: Path):
    verdict = scenario("host", tmp_path).judge(Key("unlink", "nowhere", 0, 0, 0), Fault.EIO)
    assert (verdict.outcome, verdict.problems) == ("missed", ())


def test_lines_that_the_heartbeat_has_no_room_for_are_counted(tmp_path: Path):
    campaign = scenario("host", tmp_path)
    key = next(
        key for key, _ in campaign.points() if (key.kind, key.path) == ("pwrite", "run/heartbeat.jsonl")
    )
    for fault in (Fault.ENOSPC, Fault.TORN):
        verdict = campaign.judge(key, fault)
        assert (verdict.outcome, verdict.problems) == ("equal", ())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host: SIGHUP", "disk: SIGQUIT"])
def test_a_command_that_is_told_to_end_is_gone_on_from(tmp_path: Path, name: str):
    assert Stage(tmp_path).judge(name)[1] == []
