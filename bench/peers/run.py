"""How does streaming compare with the peers in time, memory, disk traffic and exactness?

    python bench/peers/setup.sh                      # once: one virtual environment per peer
    python bench/peers/run.py --repeats 3 --output bench/results/peers.json

Every run is a fresh process that trains the same model on the same batches. With more than one repeat the
runners take turns, so that a slow minute of the machine falls on all of them. A peer that is not installed or
fails is a row with its error.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import prepare  # noqa: E402
from common import Spread, finish, last_json, machine, print_table, ratio  # noqa: E402

from outsize.spin import SPIN_TURNS  # noqa: E402

DIRECTORY = Path(os.environ.get("PEERS_DIR", HERE.parents[1] / "build" / "peers"))
BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments


@dataclass(frozen=True)
class Runner:
    """One row: a script, its variant, and the virtual environment it runs in."""

    script: str
    option: str = ""
    environment: str | None = None
    """None is the environment of this process, which has `outsize`."""
    share: float = 1.0
    """The budget of a streamed runner, as a share of the training state of 16 bytes per parameter."""

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        if self.environment is None:
            return Path(sys.executable)
        return DIRECTORY / "venvs" / self.environment / "bin" / "python"


REFERENCE = "resident"
RUNNERS = {
    REFERENCE: Runner("run_resident.py", "", "resident"),
    "resident-no-checkpointing": Runner("run_resident.py", "no-checkpointing", "resident"),
    "outsize-host": Runner("run_outsize.py", "host"),
    "fsdp2": Runner("run_fsdp2.py", "", "fsdp2"),
    "outsize-host-half": Runner("run_outsize.py", "host", share=0.5),
    "outsize-disk": Runner("run_outsize.py", "disk"),
    "outsize-disk-half": Runner("run_outsize.py", "disk", share=0.5),
    "resident-compiled": Runner("run_resident.py", "compiled", "resident"),
    "outsize-host-compiled": Runner("run_outsize.py", "host-compiled"),
    "fsdp2-compiled": Runner("run_fsdp2.py", "compiled", "fsdp2"),
    "outsize-disk-compiled": Runner("run_outsize.py", "disk-compiled"),
    "deepspeed": Runner("run_deepspeed.py", "", "deepspeed"),
    "deepspeed-pipelined": Runner("run_deepspeed.py", "pipelined", "deepspeed"),
}
# Known to fail or to train wrongly, see README.md; only run when named.
BROKEN = {
    "deepspeed-initialize": Runner("run_deepspeed.py", "initialize", "deepspeed"),
    "deepspeed-non-reentrant": Runner("run_deepspeed.py", "non-reentrant", "deepspeed"),
}


def measure(name: str, runner: Runner, arguments: argparse.Namespace, state_bytes: int) -> dict[str, Any]:
    """Run one runner in a fresh process; return what it printed, or ``{"error": ...}``."""
    if not runner.python.exists():
        return {"error": f"not installed: run bench/peers/setup.sh {runner.environment}"}
    run_dir = arguments.work / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    log = arguments.work / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(runner.python), str(HERE / runner.script), "--option", runner.option]
    command += ["--model", str(arguments.work / "data/model"), "--data", str(arguments.work / "data")]
    command += ["--run-dir", str(run_dir), "--device-memory", str(int(runner.share * state_bytes))]
    command += [f"--{key}={getattr(arguments, key)}" for key in ("steps", "warmup", "threads")]
    try:
        with log.open("w", encoding="utf-8") as errors:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(runner, arguments.threads),
                timeout=arguments.timeout,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {arguments.timeout:.0f} s; see {log}"}
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    result = last_json(done.stdout) if done.returncode == 0 else None
    return result if result and "seconds" in result else {"error": _last_words(log, done.returncode)}


def _environment(runner: Runner, threads: int) -> dict[str, str]:
    """The environment of a runner: its tools first, the same threads everywhere, one process, no network."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # a launcher's words to its only process
    ours = {"GOMP_SPINCOUNT": SPIN_TURNS}  # as `outsize train` does
    return (
        os.environ
        | {
            "PATH": f"{runner.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(runner.python.parents[1] / "extensions"),
        }
        | (ours if runner.environment is None else alone)
    )


def _last_words(log: Path, returncode: int) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    error = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no message")
    return f"exit status {returncode}: {error[:300]}"


def summarise(runs: list[dict[str, Any]], num_parameters: int) -> dict[str, Any]:
    """Pool the repeats of one runner into medians over the steps that count."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"error": runs[-1]["error"]}
    seconds = Spread.of(second for run in good for second in run["seconds"][run["warmup"] :])
    usage = [step for run in good for step in run["usage"][run["warmup"] :]]
    medians = {key: Spread.of(step[key] for step in usage).median for key in usage[0]}
    return {
        "seconds_per_step": seconds.median,
        "seconds_low": seconds.low,
        "seconds_high": seconds.high,
        "cpu_s_per_step": medians["cpu_s"],
        "read_bytes_per_step": medians["read_bytes"],
        "write_bytes_per_step": medians["write_bytes"],
        "read_bytes_per_parameter": medians["read_bytes"] / num_parameters,
        "write_bytes_per_parameter": medians["write_bytes"] / num_parameters,
        "peak_above_imports_bytes": max(run["peak_rss_bytes"] - run["imported_rss_bytes"] for run in good),
        "steady_above_imports_bytes": _steady(good),
        "losses": good[0]["losses"],
        "final_loss": good[0]["losses"][-1],
        "failed_repeats": len(runs) - len(good),
        "runs": runs,
    }


def _steady(runs: list[dict[str, Any]]) -> int | None:
    if any(run["steady_peak_rss_bytes"] is None for run in runs):
        return None
    return max(int(run["steady_peak_rss_bytes"] - run["imported_rss_bytes"]) for run in runs)


def compare(summaries: dict[str, dict[str, Any]]) -> None:
    """Add to every summary how it relates to the reference: time, loss."""
    reference = summaries.get(REFERENCE, {})
    for summary in summaries.values():
        if "error" in summary or "losses" not in reference:
            continue
        summary["ratio_to_resident"] = ratio(summary["seconds_per_step"], reference["seconds_per_step"])
        differences = [abs(a - b) for a, b in zip(summary["losses"], reference["losses"], strict=True)]
        summary["max_loss_difference"] = max(differences)


def show(summaries: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    headers = ["runner", "step s", "±", "x resident", "CPU s", "peak MiB", "steady MiB", "read B/param"]
    headers += ["write B/param", "final loss", "max |loss - resident|"]
    rows: list[list[object]] = []
    for name, summary in summaries.items():
        if "error" in summary:
            rows.append([name, *[None] * (len(headers) - 1)])
            continue
        spread = (summary["seconds_high"] - summary["seconds_low"]) / 2 / summary["seconds_per_step"]
        steady = summary["steady_above_imports_bytes"]
        rows.append(
            [
                name,
                summary["seconds_per_step"],
                f"{spread:.0%}",
                summary.get("ratio_to_resident"),
                summary["cpu_s_per_step"],
                summary["peak_above_imports_bytes"] >> 20,
                None if steady is None else steady >> 20,
                f"{summary['read_bytes_per_parameter']:.2f}",
                f"{summary['write_bytes_per_parameter']:.2f}",
                f"{summary['final_loss']:.6f}",
                _difference(summary.get("max_loss_difference")),
            ]
        )
    print_table(headers, rows)
    for name, summary in summaries.items():
        if "error" in summary:
            print(f"{name}: {summary['error']}")
    print("Memory: beyond what was resident after the imports; peak of the whole run, and after the warm-up.")


def _difference(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}" if value else "0"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    prepare.add_arguments(parser)
    parser.add_argument("--warmup", type=int, default=2, help="leading steps that do not count")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=[*RUNNERS, *BROKEN], default=list(RUNNERS))
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds per process")
    parser.add_argument(
        "--work", type=Path, default=DIRECTORY / "work", help="directory on the disk to measure"
    )
    parser.add_argument("--output", type=Path, help="keep the JSON object here as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    names = ("size", "steps", "microbatches", "tokens_per_step", "seq_len")
    job = {name: getattr(arguments, name) for name in names}
    shutil.rmtree(arguments.work / "data", ignore_errors=True)
    num_parameters = prepare.prepare(arguments.work / "data", **job)
    state_bytes = BYTES_PER_PARAMETER * num_parameters
    runners = {name: runner for name, runner in {**RUNNERS, **BROKEN}.items() if name in arguments.only}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in runners}
    for repeat in range(arguments.repeats):
        for name, runner in runners.items():
            print(f"repeat {repeat + 1} of {arguments.repeats}: {name}", file=sys.stderr, flush=True)
            runs[name].append(measure(name, runner, arguments, state_bytes))
    shutil.rmtree(arguments.work / "data")
    summaries = {name: summarise(results, num_parameters) for name, results in runs.items()}
    compare(summaries)
    show(summaries)
    facts = {**job, "repeats": arguments.repeats, "warmup": arguments.warmup, "threads": arguments.threads}
    facts |= {"parameters": num_parameters, "state_bytes": state_bytes, "machine": machine()}
    finish({"benchmark": "peers", **facts, "runners": summaries}, arguments.output)


if __name__ == "__main__":
    main()
