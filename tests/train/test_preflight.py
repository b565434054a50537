"""What is found out before ranks train together, on ranks that are threads."""

import pytest
from forked import rank_variables

from contracts import in_ranks
from outsize.accelerators import CPU, Devices
from outsize.errors import ConfigError
from outsize.group.gloo import launched
from outsize.training import ranks
from outsize.training.ranks import check_same_start
from tiny import tiny_run


def starts(tmp_path, size=2, sections=None, variables=None, devices=CPU):
    """Return what each rank is told, whose config has the sections of its number."""
    configs = [tiny_run(tmp_path, **(sections or {}).get(rank, {})) for rank in range(size)]
    told = in_ranks(
        size,
        lambda group: check_same_start(
            configs[group.rank],
            devices,
            group,
            (variables or {}).get(group.rank, {}),
        ),
    )
    return [str(result) if isinstance(result, ConfigError) else result for result in told]


def test_ranks_that_are_alike_are_told_nothing(tmp_path):
    assert starts(tmp_path, 3) == [[], [], []]


def test_another_configuration_is_named_on_all_ranks(tmp_path):
    one, other = starts(tmp_path, sections={1: {"optimizer": {"lr": 0.5}}})
    assert one == other
    assert "config: optimizer.lr is 0.001 on rank 0, 0.5 on rank 1" in one


def test_paths_and_budgets_may_be_those_of_each_machine(tmp_path):
    own = {"memory": {"store_dir": "/mnt/nvme", "host_memory": "1GiB"}, "train": {"run_dir": "/mnt/run"}}
    assert starts(tmp_path, sections={1: own}) == [[], []]


def test_another_version_is_named(tmp_path, monkeypatch):
    versions = iter(["2.13.0", "2.12.0"])
    found = ranks.version
    monkeypatch.setattr(ranks, "version", lambda name: next(versions) if name == "torch" else found(name))
    told = starts(tmp_path)[0]
    assert "version of torch is" in told
    assert "2.12.0 on rank" in told
    assert "same packages" in told


def test_variables_are_judged(tmp_path):
    wrong = starts(tmp_path, variables={1: {"GLOO_SOCKET_IFNAME": "no-such0"}})
    assert "GLOO_SOCKET_IFNAME=no-such0, but the interfaces are" in wrong[0]
    notes = starts(tmp_path, variables={0: {"NCCL_P2P_DISABLE": "1"}})[0]
    assert notes == [
        "NCCL_P2P_DISABLE=1: no copies between GPUs without the host",
        "NCCL_P2P_DISABLE is not the same on all ranks",
    ]


def test_two_ranks_on_one_gpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_known_as", lambda name: f"node0 {name} GPU-1")
    assert (
        "ranks 0 and 1 would both use node0 cuda:0 GPU-1: leave memory.device at cuda, or"
        in starts(tmp_path, devices=Devices("cuda", (0,)))[0]
    )


def test_each_rank_of_a_machine_has_a_gpu_and_a_share_of_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ranks, "available_ram_bytes", lambda: 100 * 2**30)
    config = tiny_run(tmp_path, memory={"device": "cuda", "host_memory": None, "device_memory": None})
    memory = [ranks.own_share(config.memory, launched(rank_variables(rank, 2, 1))) for rank in range(2)]
    assert [m.device for m in memory] == ["cuda:0", "cuda:1"]
    assert memory[0].host_memory == memory[1].host_memory <= 50 * 2**30
    assert ranks.own_share(config.memory, None) is config.memory
    with pytest.raises(ConfigError, match="--nproc-per-node 2"):
        ranks.own_share(config.memory, launched(rank_variables(2, 3, 1)))
