"""Trees of files that stand for ``/proc`` and ``/sys`` of other machines."""

from outsize.hardware.cgroup import Fact, Measurement
from outsize.hardware.gpus import take_inventory
from outsize.hardware.link_fit import fit_link
from outsize.hardware.machine_file import (
    DepthRates,
    DeviceRates,
    DiskRates,
    HostRates,
    LinkPoint,
    LinkRates,
    MachineFile,
)

SERVER = {
    "proc/cpuinfo": "".join(
        f"processor\t: {i}\nmodel name\t: Example 9000\nflags\t\t: fpu sse4_2 avx2 avx512f\n\n"
        for i in range(4)
    ),
    **{f"sys/devices/system/cpu/cpu{i}/topology/physical_package_id": f"{i % 2}\n" for i in range(4)},
    **{f"sys/devices/system/cpu/cpu{i}/topology/core_id": "7\n" for i in range(4)},
    "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
    "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n",
    "sys/devices/system/cpu/cpu0/cache/index3/level": "3\n",
    "sys/devices/system/cpu/cpu0/cache/index3/size": "96M\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       1000 kB\n",
    "sys/devices/system/node/node1/cpulist": "2-3\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       2000 kB\n",
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nSwapTotal: 1024 kB\nSwapFree: 512 kB\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-1,3\n",
    "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  65536  65536  bytes\n",
    "proc/self/mountinfo": (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 8:17 / /data\\040sets rw shared:1 - xfs /dev/sdb1 rw\n"
        "3 1 0:30 / /data rw - tmpfs tmpfs rw\n"
    ),
    "proc/sys/kernel/osrelease": "6.1.0-example\n",
}
# The group may use 2 GiB, the one above it 1 GiB: the tighter holds.
CGROUP_V2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "sys/fs/cgroup/user/memory.max": f"{2**30}\n",
    "sys/fs/cgroup/user/memory.current": f"{2**29}\n",
    "sys/fs/cgroup/user/cpu.max": "max 100000\n",
    "sys/fs/cgroup/user/job/memory.max": f"{2**31}\n",
    "sys/fs/cgroup/user/job/memory.current": f"{2**28}\n",
    "sys/fs/cgroup/user/job/cpu.max": "150000 100000\n",
}
CGROUP_V1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * 2**20}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


def build(root, *trees):
    """Write the files of ``trees`` below ``root``; the last has the say."""
    for tree in trees:
        for name, text in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


def no_nvml():
    raise ImportError("no pynvml")


def measured(*samples):
    return Measurement.of(samples, "by the test")


def link(direction, *, path="dram copy", latency_s=1e-5, bytes_per_s=1e10):
    times = {2**power: latency_s + 2**power / bytes_per_s for power in range(10, 24)}
    points = tuple(
        LinkPoint(num_bytes=size, held_out=False, copy_s=measured(seconds)) for size, seconds in times.items()
    )
    return LinkRates(path=path, direction=direction, points=points, fit=fit_link(times), note="")


def probed(root, directory, *, device="cpu", triad=2e10, matmul=1e11):
    """Return a probed machine of round numbers, its inventory that of ``root``."""
    return MachineFile(
        created_at="2026-01-01T00:00:00+00:00",
        mode="quick",
        duration_s=10.0,
        inventory=take_inventory([directory], root=root, load_nvml=no_nvml),
        host=HostRates(
            dram_copy_bytes_per_s=measured(1.9e10),
            dram_triad_bytes_per_s=measured(triad * 0.98, triad, triad * 1.02),
            adamw_params_per_s={"fp32": measured(1e9), "bf16": measured(8e8)},
        ),
        disks=(
            DiskRates(
                directory=str(directory),
                direct=Fact.read(True, "by the test"),
                request_bytes=2**22,
                depths=(
                    DepthRates(
                        queue_depth=1, read_bytes_per_s=measured(1e9), write_bytes_per_s=measured(3e9)
                    ),
                    DepthRates(
                        queue_depth=4, read_bytes_per_s=measured(2e9), write_bytes_per_s=measured(2.5e9)
                    ),
                ),
            ),
        ),
        devices=(
            DeviceRates(
                device=device,
                name="Example",
                num_sms=Fact.read(None, "a CPU has none"),
                memory_bytes=Fact.read(2**33, "by the test"),
                memory_triad_bytes_per_s=measured(triad),
                matmul_flops_per_s={"fp32": measured(matmul), "bf16": Measurement.absent("not supported")},
                attention_flops_per_s={"fp32": measured(5e10)},
                links=(link("up"), link("down", bytes_per_s=8e9), link("both", bytes_per_s=5e9)),
            ),
        ),
    )
