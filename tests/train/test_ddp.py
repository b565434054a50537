"""What plain data parallel averages with."""

import pytest
import torch

from outsize.testing.groups import ThreadWorld
from outsize.train import ddp


class AskedError(Exception):
    """Torch was asked for a process group."""


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_gpus_average_by_nccl_and_processors_by_gloo(device, backend, monkeypatch):
    chosen = []

    def init_process_group(backend, **settings):
        assert (settings["rank"], settings["world_size"]) == (1, 2)
        chosen.append(backend)
        raise AskedError

    group = ThreadWorld(2).rank(1)
    group.store, group.timeout_s = None, 1.0
    monkeypatch.setattr(ddp.dist, "init_process_group", init_process_group)
    monkeypatch.setattr(ddp.c10d, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(ddp.torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    with pytest.raises(AskedError), ddp.process_group(group, torch.device(device)):
        pass
    assert chosen == ([device, backend] if backend == "nccl" else [backend])
