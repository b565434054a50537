"""Runs of several forked ranks, one after the other; a script of its own, started by test_ranks.py.

``python ranks_script.py ROOT`` runs what ``ROOT/scenarios.json`` lists: config file, number of ranks, restarts, and
which rank is killed after which step. It writes a JSON list of the exit codes.
"""

import json
import os
import signal
import sys
from pathlib import Path

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401 (once, and not in every rank)

from outsize.cli import main
from outsize.testing.processes import fork_ranks
from outsize.train.heartbeat import Heartbeat


def run(scenario, root):
    killed = scenario.get("kill")

    def work(rank):
        if killed is not None and killed[0] == rank:
            beat = Heartbeat.beat

            def last_beat(self, record):
                beat(self, record)
                if record.step == killed[1]:
                    os.kill(os.getpid(), signal.SIGKILL)

            Heartbeat.beat = last_beat
        sys.argv = ["outsize", "train", scenario["config"], "--json"]
        sys.exit(main())

    logs = root / f"logs-{scenario['name']}"
    logs.mkdir()
    processes = fork_ranks(scenario["ranks"], work, logs, restarts=scenario.get("restarts", 0))
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


root = Path(sys.argv[1])
codes = [run(scenario, root) for scenario in json.loads((root / "scenarios.json").read_text())]
sys.stdout.write(json.dumps(codes) + "\n")
