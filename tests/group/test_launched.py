import pytest
from forked import free_port, rank_variables
from torch.distributed import TCPStore

from outsize.errors import ConfigError, LostRankError
from outsize.group.gloo import launched, open_group
from outsize.group.group import SingleGroup


@pytest.fixture(scope="module", autouse=True)
def libuv():
    """Start what torch's store starts once for a process: libuv keeps a pipe for signals."""
    TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


def test_a_process_on_its_own_was_not_launched():
    assert launched({}) is None
    assert launched({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}) is None
    assert launched({"WORLD_SIZE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}) is None
    assert isinstance(open_group(None, timeout_s=1), SingleGroup)
    assert isinstance(open_group(launched(rank_variables(0, 1, 29500)), timeout_s=1), SingleGroup)


def test_what_torchrun_says():
    place = launched({**rank_variables(3, 8, 29500, restarts=1), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (place.rank, place.size, place.local_rank, place.num_nodes) == (3, 8, 1, 4)
    assert place.describe() == "rank 3 of 8 on 4 nodes, at 127.0.0.1:29500, restarted 1 times"


def test_half_a_launch_is_a_mistake():
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT are not"):
        launched({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK='one' is no whole number"):
        launched({**rank_variables(0, 2, 1), "RANK": "one"})
    with pytest.raises(ConfigError, match="numbered from 0"):
        launched(rank_variables(2, 2, 1))


def test_a_meeting_place_that_nobody_holds_is_told():
    with pytest.raises(LostRankError, match="rank 1 cannot reach") as caught:
        open_group(launched(rank_variables(1, 2, free_port())), timeout_s=0.5, variables={})
    assert caught.value.rank == 0


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(LostRankError, match="rank 1 of 2 did not come"):
        open_group(launched(rank_variables(0, 2, free_port())), timeout_s=0.3, variables={})
