"""Does a run stay within its budget? Peak resident memory beyond the imports, case by case, each in a fresh process.

A case imports everything that it will use, the model's own module included, notes its resident memory, and trains from
the disk home. The peak above that note may be 1.10 x the budget + 48 MiB. The last case of a model is the smallest
budget that its plan allows, and what is said one page below it.

    python bench/bench_budget.py --small          # the 10M model, all kinds of settings, a few minutes
    python bench/bench_budget.py                  # the 100M model
    python bench/bench_budget.py --models gemma2 qwen3-moe llama-tied
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common
import shapes

MIB = 2**20
SHARES = (2, 4, 6, 8)
SLACK, SLACK_BYTES = 1.10, 48 * MIB
# A budget that no plan fits: the error says by how much, hence what the least plan needs.
HOPELESS_BYTES = MIB


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: name of a shape.
        share: the budget is the training state divided by this; 0 asks for the smallest that a plan fits.
        seq_len: tokens per sequence.
        microbatches: of one sequence each, unless ``sequences`` says more.
        sequences: per microbatch.
        data: ``tokens`` or ``text``.
        extra: more settings, ``key=value``.
    """

    model: str
    share: float
    seq_len: int = 512
    microbatches: int = 2
    sequences: int = 1
    data: str = "tokens"
    extra: tuple[str, ...] = field(default=())

    @property
    def title(self) -> str:
        budget = f"1/{self.share:g}" if self.share else "least"
        shape = f"{self.microbatches}x{self.sequences}x{self.seq_len}"
        text = "text " if self.data == "text" else ""
        return (
            f"{self.model} {budget} {shape} {text}{' '.join(e.partition('.')[2] for e in self.extra)}".strip()
        )

    def settings(self, directory: Path, run_dir: Path) -> list[str]:
        place = directory / self.model
        data = ["tokens.npy", "tokens"] if self.data == "tokens" else ["text.txt", "text"]
        return [
            f"model.path={place / 'model'}",
            "model.dtype=fp32",
            f"data.path={place / data[0]}",
            f"data.format={data[1]}",
            f"data.seq_len={self.seq_len}",
            "train.steps=2",
            f"train.tokens_per_step={self.seq_len * self.sequences * self.microbatches}",
            f"train.microbatches={self.microbatches}",
            f"train.run_dir={run_dir}",
            "memory.device=cpu",
            "memory.home=disk",
            *self.extra,
        ]


def cases_of(model: str, thorough: bool) -> list[Case]:
    """The budgets, and where ``thorough`` the settings that change what lies in memory."""
    wanted = [Case(model, share) for share in (*SHARES, 0)]
    if thorough:
        bf16, eager = ("model.dtype=bf16",), ("model.attention=eager",)
        wanted += [
            *(Case(model, 8, microbatches=1, sequences=n) for n in (1, 2)),
            *(Case(model, 8, microbatches=m) for m in (4, 8)),
            *(Case(model, 8, seq_len=s) for s in (128, 1024)),
            *(Case(model, share, extra=bf16) for share in (4, 8, 0)),
            *(Case(model, share, extra=eager) for share in (4, 0)),
            Case(model, 0, seq_len=1024, extra=eager),
            *(Case(model, share, extra=("train.loss=model",)) for share in (2, 0)),
            *(Case(model, share, data="text") for share in (8, 0)),
            Case(model, 0, seq_len=128, microbatches=8),
            Case(model, 4, microbatches=4, sequences=4),
            Case(model, 6, extra=("train.save_every=1", "optimizer.max_grad_norm=0")),
        ]
    return wanted


# --- one case, in a process of its own ------------------------------------------------------------


def run_case(case: Case, directory: Path, run_dir: Path, budget: int) -> dict[str, Any]:
    """Train within ``budget``, and return what was allowed and what was measured, in bytes."""
    import_everything(directory / case.model / "model")
    from outsize.config import load_config
    from outsize.errors import InfeasiblePlanError
    from outsize.runtime.device.heap import own_process
    from outsize.training.run import train

    own_process()  # as `outsize train` does
    base = common.rss_bytes()
    config = load_config(None, [*case.settings(directory, run_dir), f"memory.device_memory={budget}"])
    stages = Stages(base)
    try:
        result = train(config, announce=stages.note, progress=lambda _: stages.note("step"))
    except InfeasiblePlanError as error:
        return {"budget": budget, "infeasible": str(error), "short_by": error.short_by}
    stages.note("end")
    planned = json.loads((run_dir / "plan.json").read_text())["memory_bytes"]["device"]
    allowed = int(SLACK * budget + SLACK_BYTES)
    measured = max(stages.peaks.values())
    return {
        "budget": budget,
        "planned": sum(planned.values()),
        "allowed": allowed,
        "measured": measured,
        "ok": measured <= allowed,
        "stages": stages.peaks,
        "classes": planned,
        "base_rss": base,
        "loss": result.loss,
        "stall_share": result.stall_share,
    }


def import_everything(model: Path) -> None:
    """Import all that a run will: the package, and of transformers the model's own module."""
    import transformers  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import outsize.cli.app
    import outsize.training.run  # noqa: F401

    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(model))]


def find_least(case: Case, directory: Path, run_dir: Path) -> dict[str, Any]:
    """Return the smallest budget that a plan fits, and the error one page below it."""
    from outsize.config import load_config
    from outsize.errors import InfeasiblePlanError
    from outsize.training.forecast import plan

    def refusal(budget: int) -> InfeasiblePlanError:
        try:
            plan(load_config(None, [*case.settings(directory, run_dir), f"memory.device_memory={budget}"]))
        except InfeasiblePlanError as error:
            return error
        raise AssertionError(f"a budget of {budget} bytes was accepted")

    least = HOPELESS_BYTES + refusal(HOPELESS_BYTES).short_by["device"]
    return {"least": least, "one_page_less": str(refusal(least - 4096))}


class Stages:
    """The peak of resident memory above ``base`` in each stage of a run, told apart by what the run announces."""

    NAMES = ("training state", "data:", "starting", "step", "saved", "end")
    LABELS = ("prepare", "data", "fill", "steps", "save", "end")

    def __init__(self, base: int) -> None:
        self._base = base
        self.peaks: dict[str, int] = {}

    def note(self, text: str) -> None:
        label = next(
            (lab for name, lab in zip(self.NAMES, self.LABELS, strict=True) if text.startswith(name)), None
        )
        if label is None:
            return
        self.peaks[label] = max(self.peaks.get(label, 0), common.peak_rss_bytes() - self._base)
        common.reset_peak_rss()


# --- all cases ------------------------------------------------------------------------------------


def child(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    result = common.last_json(done.stdout)
    return result if result is not None else {"failed": done.returncode}


def build(model: str, directory: Path) -> None:
    if not (directory / model / "size.json").exists():
        (directory / model).mkdir(parents=True, exist_ok=True)
        size = child(["--build", model, "--dir", str(directory)])["parameters"]
        (directory / model / "size.json").write_text(json.dumps(size))


def results(arguments: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    models = arguments.models or (["llama-10m"] if arguments.small else ["llama-100m"])
    for model in models:
        build(model, directory)
        state_bytes = 16 * json.loads((directory / model / "size.json").read_text())
        for case in cases_of(model, thorough=arguments.thorough or arguments.small):
            if arguments.only and arguments.only not in case.title:
                continue
            call = ["--case", json.dumps(asdict(case)), "--dir", str(directory)]
            least: dict[str, Any] = {} if case.share else child([*call, "--budget", "0"])
            budget = int(state_bytes / case.share) if case.share else least.get("least", 0)
            found = child([*call, "--budget", str(budget)]) if budget else {}
            yield {"title": case.title, "case": asdict(case), **least, **found}
            print(f"{case.title}: {row_of({'title': '', **found})[1:]}", file=sys.stderr, flush=True)


def row_of(found: dict[str, Any]) -> list[object]:
    if "measured" not in found:
        return [found["title"], *[None] * 4, found.get("infeasible", "failed")[:60], "-"]
    sizes = [f"{found[key] / MIB:.1f}" for key in ("budget", "planned", "allowed", "measured")]
    worst = max(found["stages"], key=found["stages"].get)
    return [found["title"], *sizes, worst, "yes" if found["ok"] else "NO"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the 10M model, thoroughly")
    parser.add_argument(
        "--thorough", action="store_true", help="more than the budgets: dtype, lengths, attention"
    )
    parser.add_argument("--models", nargs="*", choices=shapes.SHAPES)
    parser.add_argument("--only", help="cases whose title holds this")
    parser.add_argument("--dir", type=Path, help="where models and homes lie; kept if given")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--build", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        print(json.dumps({"parameters": shapes.write(arguments.build, arguments.dir / arguments.build)}))
        return
    if arguments.case:
        values = json.loads(arguments.case)
        case = Case(**values | {"extra": tuple(values["extra"])})
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="case-") as scratch:
            place = (arguments.dir, Path(scratch) / "run")
            result = (
                run_case(case, *place, arguments.budget) if arguments.budget else find_least(case, *place)
            )
            print(json.dumps(result))
        return
    build = Path("build")
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="bench-budget-") as name:
        directory = arguments.dir or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        report(arguments, list(results(arguments, directory)))


def report(arguments: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    headers = ("case", "budget", "plan", "allowed", "peak", "worst in", "ok")
    common.print_table(headers, map(row_of, found), title="Peak resident memory beyond the imports, MiB")
    for one in found:
        if one.get("one_page_less"):
            print(f"{one['title']}, one page less: {one['one_page_less']}")
    common.finish(
        {
            "bench": "budget",
            "machine": common.machine(),
            "ok": all(one.get("ok", "infeasible" in one) for one in found),
            "cases": found,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
