"""Is there a cliff between what streams and what fits? A step at ten budgets, against the plain loop in the same run.

The least budget is what the plan says it is, the largest holds what keeps everything; between them each is the same
factor more. Steps of a budget and of the plain loop take turns, so that what else the machine does meets both. The
figure is the ratio of their processor seconds, which other work leaves as they are; that of seconds stands beside it.

    python bench/bench_curve.py --shape llama-34m
    python bench/bench_curve.py --shape llama-100m --method lora
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outsize.runtime.device.heap import own_process, set_thresholds
from outsize.spin import limit_spinning

sys.path.insert(0, str(Path(__file__).parent))
import common
import shapes

BUDGETS = 10
Cost = tuple[float, float]  # processor seconds, and seconds, of a step
# What a step may take where everything fits, and by how much a larger budget may be slower than a smaller one.
FULL, DIP = 1.03, 1.05


def settings(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    lora = {"train.method": "lora", "lora.r": 8} if args.method == "lora" else {}
    return {
        "model.path": str(directory / "model"),
        "model.dtype": "fp32",
        "data.path": str(directory / "tokens.npy"),
        "data.format": "tokens",
        "data.seq_len": args.seq_len,
        "train.steps": 10**6,
        "train.tokens_per_step": args.tokens_per_step,
        "train.microbatches": args.microbatches,
        "optimizer.schedule": "constant",
        "memory.device": "cpu",
        "memory.home": "host",
        **lora,
    }


def budgets_between(least: int, most: int) -> list[int]:
    """Return `BUDGETS` sizes, each the same factor more than the one before."""
    factor = (most / least) ** (1 / (BUDGETS - 1))
    return [round(least * factor**number) for number in range(BUDGETS)]


class Curve:
    """One model on the same batches, streamed within any budget, and plain."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args, self._directory = args, directory

    def job(self, budget: int | str) -> Any:
        """Return a run within ``budget``, planned.

        Raises:
            InfeasiblePlanError: it is too small.
        """
        from outsize.config import load_config
        from outsize.session.decide.decide import plan_run
        from outsize.streamed.spec import RunSpec

        values = {**settings(self._args, self._directory), "memory.device_memory": budget}
        run_dir = Path(tempfile.mkdtemp(dir=self._directory))
        config = load_config(None, [f"{key}={value}" for key, value in values.items()])
        return plan_run(RunSpec.of(config, run_dir), lambda _: None)[0]

    def ends(self) -> tuple[int, int]:
        """Return the least budget that a plan fits, and what one takes that keeps everything."""
        from outsize.errors import InfeasiblePlanError

        small = 2**20
        try:
            self.job(small)
        except InfeasiblePlanError as error:
            return small + error.short_by["device"], self.job("16GiB").plan.total_bytes("device")
        raise AssertionError("a plan in 1 MiB")

    def batches(self, job: Any, count: int) -> list[Any]:
        from outsize.training.run_data import open_dataset

        with open_dataset(job.config, job, self._directory, lambda _: None) as dataset:
            return [dataset.batch(step, job.config.sequences_per_step) for step in range(count)]

    def streamed(self, budget: int, batches: list[Any]) -> Cost:
        """Return what a step takes, but for the first; the run is made now, since what is there counts to no budget."""
        from outsize.runtime.device.heap import begin_run
        from outsize.session.stream import StreamedTrainer

        gc.collect()  # what the run before has left
        job = self.job(budget)
        begin_run(heap=job.heap)
        with StreamedTrainer(job, Path(tempfile.mkdtemp(dir=self._directory))) as trainer:
            trainer.fill()
            return cost_of(trainer.steps(batches), trainer.settle)

    def plain(self, job: Any, batches: list[Any]) -> Cost:
        """Return the same of the plain loop, which keeps what autograd saves."""
        from outsize.training.resident import ResidentTrainer, materialise

        with materialise(job) as masters:
            job.split.model.train()
            trainer = ResidentTrainer(job.config, job.split, masters, job.chunk_tokens, job.measured.shifted)
            return cost_of(trainer.steps(batches), lambda: None)


def cost_of(steps: Iterable[object], settle: Callable[[], None]) -> Cost:
    """Return what each of ``steps`` took, but for the first, until all is done.

    The optimizer of the first one, which touches its moments for the first time, is waited for: a step that overlaps
    with the next one would count it, and the plain loop would not.
    """
    taken = iter(steps)
    next(taken)
    settle()
    started, before, count = time.perf_counter(), time.process_time(), sum(1 for _ in taken)
    settle()
    return (time.process_time() - before) / count, (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="llama-34m")
    parser.add_argument("--method", choices=("full", "lora"), default="full")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument(
        "--steps", type=common.steps_above(1), default=4, help="of a turn; the first warms up"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    limit_spinning()
    own_process()
    set_thresholds(heap=False)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-curve-")))
        shapes.write(args.shape, directory)
        report(args, *measured(args, Curve(args, directory)))


def measured(args: argparse.Namespace, curve: Curve) -> tuple[list[int], dict[int, list[Cost]], list[str]]:
    """Return the budgets, the ratios of each to the plain loop turn by turn, and what each plan keeps."""
    budgets = budgets_between(*curve.ends())
    jobs = {budget: curve.job(budget) for budget in budgets}
    plain_job = curve.job("16GiB")
    batches = curve.batches(plain_job, args.steps)
    ratios: dict[int, list[Cost]] = {budget: [] for budget in budgets}
    for turn in range(args.turns):
        for budget in budgets if turn % 2 == 0 else reversed(budgets):
            plain, streamed = curve.plain(plain_job, batches), curve.streamed(budget, batches)
            ratios[budget].append((streamed[0] / plain[0], streamed[1] / plain[1]))
    kept = [
        f"{sum(choices[0] == 'keep' for choices in job.plan.layout.kept if choices)} of "
        f"{job.plan.layout.num_streamed} units keep"
        for job in jobs.values()
    ]
    return budgets, ratios, kept


def report(
    args: argparse.Namespace, budgets: list[int], ratios: dict[int, list[Cost]], kept: list[str]
) -> None:
    curve, seconds = (
        [statistics.median(cost[which] for cost in ratios[budget]) for budget in budgets] for which in (0, 1)
    )
    dips = [later / min(curve[:at]) for at, later in enumerate(curve) if at]
    rows = [
        (f"{budget / 2**20:.0f} MiB", f"{ratio:.3f}", f"{second:.3f}", what)
        for budget, ratio, second, what in zip(budgets, curve, seconds, kept, strict=True)
    ]
    headers = ("budget", "processor seconds, of the plain loop's", "seconds", "")
    common.print_table(headers, rows, title=f"{args.shape}, {args.method}")
    print(
        f"where everything fits {curve[-1]:.3f} (at most {FULL}), largest dip {max(dips):.3f} (at most {DIP})"
    )
    common.finish(
        {
            "bench": "curve",
            "machine": common.machine(),
            "settings": {key: str(value) for key, value in vars(args).items() if key != "output"},
            "budget_bytes": budgets,
            "processor_ratio": [round(ratio, 4) for ratio in curve],
            "seconds_ratio": [round(ratio, 4) for ratio in seconds],
            "kept": kept,
            "holds": curve[-1] <= FULL and max(dips) <= DIP,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
