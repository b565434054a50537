"""What plain data parallel averages with, and what it clips."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outsize.config import load_config
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


@pytest.mark.parametrize(
    ("settings", "kept"),
    [([], 0.2), (["optimizer.clip=none"], 1.0), (["optimizer.max_grad_norm=0"], 1.0)],
    ids=["global", "none", "no norm"],
)
def test_gradients_are_clipped_by_the_norm_of_all_or_not_at_all(settings, kept):
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    trainer = object.__new__(ddp.DataParallelTrainer)
    config = load_config(None, ["model.path=x", "data.path=y", *settings])
    trainer._prepared = SimpleNamespace(config=config)
    trainer._replica = SimpleNamespace(parameters={"weight": weight}, updates={"weight": 0})
    trainer._optimizer = torch.optim.SGD([weight])
    assert trainer._update(1.0) == (5.0, True)
    assert weight.tolist() == pytest.approx([-3.0 * kept, -4.0 * kept], rel=1e-5)
