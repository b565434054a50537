from pathlib import Path
from types import SimpleNamespace

import pytest

from hardware.fake_machine import CGROUP_V1, CGROUP_V2, SERVER, build, no_nvml
from outsize.hardware.gpus import in_order_of, read_gpus, read_link_under_load, take_inventory
from outsize.hardware.host_memory import read_disk
from outsize.hardware.machine_file import readings


def inventory(root, *directories):
    return take_inventory(directories, root=root, load_nvml=no_nvml)


def test_a_server_is_read_from_proc_and_sys(tmp_path):
    found = inventory(build(tmp_path, SERVER))
    cpu, memory = found.cpu, found.memory
    assert cpu.model.value == "Example 9000"
    assert cpu.num_physical_cores.value == 2  # four hyper-threads: two sockets, core 7 of each
    assert cpu.num_usable_cpus.value == 3
    assert cpu.simd.value == "sse4_2 avx2 avx512f"
    assert cpu.last_level_cache_bytes.value == 96 * 2**20
    assert [(node.cpus.value, node.memory_bytes.value) for node in cpu.numa_nodes] == [
        ("0-1", 1024000),
        ("2-3", 2048000),
    ]
    assert memory.total_bytes.value == 2**33
    assert (memory.swap_total_bytes.value, memory.swap_free_bytes.value) == (2**20, 2**19)
    assert memory.memlock_limit_bytes.value == 65536
    assert found.environment.kernel.value == "6.1.0-example"


def test_what_the_doctor_asks_for_is_read(tmp_path):
    clock = "sys/devices/system/cpu/cpu0/cpufreq"
    tree = {
        "proc/loadavg": "0.75 0.50 0.25 2/99 1234\n",
        "proc/pressure/memory": "some avg10=9.00 avg60=12.50 avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00\n",
        "proc/cmdline": "root=/dev/sda1 intel_iommu=on quiet\n",
        "sys/class/iommu/dmar0": "",
        f"{clock}/scaling_driver": "acpi-cpufreq\n",
        f"{clock}/scaling_governor": "powersave\n",
        f"{clock}/scaling_min_freq": "800000\n",
        f"{clock}/scaling_max_freq": "2000000\n",
        f"{clock}/cpuinfo_max_freq": "4000000\n",
    }
    told = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "HOME": "/home/someone", "EXAMPLE_TOKEN": "x"}
    found = take_inventory([], root=build(tmp_path, SERVER, tree), load_nvml=no_nvml, variables=told)
    cpu = found.cpu
    assert (cpu.usable_cpus.value, cpu.load_average.value) == ("0-1,3", 0.75)
    assert cpu.clock_governor.value == "acpi-cpufreq powersave"
    assert (cpu.clock_floor_hz.value, cpu.clock_limit_hz.value, cpu.clock_max_hz.value) == (8e8, 2e9, 4e9)
    assert found.memory.pressure_share.value == 0.125
    assert found.environment.iommu.value == "dmar0 intel_iommu=on"
    assert {name: fact.value for name, fact in found.environment.variables.items()} == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
    }


def test_without_any_source_everything_says_why(tmp_path):
    found = inventory(tmp_path, tmp_path / "absent")
    told = dict(readings(found))
    for name in ("cpu.model", "cpu.num_physical_cores", "memory.total_bytes", "memory.memlock_limit_bytes"):
        assert told[name].status == "not measured"
        assert "no such file" in told[name].source
    assert told["memory.cgroup_limit_bytes"].status == "not measured"
    assert told["disks.0.free_bytes"].value is None
    assert "nvidia-ml-py is not installed" in found.num_gpus.source
    assert found.memory.usable_bytes() is None
    assert all(reading.source for reading in told.values())


@pytest.mark.parametrize(
    "tree",
    [
        {"proc/cpuinfo": "", "proc/meminfo": "", "proc/self/limits": "", "proc/self/cgroup": "nonsense\n"},
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cgroup.controllers": "",
            "sys/fs/cgroup/memory.max": "?",
        },
        {"proc/self/mountinfo": "garbage\n", "sys/devices/system/cpu/cpu0/cache/index0/size": "big\n"},
        {"proc/meminfo": "MemTotal: many kB\n", "sys/devices/system/node/node0/cpulist": "0\n"},
    ],
)
def test_files_that_say_something_else_are_no_crash(tmp_path, tree):
    found = inventory(build(tmp_path, tree), tmp_path)
    assert found.memory.total_bytes.status == "not measured"
    assert found.memory.cgroup_limit_bytes.status == "not measured"


def test_the_tightest_limit_on_the_way_up_holds(tmp_path):
    found = inventory(build(tmp_path, SERVER, CGROUP_V2))
    assert found.memory.cgroup_limit_bytes.value == 2**30
    assert found.memory.usable_bytes() == 2**30
    assert found.memory.free_bytes() == 2**30 - 2**29
    assert found.cpu.quota_cores.value == 1.5


def test_version_1_in_a_container_shows_only_its_top(tmp_path):
    found = inventory(build(tmp_path, SERVER, CGROUP_V1))
    assert found.memory.cgroup_limit_bytes.value == 512 * 2**20
    assert found.cpu.quota_cores.value == 0.5
    assert found.environment.container.value == "docker"


def test_no_limit_is_a_report_and_not_a_gap(tmp_path):
    tree = {
        "proc/self/cgroup": "4:memory:/\n2:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "proc/self/limits": "Max locked memory  unlimited unlimited bytes\n",
    }
    found = inventory(build(tmp_path, SERVER, tree))
    for fact in (found.memory.cgroup_limit_bytes, found.cpu.quota_cores, found.memory.memlock_limit_bytes):
        assert (fact.value, fact.status) == (None, "reported")


def test_cores_come_from_cpuinfo_where_sys_is_hidden(tmp_path):
    block = "physical id : 0\ncore id : {}\n\n"
    build(tmp_path, {"proc/cpuinfo": "".join(block.format(core) for core in (0, 0, 1, 1))})
    assert inventory(tmp_path).cpu.num_physical_cores.value == 2


def test_the_innermost_mount_and_its_drive(tmp_path):
    root = build(tmp_path, SERVER)
    drive = build(root / "sys/devices/sdb", {"queue/rotational": "0\n", "device/model": "Fast One\n"})
    (drive / "sdb1").mkdir()
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/8:17").symlink_to(drive / "sdb1")
    found = read_disk(Path("/data sets/x"), root)
    assert (found.file_system.value, found.device.value) == ("xfs", "/dev/sdb1")
    assert (found.model.value, found.rotational.value) == ("Fast One", False)
    assert read_disk(Path("/data/x"), root).file_system.value == "tmpfs"
    assert read_disk(Path("/database"), root).file_system.value == "ext4"


class NvmlError(Exception):
    pass


def fake_nvml(**replaced):
    def refuse(*_):
        raise NvmlError("Not Supported")

    functions = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlSystemGetDriverVersion": lambda: "555.1",
        "nvmlDeviceGetName": lambda _: b"Example GPU",
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=2**34, free=2**33),
        "nvmlDeviceGetCurrPcieLinkGeneration": refuse,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
    }
    return SimpleNamespace(**functions | replaced)


def test_what_a_driver_does_not_say_leaves_the_rest():
    (gpu,), count = read_gpus(fake_nvml)
    assert count.value == 1
    assert (gpu.name.value, gpu.capability.value, gpu.driver.value) == ("Example GPU", "9.0", "555.1")
    assert (gpu.memory_total_bytes.value, gpu.memory_free_bytes.value) == (2**34, 2**33)
    assert (gpu.pcie_lanes.value, gpu.pcie_lanes_max.value) == (8, 16)
    assert "Not Supported" in gpu.pcie_generation.source
    assert gpu.numa_node.status == "not measured"  # the module has no such function


def test_where_a_gpu_hangs_and_what_limits_it(tmp_path):
    place = tmp_path / "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    place.mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0").symlink_to(place)
    nvml = fake_nvml(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetPciInfo=lambda index: SimpleNamespace(busId=f"00000000:0{index + 1}:00.0".encode()),
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 345}[kind],
        nvmlDeviceGetMaxClockInfo=lambda _, kind: {1: 1980}[kind],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda index: (0x1, 0x1 | 0x4 | 0x40)[index],
        nvmlDeviceGetP2PStatus=lambda one, other, kind: {(0, 1, 0): 0, (0, 1, 2): 0}.get(
            (one, other, kind), 5
        ),
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: 20,
        nvmlDeviceGetNvLinkState=lambda index, link: int(index == 0 and link < 4),
    )
    (first, second), _ = read_gpus(lambda: nvml, tmp_path)
    assert first.pci_path.value == "pci0000:00/0000:00:01.0/0000:01:00.0"
    assert second.pci_path.status == "not measured"  # /sys does not show it
    assert (first.sm_clock_hz.value, first.sm_clock_max_hz.value) == (345 * 10**6, 1980 * 10**6)
    assert (first.clock_limits.value, second.clock_limits.value) == (
        "",
        "power cap, hardware thermal slowdown",
    )
    assert (first.peers["1"].value, second.peers["0"].value) == ("ok", "not supported")
    assert (first.peer_nvlinks["1"].value, second.peer_nvlinks["0"].value) == ("ok", "not supported")
    assert first.ancestors["1"].value == "several bridges"
    assert (first.num_nvlinks.value, second.num_nvlinks.value) == (4, 0)


def test_the_link_is_read_while_it_works():
    nvml = fake_nvml(
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1": 1}[uuid],
        nvmlDeviceGetCurrPcieLinkGeneration=lambda handle: {1: 4}[handle],
    )
    generation, lanes = read_link_under_load(lambda: nvml, "GPU-1")
    assert (generation.value, lanes.value) == (4, 8)
    assert "during copies" in generation.source
    for broken in (no_nvml, fake_nvml):  # no module; a driver that does not say
        assert read_link_under_load(broken, "GPU-1")[0].status == "not measured"


def test_a_library_without_a_driver_is_told():
    def refuse():
        raise NvmlError("Driver Not Loaded")

    assert read_gpus(lambda: fake_nvml(nvmlInit=refuse))[1].source == "NVML: Driver Not Loaded"


def test_gpus_stand_in_the_order_in_which_torch_counts_them():
    """NVML counts by the bus and all there are; torch by speed, and what CUDA_VISIBLE_DEVICES lets it see."""
    statuses = {(0, 1): 0, (0, 2): 1, (1, 2): 2}
    nvml = fake_nvml(
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetP2PStatus=lambda one, other, kind: statuses[min(one, other), max(one, other)],
    )
    found, _ = read_gpus(lambda: nvml)
    first, second, third = in_order_of(found, ["GPU-2", "GPU-0"])
    assert [gpu.uuid.value for gpu in (first, second, third)] == ["GPU-2", "GPU-0", "GPU-1"]
    assert first.peers == {"1": found[2].peers["0"], "2": found[2].peers["1"]}
    assert second.peers == {"0": found[0].peers["2"], "2": found[0].peers["1"]}
    assert in_order_of(found, ["GPU-of-another-driver"]) == found
