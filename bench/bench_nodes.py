"""How much of what ranks exchange is hidden behind compute, and does the simulator know?

Ranks are processes of this machine, with a core each. The throttle makes what fp32 gradients and weights take on
the wire half of what a rank computes. ``hidden`` is what of that time steps do not become longer by:

    hidden = 1 - (throttled step - unthrottled step) / (bytes that a rank sends / rate)

A step is twice as long as what is divided by, so a drift of 5 % between the two kinds of steps is 10 % of ``hidden``.
Therefore short phases take turns, each throttled one is held against the two beside it, and ``hidden_share`` is the
median over these pairs. ``hidden_quartiles`` are theirs, and ``hidden_error`` is what the median may be off by: 1.25
standard errors of a mean, of a normal spread with these quartiles. A second witness does not look at the length of
steps: ``waited_share`` is one less what the compute lane waited longer for the network in throttled phases, by the same
denominator; ranks that wait for each other do so in both.

``waited_s`` tells what compute waited for in throttled steps. What cannot be hidden belongs to the lowest
units of a model: their gradients come last, and their weights are wanted first. So a model has to be as deep as those
that people train, and its vocabulary no larger a part of it: 32 blocks, as a 7B has, and an embedding of less than one.
``--simulated`` says what the simulator makes of such models on GPUs; that takes seconds, and no clock.

Two predictions stand beside the measured step: that of ``outsize train``, from a moment's calibration before the first
step, and what the simulator makes of the throttle where every other op takes as long as it took without.

    OMP_NUM_THREADS=1 python bench/bench_nodes.py                   # 2 ranks, a token bucket in each: 4 minutes
    OMP_NUM_THREADS=1 python bench/bench_nodes.py --namespaces      # by tc, on a veth of each rank; needs root
    OMP_NUM_THREADS=1 python bench/bench_nodes.py --ranks 4         # which share the cores, where there are fewer
    OMP_NUM_THREADS=1 python bench/bench_nodes.py --curve           # losses of 300 steps, by codec of the gradients
    python bench/bench_nodes.py --simulated
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common
import ranks

from outsize.planner.program.program import Kind

# Microbatches of all ranks together.
SHAPE = {"seq_len": 256, "sequences": 4, "layers": 32, "hidden": 192, "vocabulary": 2048, "microbatches": 4}
CURVE = {"seq_len": 64, "sequences": 8, "layers": 2, "hidden": 128, "vocabulary": 512, "microbatches": 4}
CURVE_STEPS = 300
# Communication by compute, where gradients are sent in fp32.
SHARE = 0.5
# Steps of a phase, of which the first one starts from rest and is left out. A round is an unthrottled phase and a
# throttled one; behind the last round comes an unthrottled one.
WARM_STEPS, PHASE_STEPS, ROUNDS = 2, 3, 7
# Whose losses are held against those of one process.
FIRST_STEPS = 3
# Sequences of a node's step, of 1,024 tokens, in microbatches of four.
SIMULATED = {"sequences": 32, "microbatches": 8}
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
MODELS = {
    "Llama-2-7B": {**LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000},
    "Llama-3.1-8B": {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
    "6 blocks of the 7B": {
        **LLAMA,
        "intermediate_size": 11008,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "num_hidden_layers": 6,
    },
}
EXCHANGES = (Kind.REDUCE, Kind.AGREE, Kind.GATHER)
# Causes of waiting that a slow network has.
NETWORK_WAITS = ("gradients of other nodes", "norms of other nodes", "weights of other nodes")


class Rank:
    """One rank of a run, in a process of its own.

    Args:
        job: what `main` wants it to do.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from outsize.group.gloo import launched, open_group
        from outsize.session.job.prepare import prepare

        torch.set_num_threads(1)
        self.job = job
        group: Any = open_group(launched(), timeout_s=120.0)
        own_link = job["apart"] or group.size == 1
        self.link: Any = ranks.Interface() if own_link else ranks.TokenBucket(group)
        self.group: Any = group if own_link else self.link
        directory = Path(job["directory"])
        self.own = directory / f"own-{group.rank}"
        self.own.mkdir(exist_ok=True)
        self.config = self._config(directory)
        self.prepared = prepare(RunSpec.of(self.config, self.own, self.group), lambda _: None)

    def _config(self, directory: Path) -> Any:
        from outsize.config import load_config

        job = self.job
        settings = [
            f"model.path={directory / 'model'}",
            f"model.dtype={job['dtype']}",
            f"data.path={directory / 'tokens.npy'}",
            "data.format=tokens",
            f"data.seq_len={job['seq_len']}",
            f"train.steps={job['steps']}",
            f"train.tokens_per_step={job['seq_len'] * job['sequences']}",
            f"train.microbatches={job['microbatches'] // self.group.size}",
            f"optimizer.lr={job['lr']}",
            f"parallel.gradients={job['gradients']}",
            *(
                "memory.device=cpu",
                "memory.home=host",
                "memory.device_memory=2GiB",
                "memory.host_memory=2GiB",
            ),
        ]
        return load_config(None, settings)

    def run(self) -> dict[str, Any]:
        """Train, in phases where there are any; returns what came of it."""
        from outsize.runtime.device.heap import begin_run, own_process
        from outsize.session.decide.rates import measure_rates
        from outsize.session.stream import StreamedTrainer
        from outsize.training.run_data import open_dataset

        job, group, config = self.job, self.group, self.config
        rates = measure_rates(self.prepared, self.own) if job["rounds"] else None
        with open_dataset(config, self.prepared, self.own, lambda _: None) as dataset:
            numbers = range(job.get("first_steps", job["steps"]))
            batches = [
                dataset.batch(step, job["sequences"]).share(group.rank, group.size) for step in numbers
            ]
        own_process()
        begin_run(heap=self.prepared.heap)
        with StreamedTrainer(self.prepared, self.own) as trainer:
            trainer.fill()
            group.barrier()
            losses: list[float] = []
            outcomes = _noted(trainer.steps(batches), losses)
            found = self._phases(trainer, outcomes, rates) if rates is not None else {}
            list(outcomes)
            trainer.settle()
            found |= {"losses": losses, **self._state(trainer)}
        group.close()
        return found

    def _phases(self, trainer: Any, outcomes: Iterator[Any], rates: Any) -> dict[str, Any]:
        """Run throttled and unthrottled steps in turn."""
        from outsize.planner.simulate.simulator import Timeline

        seen: dict[str, list[Any]] = {"free": [], "slow": []}
        waits: dict[str, Counter[str]] = {"free": Counter(), "slow": Counter()}
        found: dict[str, Any] = {}
        list(itertools.islice(outcomes, WARM_STEPS))
        for kind in (*("free", "slow") * self.job["rounds"], "free"):
            trainer.settle()
            self.group.barrier()
            if kind == "free":
                self.link.limit(None)
            elif "rate" not in found:
                found |= self._throttle(seen["free"], rates)
            else:
                self.link.limit(found["rate"])
            phase = Phase(trainer, itertools.islice(outcomes, self.job["phase_steps"]))
            seen[kind].append(phase)
            waits[kind].update(phase.waits)
        for kind, phases in seen.items():
            found[f"{kind}_s"] = [phase.seconds for phase in phases]
            steps = sum(map(len, found[f"{kind}_s"]))
            found[f"{kind}_waits"] = {cause: wait_s / steps for cause, wait_s in waits[kind].items()}
        events = tuple(event for phase in seen["free"] for event in phase.events)
        return found | {
            "wire": seen["slow"][0].wire,
            "logical": seen["slow"][0].logical,
            "simulated_s": self._simulated(Timeline(events), rates, found["measured_rate"]),
        }

    def _throttle(self, free: list["Phase"], rates: Any) -> dict[str, Any]:
        """Throttle the network, find out what that gives, and predict a step."""
        from outsize.session.decide.rates import measure_exchange, of_slowest
        from outsize.training.forecast import Forecast

        compute_s = max(self.group.gather_objects(statistics.median(free[0].computes)))
        rate = self.job["rate"] or sum(free[0].logical.values()) / (SHARE * compute_s)
        rate = self.group.gather_objects(rate)[0]
        self.link.limit(rate)
        measured = of_slowest(self.group, rates, measure_exchange(self.group))
        predicted = Forecast(self.prepared, measured)
        return {
            "compute_s": compute_s,
            "rate": rate,
            "measured_rate": measured.net_bytes_per_s,
            "predicted_s": predicted.step_s,
            "predicted_compute_s": predicted.predicted.lanes["compute:w0"],
        }

    def _simulated(self, timeline: Any, rates: Any, rate: float) -> float:
        """Return what the simulator makes of a network of ``rate``, where all other ops take as long as they took."""
        from outsize.planner.simulate.gpu_times import read_trace
        from outsize.training.forecast import Forecast

        planned = Forecast(self.prepared, replace(rates, net_bytes_per_s=rate)).planned
        trace = read_trace(timeline, planned.costs(rates.machine, rates.times, coarse=False))
        own = replace(
            trace, by_op={key: found for key, found in trace.by_op.items() if key[0] not in EXCHANGES}
        )
        step_s = planned.expect(own.costs(planned.costs(rates.machine, rates.times))).step_s
        return max(self.group.gather_objects(step_s))

    def _state(self, trainer: Any) -> dict[str, Any]:
        """Return a digest of the weights, and what the optimizer keeps here."""
        import torch

        digest, own = hashlib.sha256(), self.prepared.own
        for unit in trainer.spec.units:
            digest.update(trainer.home.view(unit.index, "weights").view(torch.uint8).numpy().data)
        state_bytes = sum(
            trainer.home.view(unit.index, plane).nbytes
            for unit in trainer.spec.units
            for plane in ("exp_avg", "exp_avg_sq")
            if unit.trainable and (own is None or own[unit.index])
        )
        return {"weights": digest.hexdigest(), "optimizer_bytes": state_bytes}


class Phase:
    """Steps that follow one another, all but the first.

    Attributes:
        seconds: of each.
        computes: what the compute lane was busy, of each.
        events: of all, the first step's too.
        waits: seconds that the compute lane waited, by cause.
        wire: bytes sent in a step, by lane.
        logical: what they stand for.
    """

    def __init__(self, trainer: Any, outcomes: Iterator[Any]) -> None:
        from outsize.planner.simulate.comparison import Steps
        from outsize.planner.simulate.simulator import Timeline
        from outsize.planner.simulate.stalls import waits_by_cause

        trainer.take_timeline()
        before = _sent(trainer)
        self.events: list[Any] = []
        self.seconds, self.computes, ends = [], [], []
        for outcome in outcomes:
            timeline = trainer.take_timeline()
            self.events += timeline.events
            self.seconds.append(outcome.seconds)
            self.computes.append(timeline.busy_s("compute:w0"))
            ends.append(outcome.ended_s)
        trainer.settle()
        self.events += trainer.take_timeline().events
        count = len(ends)
        del self.seconds[0], self.computes[0]
        steps = Steps(
            timeline=Timeline(tuple(self.events)), began_s=ends[0], ended_s=ends[-1], count=count - 1
        )
        (self.waits,) = waits_by_cause(steps.within, ["compute:w0"])
        after = _sent(trainer)
        self.wire = {lane: (after[lane][0] - before[lane][0]) / count for lane in after}
        self.logical = {lane: (after[lane][1] - before[lane][1]) / count for lane in after}


def _noted(outcomes: Iterator[Any], losses: list[float]) -> Iterator[Any]:
    for outcome in outcomes:
        losses.append(outcome.loss)
        yield outcome


def _sent(trainer: Any) -> dict[str, tuple[int, int]]:
    moved = trainer.engine.moved()
    return {lane: (sent.wire, sent.logical) for lane, sent in moved.items() if lane.startswith("net:")}


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return what steps take with and without a throttle, by ranks and codec."""
    bench_speed.build(directory, SHAPE["layers"], SHAPE["hidden"], SHAPE["vocabulary"], 300_000)
    cases: list[dict[str, Any]] = []
    alone: list[float] = []
    for gradients in args.gradients:
        job = {
            **SHAPE,
            "directory": str(directory),
            "dtype": args.dtype,
            "steps": WARM_STEPS + (2 * args.rounds + 1) * args.phase_steps,
            "rounds": args.rounds,
            "phase_steps": args.phase_steps,
            "lr": 2e-5,
            "gradients": gradients,
            "rate": cases[0]["rate_bytes_per_s"] if cases else None,
        }
        found = run_ranks(args.ranks, job, args)
        if not alone:  # one process with the same batches, in as many microbatches
            single = {**job, "first_steps": FIRST_STEPS, "rounds": 0, "gradients": "fp32"}
            alone = run_ranks(1, single, args)[0]["losses"]
        cases.append({**case_of(args.ranks, gradients, found), "losses_apart": apart(found, alone)})
        print(json.dumps(cases[-1]), file=sys.stderr)
    return {"ranks": args.ranks, "dtype": args.dtype, "cases": cases}


def apart(found: list[dict[str, Any]], alone: list[float]) -> float:
    """Return by how much the first losses differ at most from those of one process, as a part of them."""
    pairs = zip(found[0]["losses"], alone, strict=False)
    return max(abs(loss - expected) / expected for loss, expected in pairs)


def run_ranks(size: int, job: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    namespaces = args.namespaces and size > 1
    job = {**job, "apart": namespaces}
    return ranks.run_ranks(__file__, size, job, apart=namespaces, limit_s=args.limit_s)


def case_of(size: int, gradients: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Put one measurement beside its predictions."""
    first = found[0]
    free_s, slow_s = (statistics.median(itertools.chain(*first[kind])) for kind in ("free_s", "slow_s"))
    wire, logical = first["wire"], first["logical"]
    comm_s = sum(wire.values()) / first["rate"]
    whole = sum(result["optimizer_bytes"] for result in found)
    shares = hidden_shares(first["free_s"], first["slow_s"], comm_s)
    low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
    longer_s = max(
        network_wait_s(result["slow_waits"]) - network_wait_s(result["free_waits"]) for result in found
    )
    return {
        "ranks": size,
        "gradients": gradients,
        "rate_bytes_per_s": first["rate"],
        "measured_rate_bytes_per_s": first["measured_rate"],
        "compute_s": first["compute_s"],
        "communication_s": comm_s,
        "step_free_s": free_s,
        "step_s": slow_s,
        "all_free_s": first["free_s"],
        "all_slow_s": first["slow_s"],
        "hidden_share": middle,
        "hidden_quartiles": [low, high],
        "hidden_error": 1.25 * (high - low) / 1.35 / len(shares) ** 0.5,
        "hidden_shares": shares,
        "waited_share": 1 - longer_s / comm_s,
        "waited_s": {
            cause: max(result["slow_waits"].get(cause, 0.0) for result in found)
            for cause in first["slow_waits"]
        },
        "predicted_s": first["predicted_s"],
        "predicted_compute_s": first["predicted_compute_s"],
        "prediction_error": first["predicted_s"] / slow_s - 1,
        "simulated_s": first["simulated_s"],
        "simulation_error": first["simulated_s"] / slow_s - 1,
        "wire_bytes": wire,
        "fewer_gradient_bytes": logical["net:reduce"] / wire["net:reduce"],
        "fewer_bytes": sum(logical.values()) / sum(wire.values()),
        "same_weights": len({result["weights"] for result in found}) == 1,
        "same_losses": len({tuple(result["losses"]) for result in found}) == 1,
        "optimizer_share": max(result["optimizer_bytes"] for result in found) / whole,
    }


def hidden_shares(free: list[list[float]], slow: list[list[float]], comm_s: float) -> list[float]:
    """Return what of communication each throttled phase has hidden, beside the phases before and after it."""
    means = [statistics.fmean(phase) for phase in free]
    beside = [statistics.fmean(pair) for pair in itertools.pairwise(means)]
    return [1 - (statistics.fmean(phase) - s) / comm_s for phase, s in zip(slow, beside, strict=True)]


def network_wait_s(waits: dict[str, float]) -> float:
    """Return the seconds of a step that compute waited for the network, or for other ranks."""
    return sum(waits.get(cause, 0.0) for cause in NETWORK_WAITS)


def curves(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return how far apart the losses of 300 steps are, by codec, beside what another order of the data changes."""
    import numpy as np

    bench_speed.build(directory, CURVE["layers"], CURVE["hidden"], CURVE["vocabulary"], 10)
    random = np.random.default_rng(0)
    ids = np.empty(400_000, np.int32)
    ids[0] = 1
    noise = random.integers(0, 4, len(ids))
    for index in range(1, len(ids)):  # what comes next is one of four, so that there is something to learn
        ids[index] = (5 * ids[index - 1] + 7 * noise[index]) % CURVE["vocabulary"]
    np.save(directory / "tokens.npy", ids)
    job = {
        **CURVE,
        "directory": str(directory),
        "dtype": "fp32",
        "steps": CURVE_STEPS,
        "rounds": 0,
        "lr": 1e-3,
    }
    found = {
        gradients: run_ranks(args.ranks, {**job, "gradients": gradients}, args)[0]["losses"]
        for gradients in ("fp32", "bf16", "int8", "int8-stochastic")
    }
    exact, last = found["fp32"], slice(-50, None)
    # How far a mean over 50 steps lies from another by the draw of their batches alone.
    noise_of_mean = statistics.stdev(exact[last]) / 50**0.5
    rows = {
        gradients: {
            "last_50": statistics.fmean(losses[last]),
            "apart": statistics.fmean(losses[last]) - statistics.fmean(exact[last]),
            "largest_apart": max(abs(a - b) for a, b in zip(losses, exact, strict=True)),
        }
        for gradients, losses in found.items()
    }
    return {"first": exact[0], "noise_of_mean": noise_of_mean, "curves": rows}


def simulated() -> list[dict[str, Any]]:
    """Return what of communication the simulator hides, where it takes half of compute, on an RTX 4090 in each node."""
    from outsize.hardware.cards import parse_gpus
    from outsize.hardware.machine_spec import Figure
    from outsize.planner.predict.decision_search import planned_at
    from outsize.planner.predict.prediction import predict
    from outsize.planner.predict.question import Question
    from outsize.planner.search.step_plan import Budgets, PlanOptions

    def step(config: dict[str, Any], nodes: int, bytes_per_s: float) -> Any:
        counts, count = common.counted(config), SIMULATED["microbatches"]
        question = Question(
            model=counts.spec,
            machine=parse_gpus("4090"),
            budgets=Budgets(device=20 * 2**30, host=300 * 2**30, disk=0),
            sequences=SIMULATED["sequences"],
            seq_len=1024,
            workload_of=lambda rows: counts.workload(rows, 1024),
            options=PlanOptions(home="host", below="host", nodes=nodes),
            net_bytes_per_s=Figure(value=bytes_per_s, source="half of compute"),
        )
        return question, predict(planned_at(question, count, "host"))

    rows = []
    for (name, config), nodes in itertools.product(MODELS.items(), (2, 4)):
        question, free = step(config, nodes, 1e15)
        compute_s = (1 - free.bubble) * free.step_s
        numel = sum(unit.numel for unit in question.model.units)
        rate = 6 * numel * (nodes - 1) / nodes / (SHARE * compute_s)
        _, slow = step(config, nodes, rate)
        comm_s = SHARE * compute_s
        rows.append(
            {
                "model": name,
                "nodes": nodes,
                "gbit_per_s": 8e-9 * rate,
                "compute_s": compute_s,
                "step_free_s": free.step_s,
                "step_s": slow.step_s,
                "hidden_share": 1 - (slow.step_s - free.step_s) / comm_s,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--namespaces", action="store_true", help="throttle a veth of each rank with tc; needs root"
    )
    parser.add_argument("--gradients", nargs="+", default=["fp32", "bf16", "int8"], metavar="CODEC")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of unthrottled and throttled steps, two at least"
    )
    parser.add_argument("--phase-steps", type=int, default=PHASE_STEPS, help="in a row, two at least")
    parser.add_argument("--curve", action="store_true", help="compare losses of 300 steps instead")
    parser.add_argument("--simulated", action="store_true", help="what the simulator makes of larger models")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.rounds < 2 or args.phase_steps < 2:
        parser.error("--rounds and --phase-steps are two at least")
    if args.child:
        print(json.dumps(Rank(json.loads(args.child)).run()))
        return
    if args.simulated:
        rows = simulated()
        common.print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
        common.finish({"bench": "nodes_simulated", "cases": rows}, args.output)
        return
    if args.namespaces:
        ranks.check_namespaces()
    with tempfile.TemporaryDirectory() as name:
        result = curves(args, Path(name)) if args.curve else measure(args, Path(name))
    if args.curve:
        rows = [(name, *(f"{value:.4f}" for value in row.values())) for name, row in result["curves"].items()]
        common.print_table(("gradients", "loss of the last 50", "apart", "most apart in a step"), rows)
    else:
        keys = ("gradients", "step_free_s", "step_s", "communication_s", "hidden_share")
        keys += ("hidden_error", "waited_share")
        keys += ("prediction_error", "simulation_error", "fewer_gradient_bytes")
        keys += ("same_weights", "optimizer_share", "losses_apart")
        rows = [
            tuple(f"{case[key]:.3g}" if isinstance(case[key], float) else str(case[key]) for key in keys)
            for case in result["cases"]
        ]
        common.print_table(keys, rows)
    facts = {"throttle": "tc" if args.namespaces else "token bucket", "cores": os.cpu_count()}
    common.finish({"bench": "nodes", "machine": common.machine(), **facts, **result}, args.output)


if __name__ == "__main__":
    main()
