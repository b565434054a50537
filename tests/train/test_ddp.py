"""What plain data parallel averages with, and what it makes of a gradient."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outsize.data.batch import Batch
from outsize.optim.optimizer_spec import EXP_AVG
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.testing.group_contract import ThreadWorld
from outsize.training import ddp, replica
from outsize.training.dry_run import plan
from outsize.training.replica import ReplicaEngine, opened
from outsize.training.run import train
from tiny import tiny_run


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
    group.store, group.timeout_s = None, 1.0  # type: ignore[attr-defined]
    monkeypatch.setattr(ddp.dist, "init_process_group", init_process_group)
    monkeypatch.setattr(ddp.c10d, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(ddp.torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    with pytest.raises(AskedError), ddp.process_group(group, torch.device(device)):
        pass
    assert chosen == ([device, backend] if backend == "nccl" else [backend])


class Alone(nn.Module):
    """`DistributedDataParallel` of one rank."""

    def __init__(self, module, **settings):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)

    def no_sync(self):
        return contextlib.nullcontext()

    def register_comm_hook(self, state, hook):
        pass


def moments_after_a_step(directory, **optimizer):
    config = tiny_run(directory, optimizer=optimizer, parallel={"mode": "ddp"})
    prepared = prepare(RunSpec.of(config, directory), lambda _: None)
    ids = torch.randint(0, 200, (4, 16), generator=torch.Generator().manual_seed(0))
    cpu = torch.device("cpu")
    with opened(prepared, cpu) as replica:
        trainer = ddp.DataParallelTrainer(replica, ThreadWorld(1).rank(0), None, cpu)
        assert len(list(trainer.steps([Batch(ids, ids)]))) == 1
        for _ in replica.at_rest():
            pass
        units = [unit.index for unit in replica.spec.units if unit.trainable]
        return torch.cat([replica.home.view(unit, EXP_AVG).clone() for unit in units])


def test_nothing_is_clipped_where_nothing_is_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "DistributedDataParallel", Alone)
    clipped = moments_after_a_step(tmp_path, max_grad_norm=1e-3)
    off, none = (
        moments_after_a_step(tmp_path, **settings)
        for settings in ({"max_grad_norm": 0.0}, {"max_grad_norm": 1e-3, "clip": "none"})
    )
    assert torch.equal(off, none)
    assert clipped.norm() < 0.1 * none.norm()


class _CrashError(Exception):
    """Ends a run as a crash would."""


def test_a_replica_has_masters_apart_whatever_a_streamed_run_has_left(tmp_path):
    """A share is prepared as a run of one process is, which takes the masters of a home that lies there."""

    def crash(record):
        if record.step == 3:
            raise _CrashError

    model, resuming = {"dtype": "bf16"}, {"resume": "auto"}
    with pytest.raises(_CrashError):
        train(tiny_run(tmp_path, model=model, optimizer={"masters": "split"}), progress=crash)
    assert plan(tiny_run(tmp_path, model=model, train=resuming)).state.masters == "split"
    replicated = tiny_run(tmp_path, model=model, train=resuming, parallel={"mode": "ddp"})
    assert plan(ddp.one_share(replicated, 2)).state.plain


class OfTwo:
    """The second of two ranks that agree on everything."""

    rank, size = 1, 2

    def __init__(self):
        self.met = 0

    def gather_objects(self, value):
        return [value, value]

    def barrier(self):
        self.met += 1


def test_a_rank_that_waits_for_the_writer_of_a_checkpoint_sees_it_get_on():
    replica = SimpleNamespace(parameters={}, spec=SimpleNamespace(units=[0, 1, 2]))
    group = OfTwo()
    engine = ReplicaEngine(replica, group, torch.device("cpu"), lambda: None)
    engine.store(SimpleNamespace(step=1))
    assert (group.met, engine.num_ended) == (3, 3)


def test_an_op_that_ends_while_the_timeline_is_taken_is_in_one_timeline_alone():
    class Mark:
        asked = 0

        def query(self):
            self.asked += 1
            return self.asked > 1

    engine = ReplicaEngine(SimpleNamespace(), OfTwo(), torch.device("cpu"), lambda: None)
    engine._seconds = lambda mark: 0.0
    engine._timed.append(replica._Timed("compute:w0", "STEP", 0.0, Mark(), ""))
    taken = [engine.take_timeline(), engine.take_timeline()]
    assert [[str(event.op) for event in timeline.events] for timeline in taken] == [[], ["STEP"]]
