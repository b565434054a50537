"""The least that may be there: 1 processor, 512 MB of which little is free, nothing to write to, no /sys, no driver."""

import json
import os
import subprocess
import sys

from hardware.fake_machine import build

MIB = 2**20
FREE_BYTES = 200 * MIB
# Full sizes, whose seconds are as few as they can be.
SCRIPT = """
import json, os, resource, sys, tempfile
from dataclasses import replace
from pathlib import Path
from outsize.hardware.machine_file import readings
from outsize.probing.effort import QUICK
from outsize.probing.run_probe import probe

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
tempfile.tempdir = "/proc"  # nobody may write there, not even root
effort = replace(
    QUICK, sample_s=0.0, disk_s=0.0, copy_s=0.0, num_samples_min=1, num_copy_rounds=1,
    matmul_s=0.0, overlap_s=0.0, limit_s=1e9,
)
def most():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
before = most()
found = probe(effort, [Path("/proc")], root=Path(sys.argv[1]))
silent = [name for name, reading in readings(found) if not reading.source]
print(json.dumps({"grown": most() - before, "silent": silent, "found": found.model_dump(mode="json")}))
"""


def test_it_is_answered_and_what_could_not_be_measured_is_said(tmp_path):
    meminfo = f"MemTotal: 524288 kB\nMemAvailable: {FREE_BYTES // 1024} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    root = build(tmp_path / "root", {"proc/meminfo": meminfo})
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = told["found"]
    assert told["silent"] == []
    assert told["grown"] <= FREE_BYTES
    assert os.listdir(tmp_path) == ["root"]
    assert found["host"]["dram_triad_bytes_per_s"]["median"] > 0
    assert found["host"]["adamw_params_per_s"]["bf16"]["median"] > 0
    assert "1 threads" in found["host"]["adamw_params_per_s"]["fp32"]["source"]
    (cpu,) = found["devices"]
    assert cpu["matmul_flops_per_s"]["fp32"]["median"] > 0
    assert cpu["links"][0]["fit"] is not None
    assert "cannot create" in found["disks"][0]["depths"][0]["read_bytes_per_s"]["source"]
    assert found["data"]["loader_tokens_per_s"]["1"]["median"] is None
    assert found["data"]["tokenizer_tokens_per_s"]["1"]["median"] > 0
    assert found["inventory"]["cpu"]["model"]["status"] == "not measured"
