"""How much of what ranks exchange is hidden behind compute, and does the simulator know?

Ranks are processes of this machine, each with one thread and a model of its own, over gloo. First they run as fast as
the loopback is. Then each may send no more than so many bytes per second, chosen so that exchanging in fp32 would take
half as long as a step computes. What a step takes longer then, over what its bytes take at that rate, is what is not
hidden. Predictions are those of `outsize train`, made before the first step, with what the network gives in a moment.

    OMP_NUM_THREADS=1 python bench/bench_nodes.py                   # throttled by a token bucket in each process
    OMP_NUM_THREADS=1 python bench/bench_nodes.py --namespaces      # by tc, on a veth of each rank; needs root
    OMP_NUM_THREADS=1 python bench/bench_nodes.py --curve           # losses of 300 steps, by codec of the gradients

Ranks beyond the number of cores share them: then compute takes as much longer, and so it is said in ``cores``.
"""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common

SEQ_LEN, SEQUENCES, MICROBATCHES = 256, 16, 4
LAYERS, HIDDEN, VOCABULARY = 6, 384, 4096
# Communication by compute, where gradients are sent in fp32.
SHARE = 0.5
WARM_STEPS, STEPS = 3, 6
CURVE = {"steps": 300, "seq_len": 64, "sequences": 8, "layers": 2, "hidden": 128, "vocabulary": 512}


def child(job: dict[str, Any]) -> None:
    """Train as one rank and print what came of it as JSON."""
    import torch

    from outsize.config import load_config
    from outsize.group.launched import launched, open_group
    from outsize.train.forecast import forecast
    from outsize.train.prepare import prepare
    from outsize.train.sources import open_dataset
    from outsize.train.stream import StreamedTrainer

    torch.set_num_threads(1)
    group: Any = open_group(launched(), timeout_s=120.0)
    if job["bucket_bytes_per_s"]:
        group = throttled(group, job["bucket_bytes_per_s"])
    directory, own = Path(job["directory"]), Path(job["directory"]) / f"own-{group.rank}"
    own.mkdir(exist_ok=True)
    config = load_config(
        None,
        [
            f"model.path={directory / 'model'}",
            f"model.dtype={job['dtype']}",
            f"data.path={directory / 'tokens.npy'}",
            "data.format=tokens",
            f"data.seq_len={job['seq_len']}",
            f"train.steps={job['steps']}",
            f"train.tokens_per_step={job['seq_len'] * job['sequences']}",
            f"train.microbatches={job['microbatches']}",
            "memory.device=cpu",
            "memory.home=host",
            "memory.device_memory=2GiB",
            "memory.host_memory=2GiB",
            f"optimizer.lr={job['lr']}",
            f"parallel.gradients={job['gradients']}",
            f"parallel.weights={job['weights']}",
        ],
    )
    prepared = prepare(config, own, lambda _: None, group=group)
    expected = forecast(prepared, own, lambda line: print(line, file=sys.stderr))
    with open_dataset(config, prepared, own, lambda _: None) as dataset:
        batches = [
            dataset.batch(step, job["sequences"]).share(group.rank, group.size)
            for step in range(job["steps"])
        ]
    seconds, busy, losses = [], [], []
    with StreamedTrainer(prepared, own) as trainer:
        trainer.fill()
        group.barrier()
        for outcome in trainer.steps(batches):
            seconds.append(outcome.seconds)
            losses.append(outcome.loss)
            timeline = trainer.take_timeline()
            busy.append({lane: timeline.busy_s(lane) for lane in timeline.lanes})
        trainer.settle()
        moved = trainer.engine.moved()
        digest = hashlib.sha256()
        for unit in trainer.spec.units:
            digest.update(trainer.home.view(unit.index, "weights").view(torch.uint8).numpy().data)
        state_bytes = sum(
            trainer.home.view(unit.index, plane).nbytes
            for unit in trainer.spec.units
            for plane in ("exp_avg", "exp_avg_sq")
            if unit.trainable and (prepared.own is None or prepared.own[unit.index])
        )
    found = {
        "rank": group.rank,
        "predicted_s": expected.predicted.step_s if expected is not None else None,
        "seconds": seconds,
        "compute_s": statistics.median(part.get("compute:w0", 0.0) for part in busy[WARM_STEPS:]),
        "losses": losses,
        "weights": digest.hexdigest(),
        "optimizer_bytes": state_bytes,
        "sent_bytes": {
            lane: [count.wire / job["steps"], count.logical / job["steps"]]
            for lane, count in moved.items()
            if lane.startswith("net:")
        },
    }
    group.close()
    print(json.dumps(found))


def throttled(group: Any, bytes_per_s: float) -> Any:
    """Return ``group`` such that all its channels together send no more than ``bytes_per_s``."""
    from outsize.group.group import Collectives

    lock, free_at = threading.Lock(), [time.monotonic()]

    class Throttled(Collectives):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self._inner, self.rank, self.size = inner, inner.rank, inner.size

        def channel(self, name: str) -> "Throttled":
            return Throttled(self._inner.channel(name))

        def exchange(self, outgoing: Mapping[int, Any], incoming: Mapping[int, Any]) -> None:
            with lock:
                free_at[0] = max(free_at[0], time.monotonic())
                free_at[0] += sum(tensor.nbytes for tensor in outgoing.values()) / bytes_per_s
                until = free_at[0]
            self._inner.exchange(outgoing, incoming)
            time.sleep(max(0.0, until - time.monotonic()))

        def close(self, error: BaseException | None = None) -> None:
            self._inner.close(error)

    return Throttled(group)


@contextlib.contextmanager
def namespaces(size: int, bytes_per_s: float | None) -> Iterator[list[list[str]]]:
    """Make a network of ``size`` namespaces on a bridge, throttled; yields what a command of each begins with."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    names = [f"outsize-bench-{os.getpid()}-{rank}" for rank in range(size)]
    switch = f"outsize-bench-{os.getpid()}"
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            ip(
                "-n",
                name,
                "link",
                "add",
                "net0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{rank}",
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", f"port{rank}", "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "net0", "up")
            if bytes_per_s:
                rate = ["rate", f"{int(bytes_per_s * 8)}bit", "burst", "256kb", "latency", "400ms"]
                command = ["tc", "-n", name, "qdisc", "add", "dev", "net0", "root", "tbf", *rate]
                subprocess.run(command, check=True)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run_ranks(
    size: int, job: dict[str, Any], args: argparse.Namespace, rate: float | None
) -> list[dict[str, Any]]:
    """Run ``job`` on ``size`` ranks and return what each came to."""
    from outsize.testing.processes import free_port, rank_variables

    port = free_port()
    job = {**job, "bucket_bytes_per_s": None if args.namespaces else rate}
    network = namespaces(size, rate) if args.namespaces else contextlib.nullcontext([[]] * size)
    with network as prefixes:
        processes = []
        for rank, prefix in enumerate(prefixes):
            variables = {**os.environ, **rank_variables(rank, size, port), "OMP_NUM_THREADS": "1"}
            if args.namespaces:
                variables |= {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "net0"}
            command = [*prefix, sys.executable, __file__, "--child", json.dumps(job)]
            processes.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=args.limit_s)[0] for process in processes]
    found = [common.last_json(output) for output in outputs]
    if any(result is None for result in found):
        raise SystemExit(f"a rank of {size} failed")
    return [result for result in found if result is not None]


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return what steps take with and without a throttle, by ranks and codec."""
    bench_speed.build(directory, LAYERS, HIDDEN, VOCABULARY, 300_000)
    base = {
        "directory": str(directory),
        "dtype": args.dtype,
        "seq_len": SEQ_LEN,
        "sequences": SEQUENCES,
        "steps": WARM_STEPS + STEPS,
        "lr": 2e-5,
        "gradients": "fp32",
        "weights": "raw",
    }
    cases = []
    for size in args.ranks:
        job = {**base, "microbatches": MICROBATCHES}
        free = run_ranks(size, job, args, None)
        sent = sum(wire for wire, _ in free[0]["sent_bytes"].values())
        compute_s = max(result["compute_s"] for result in free)
        rate = sent / (SHARE * compute_s)
        wires = [("fp32", "raw"), ("bf16", "raw"), ("int8-ef", "raw")]
        wires += [("int8-ef", "delta")] if args.dtype != "fp32" else []
        for gradients, weights in wires:
            slow = run_ranks(size, {**job, "gradients": gradients, "weights": weights}, args, rate)
            cases.append(case_of(size, gradients, weights, free, slow, rate, compute_s))
            print(json.dumps(cases[-1]), file=sys.stderr)
    return {"cases": cases}


def case_of(
    size: int,
    gradients: str,
    weights: str,
    free: list[dict[str, Any]],
    slow: list[dict[str, Any]],
    rate: float,
    compute_s: float,
) -> dict[str, Any]:
    """Put one measurement beside its prediction."""
    free_s, slow_s = (statistics.median(run[0]["seconds"][WARM_STEPS:]) for run in (free, slow))
    wire = sum(sent for sent, _ in slow[0]["sent_bytes"].values())
    logical = sum(stood for _, stood in slow[0]["sent_bytes"].values())
    comm_s = wire / rate
    predicted, reduced = slow[0]["predicted_s"], slow[0]["sent_bytes"]["net:reduce"]
    whole = sum(result["optimizer_bytes"] for result in slow)
    return {
        "ranks": size,
        "gradients": gradients,
        "weights": weights,
        "rate_bytes_per_s": rate,
        "compute_s": compute_s,
        "communication_s": comm_s,
        "step_free_s": free_s,
        "step_s": slow_s,
        "hidden_share": 1 - (slow_s - free_s) / comm_s,
        "predicted_s": predicted,
        "prediction_error": None if predicted is None else predicted / slow_s - 1,
        "wire_bytes": {lane: sent for lane, (sent, _) in slow[0]["sent_bytes"].items()},
        "fewer_gradient_bytes": reduced[1] / reduced[0],
        "fewer_bytes": logical / wire,
        "same_weights": len({result["weights"] for result in slow}) == 1,
        "optimizer_share": max(result["optimizer_bytes"] for result in slow) / whole,
    }


def curves(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return how far apart the losses of 300 steps are, by codec, beside what another order of the data changes."""
    import numpy as np

    shape = CURVE
    bench_speed.build(directory, shape["layers"], shape["hidden"], shape["vocabulary"], 10)
    random = np.random.default_rng(0)
    ids = np.empty(400_000, np.int32)
    ids[0] = 1
    noise = random.integers(0, 4, len(ids))
    for index in range(1, len(ids)):  # what comes next is one of four, so that there is something to learn
        ids[index] = (5 * ids[index - 1] + 7 * noise[index]) % shape["vocabulary"]
    np.save(directory / "tokens.npy", ids)
    base = {
        "directory": str(directory),
        "dtype": "fp32",
        **{key: shape[key] for key in ("seq_len", "sequences", "steps")},
        "microbatches": 2,
        "lr": 1e-3,
        "weights": "raw",
    }
    found = {
        gradients: run_ranks(2, {**base, "gradients": gradients}, args, None)[0]["losses"]
        for gradients in ("fp32", "bf16", "int8", "int8-ef")
    }
    exact = found["fp32"]
    last = slice(-50, None)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--namespaces", action="store_true", help="throttle a veth of each rank with tc; needs root"
    )
    parser.add_argument("--curve", action="store_true", help="compare losses of 300 steps instead")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    with tempfile.TemporaryDirectory() as name:
        result = curves(args, Path(name)) if args.curve else measure(args, Path(name))
    if args.curve:
        rows = [(name, *(f"{value:.4f}" for value in row.values())) for name, row in result["curves"].items()]
        common.print_table(("gradients", "loss of the last 50", "apart", "most apart in a step"), rows)
    else:
        keys = ("ranks", "gradients", "weights", "step_free_s", "step_s", "communication_s", "hidden_share")
        keys += ("predicted_s", "prediction_error", "fewer_gradient_bytes", "same_weights", "optimizer_share")
        rows = [
            tuple(f"{case[key]:.3f}" if isinstance(case[key], float) else str(case[key]) for key in keys)
            for case in result["cases"]
        ]
        common.print_table(keys, rows)
    facts = {"throttle": "tc" if args.namespaces else "token bucket", "cores": os.cpu_count()}
    common.finish({"bench": "nodes", "machine": common.machine(), **facts, **result}, args.output)


if __name__ == "__main__":
    main()
