"""Runs of several forked ranks in chains, each one after the other; a script of its own, started by `run_all`.

``python ranks_script.py ROOT [LATENESS]`` runs what ``ROOT/scenarios.json`` lists by chain: name, config file, number
of ranks, restarts, which rank is killed after which step or in its second round, and after which step the disk is full.
With a lateness it does so on a made-up accelerator. It ends with a JSON object of the exit codes by name.
"""

import errno
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401 (once, and not in every rank)
from forked import fork_ranks

from outsize.checkpoint.saving import Saving
from outsize.cli import main
from outsize.runtime.ops.gradient_ops import GradientOps
from outsize.training.records import Heartbeat


def run(scenario, root):
    killed = scenario.get("kill")

    def work(rank):
        if killed is not None and killed[0] == rank:
            beat = Heartbeat.beat

            def last_beat(self, record):
                beat(self, record)
                if record.step == killed[1]:
                    os.kill(os.getpid(), signal.SIGKILL)

            sum_on = GradientOps.sum_on

            def last_sum(self, op, context):
                if context.number + 1 == killed[1]:
                    os.kill(os.getpid(), signal.SIGKILL)
                sum_on(self, op, context)

            if scenario.get("summing"):
                GradientOps.sum_on = last_sum
            else:
                Heartbeat.beat = last_beat
        begin = Saving._begin

        def begin_on_a_disk(self):
            if self.step == scenario.get("full"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return begin(self)

        Saving._begin = begin_on_a_disk
        sys.argv = ["outsize", "train", scenario["config"], "--json"]
        sys.exit(main())

    logs = root / f"logs-{scenario['name']}"
    logs.mkdir()
    processes = fork_ranks(scenario["ranks"], work, logs, restarts=scenario.get("restarts", 0))
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run_chain(chain, root, number):
    codes = {scenario["name"]: run(scenario, root) for scenario in chain}
    (root / f"codes-{number}.json").write_text(json.dumps(codes))


root = Path(sys.argv[1])
if sys.argv[2:]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from accelerator import late

    late.install()
    late.set_profile(sys.argv[2])
chains = json.loads((root / "scenarios.json").read_text())
context = multiprocessing.get_context("fork")
runners = [context.Process(target=run_chain, args=(chain, root, n)) for n, chain in enumerate(chains)]
for runner in runners:
    runner.start()
for runner in runners:
    runner.join()
found = {}
for number in range(len(chains)):
    found |= json.loads((root / f"codes-{number}.json").read_text())
sys.stdout.write(json.dumps(found) + "\n")
