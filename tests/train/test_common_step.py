"""Homes of several ranks on disk: a step counts when all ranks have committed it, and nobody goes on from another."""

import contextlib

import pytest
import torch

import zoo
from contracts.group_contract import ThreadWorld, in_ranks
from outsize.checkpoint.home_file import newest_home, start
from outsize.errors import LostRankError, StorageError
from outsize.session.job.machine import home_file
from outsize.session.job.prepare import prepare
from outsize.session.run_state import Position, state_of
from outsize.session.steps import LossScale
from outsize.session.stream import StreamedTrainer
from outsize.storage.committed import CommittedHome, find_records
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool
from outsize.streamed.spec import RunSpec
from support import make_batches, make_config, read_weights, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(zoo.build("llama"), tmp_path_factory.mktemp("model"))


BATCHES = make_batches("llama", 1, 4)


def ranks_of(size, model_dir, directory, home="disk", **sections):
    config = make_config(
        model_dir,
        BATCHES,
        memory={"home": home},
        train={"resume": "auto", "microbatches": 4 // size, **sections.pop("train", {})},
        **sections,
    )
    world = ThreadWorld(size)
    return world, [
        prepare(RunSpec.of(config, directory / str(r), world.rank(r)), lambda _: None) for r in range(size)
    ]


def commit(prepared, path, steps, record=None):
    """Write the number of each step into a plane, and commit it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spec, own = prepared.split.spec, prepared.own
    with Arena() as arena, IOPool(1) as pool:
        planes = prepared.plan.state.planes
        held = {"shares": own, "full_planes": prepared.whole, "record": record}
        home = CommittedHome(spec, planes, path, pool, arena=arena, **held)
        with home:
            unit = next(u for u in spec.units if own[u.index])
            part = own[unit.index]
            plane = arena.take(4 * len(part), "plane").view(torch.float32)
            for step in steps:
                home.write(unit.index, "exp_avg", part.start, plane.fill_(step))
                home.commit(
                    state_of(Position(step, 0, 0), {}, LossScale(enabled=False), prepared.config, spec.dtype)
                )
            home.read(unit.index, "exp_avg", part.start, plane)
            return float(plane[0])


def test_all_go_on_from_the_last_step_that_all_have_committed(model_dir, tmp_path):
    world, prepared = ranks_of(2, model_dir, tmp_path)
    paths = [home_file(p.config.memory, tmp_path / str(r)) for r, p in enumerate(prepared)]
    commit(prepared[0], paths[0], [1, 2, 3])
    commit(prepared[1], paths[1], [1, 2])

    def work(group):
        mine = prepared[group.rank]
        return newest_home(mine, tmp_path / str(group.rank), None, lambda _: None)

    records = in_ranks(2, work, world=world)
    assert [record.state["step"] for record in records] == [2, 2]
    # What it goes on from is what it was then, and what came after is forgotten.
    assert commit(prepared[0], paths[0], [], records[0]) == 2.0
    found, _ = find_records(paths[0], prepared[0].split.spec, None, prepared[0].own)
    assert [record.state["step"] for record in found] == [2]


def test_homes_of_another_number_of_ranks_are_not_begun_anew(model_dir, tmp_path):
    _, two = ranks_of(2, model_dir, tmp_path)
    for rank, prepared in enumerate(two):
        commit(prepared, home_file(prepared.config.memory, tmp_path / str(rank)), [1])
    world, four = ranks_of(4, model_dir, tmp_path)

    def work(group):
        return newest_home(four[group.rank], tmp_path / str(group.rank), None, lambda _: None)

    errors = in_ranks(4, work, world=world)
    # Whoever raises leaves, and who still listens to others then hears that.
    assert all(isinstance(error, StorageError | LostRankError) for error in errors)
    assert any("start as many ranks as before" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"masters": "split"}}, "the state of a run with optimizer.masters=split"),
        ({"train": {"round_microbatches": 1}}, "a rank that takes its microbatches in several rounds"),
    ],
)
def test_homes_of_the_same_ranks_that_lie_otherwise_are_named_and_not_given_up(
    sections, said, model_dir, tmp_path
):
    """A checkpoint may be far behind them."""
    halves = {"model": {"dtype": "bf16"}}
    _, former = ranks_of(2, model_dir, tmp_path, **halves, **sections)
    for rank, prepared in enumerate(former):
        commit(prepared, home_file(prepared.config.memory, tmp_path / str(rank)), [1, 2])
    world, now = ranks_of(2, model_dir, tmp_path, **halves)
    resumed = tmp_path / "checkpoints" / "step-00000001"

    def work(group):
        mine = now[group.rank]
        return newest_home(mine, tmp_path / str(group.rank), resumed, lambda _: None)

    errors = in_ranks(2, work, world=world)
    assert any("rank 0 holds" in str(e) and said in str(e) for e in errors)


def held(trainer):
    """The weights of all units, and the first moments of the own share."""
    found, own = read_weights(trainer), trainer.prepared.own
    for unit in trainer.spec.units:
        with Arena() as arena:
            size = len(own[unit.index])
            if size:
                moments = arena.take(4 * size, "plane").view(torch.float32)
                trainer.home.read(unit.index, "exp_avg", own[unit.index].start, moments)
                found[unit.index] = moments.clone()
    return found


def test_a_share_goes_on_in_host_memory(model_dir, tmp_path):
    world, on_disk = ranks_of(2, model_dir, tmp_path)

    def train(group):
        mine, directory = on_disk[group.rank], tmp_path / str(group.rank)
        path = home_file(mine.config.memory, directory)
        with StreamedTrainer(mine, path.parent, home_file=path) as trainer:
            trainer.fill()
            assert len(list(trainer.steps([BATCHES[0].share(group.rank, 2)]))) == 1
            trainer.settle()
            return held(trainer)

    trained = in_ranks(2, train, world=world)
    world, in_memory = ranks_of(2, model_dir, tmp_path, home="host")

    def go_on(group):
        mine, directory = in_memory[group.rank], tmp_path / str(group.rank)
        record = newest_home(mine, directory, None, lambda _: None)
        with contextlib.ExitStack() as stack:
            trainer = start(stack, mine, directory, record, None, lambda _: None)
            assert trainer.position.step == 1
            return held(trainer)

    for before, after in zip(trained, in_ranks(2, go_on, world=world), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
