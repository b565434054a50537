"""Runs of several processes, all of them made once for the tests of them.

All are forked from one script, since importing torch takes longer than they do, and in two chains: who waits for a rank
that is lost leaves the cores to others.
"""

import pytest

from train.rank_runs import STEPS, run_all, scenario, write_run


@pytest.fixture(scope="session")
def rank_runs(tmp_path_factory):
    """Run everything; returns the directory and the exit codes by name."""
    root = tmp_path_factory.mktemp("ranks")
    two = {"microbatches": 2}
    host = write_run(root, "host", train=two)
    coded = {"gradients": "int8-stochastic"}  # whose chances repeat
    rounds = {**two, "round_microbatches": 1}
    lost = write_run(root, "lost", train=rounds, parallel=coded)
    disk = write_run(root, "disk", train=rounds, memory={"home": "disk"})
    at_the_end = {"save_every": STEPS}
    killed = [
        # A checkpoint is written beside the steps that follow: by then that of the second is complete.
        scenario("lost", lost, kill=[1, STEPS], summing=True),
        scenario("lost again", lost, restarts=1),
        scenario("disk", disk, kill=[1, 4], summing=True),
        scenario("disk again", disk, restarts=1),
    ]
    whole = [
        scenario("host", host),
        scenario("refused", host),
        scenario("full", write_run(root, "full", train=two | at_the_end), full=STEPS),
        scenario("coded", write_run(root, "coded", train=two, parallel=coded)),
    ]
    return root, run_all(root, killed, whole)
