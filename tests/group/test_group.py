"""Groups of ranks by their contract: alone, as threads, and over gloo on the loopback."""

import threading

import pytest
import torch
import torch.distributed as dist

from contracts import GroupContract, ThreadWorld, in_ranks
from outsize.errors import LostRankError
from outsize.group.gloo import GlooGroup
from outsize.group.group import SingleGroup
from patience import PATIENCE_S


def unwrapped(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class TestSingleGroup(GroupContract):
    sizes = (1,)

    def run(self, size, work):
        return [work(SingleGroup())]


class TestThreadGroup(GroupContract):
    sizes = (1, 2, 4)

    def run(self, size, work):
        return unwrapped(in_ranks(size, work))


class TestGlooGroup(GroupContract):
    """Ranks are threads of this process, each with a store client and connections of its own."""

    sizes = (1, 3)

    @pytest.fixture(autouse=True)
    def meeting_place(self, tmp_path):
        self.path, self.count = tmp_path / "store", 0

    def run(self, size, work):
        self.count += 1
        return unwrapped(over_gloo(f"{self.path}{self.count}", size, work))


def over_gloo(path, size, work):
    """Call ``work`` on threads that meet in a file."""
    results = [None] * size

    def one(rank):
        try:
            store = dist.FileStore(str(path), -1)
            with GlooGroup(store, rank, size, timeout_s=PATIENCE_S) as group:
                results[rank] = work(group)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def leaves(group):
    if group.rank == 1:
        raise ValueError("this one has had enough")
    group.all_reduce(torch.ones(1))


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_rank_that_leaves_with_an_error_is_named_by_all_others(kind, tmp_path):
    results = in_ranks(3, leaves) if kind == "threads" else over_gloo(tmp_path / "store", 3, leaves)
    assert isinstance(results.pop(1), ValueError)
    for result in results:
        assert isinstance(result, LostRankError)
        assert result.rank == 1
        assert "this one has had enough" in str(result)


def test_a_rank_that_freezes_is_named_after_the_timeout(tmp_path):
    """It neither beats nor answers, and its connections stay open: a stopped process, a dead link."""
    frozen, noticed = threading.Event(), threading.Event()

    def freezes(group):
        group.barrier()
        if group.rank == 1:
            group._liveness._stop.set()  # no heartbeat any more, and no farewell
            frozen.set()
            noticed.wait(PATIENCE_S)
            return
        assert frozen.wait(PATIENCE_S)
        group._liveness._timeout_s = 1.0  # only now: a busy machine is silent as well for a while
        try:
            group.all_reduce(torch.ones(1))
        finally:
            noticed.set()

    waiting, _ = over_gloo(tmp_path / "store", 2, freezes)
    assert isinstance(waiting, LostRankError)
    assert waiting.rank == 1
    assert "no heartbeat" in str(waiting)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    def alone(path):
        with pytest.raises(LostRankError, match="rank 1 of 2 did not come") as caught:
            GlooGroup(dist.FileStore(str(path), -1), 0, 2, timeout_s=0.3)
        assert caught.value.rank == 1

    alone(tmp_path / "store")


def test_a_start_is_not_confused_with_one_before_in_the_same_store(tmp_path):
    """What a launcher that starts ranks again keeps is the store."""
    for _ in range(3):
        assert (
            over_gloo(tmp_path / "store", 2, lambda group: group.gather_objects(group.rank)) == [[0, 1]] * 2
        )


def test_a_thread_rank_that_is_lost_ends_who_waits():
    world = ThreadWorld(2)

    def work(group):
        if group.rank == 1:
            world.lose(1)
            return
        group.barrier()

    waiting, _ = in_ranks(2, work, world=world)
    assert isinstance(waiting, LostRankError)
    assert waiting.rank == 1
