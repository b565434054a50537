import time
from pathlib import Path

from doctor.records import host
from outsize.data.packed_dataset import PackedDataset
from outsize.doctor.examine import examine
from outsize.doctor.run_record import Facts, read_run
from outsize.telemetry.counters import HostSampler
from outsize.telemetry.run_reading import HostSample
from outsize.training.run import train
from tiny import tiny_run


def test_a_run_with_a_slow_loader_is_told_as_such(tmp_path, monkeypatch):
    """Its heartbeat books the wait on a lane that had nothing to do."""
    made = PackedDataset.batch

    def slowly(self, *arguments):
        time.sleep(0.3)
        return made(self, *arguments)

    monkeypatch.setattr(PackedDataset, "batch", slowly)
    monkeypatch.setattr(HostSampler, "sample", lambda _: HostSample(**host()))  # whatever else runs here
    # Two batches are made ahead, so the first steps hardly wait.
    settings = {"steps": 7, "tokens_per_step": 64, "microbatches": 2, "run_dir": str(tmp_path / "run")}
    result = train(tiny_run(tmp_path, train=settings, memory={"home": "disk"}))
    recorded = read_run(Path(result.run_dir))
    report = examine(Facts(recorded=recorded))
    # What else it finds, and which of them costs more, is the machine's affair: a busy one computes slowly too.
    found = {finding.id: finding for finding in report.findings}
    assert found["loader-bound"].gain_share == recorded.waits()["data"] > 0
    assert sum(recorded.waits().values()) <= 1.0 + 1e-6
