"""What does packing gain where documents are short, and what do borders between them cost?

Docstrings of Python's standard library, a document each, train the 34M Llama from host memory: a sequence for each
(``none``), the same in batches of about equal length (``by length``), as many whole ones as a sequence has room for
(``documents``), and end to end with no borders (``stream``). Each is a process of its own, by turns, that warms
up for an epoch and is timed for another, so that all have seen the same documents, up to
those that fill the last step. What counts is the
time for a trained token: neither padding nor the first token of a document is one, though ``stream`` trains that, too.
"""

import argparse
import ast
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outsize.spin import SPIN_TURNS

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)  # as `outsize train` does, before torch reads it

sys.path.insert(0, str(Path(__file__).parent))
import common
import shapes

VARIANTS = {
    "none": ("data.pack=none",),
    "by length": ("data.pack=none", "data.group_by_length=true"),
    "documents": ("data.pack=documents",),
    "stream": ("data.pack=stream",),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[str]:
    """Yield every docstring of the standard library's own modules, in the order of files."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text:
                yield text


def write(args: argparse.Namespace) -> dict[str, Any]:
    """Write the model, its tokenizer and the documents."""
    found = list(docstrings())
    documents = found[:: max(1, len(found) // args.documents)][: args.documents]
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (args.dir / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"parameters": shapes.write(args.model, args.dir), "documents": len(documents)}


def train(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Train some steps; return seconds and trained tokens of each, and what the run says of padding."""
    from outsize.config import load_config
    from outsize.training.records import StepRecord
    from outsize.training.run import train

    steps: list[StepRecord] = []
    said: list[str] = []
    overrides = [
        f"model.path={args.dir / 'model'}",
        "model.dtype=fp32",
        f"data.path={args.dir / 'documents.jsonl'}",
        f"data.seq_len={args.seq_len}",
        *VARIANTS[variant],
        "train.epochs=2",
        f"train.tokens_per_step={args.tokens_per_step}",
        f"train.microbatches={args.microbatches}",
        f"memory.device_memory={args.device_memory}",
        "memory.device=cpu",
        "memory.home=host",
    ]
    with tempfile.TemporaryDirectory(dir=args.dir) as run_dir:
        config = load_config(None, [*overrides, f"train.run_dir={run_dir}"])
        train(config, announce=said.append, progress=steps.append)
    timed = steps[len(steps) // 2 :]
    return {
        "seconds": [step.seconds for step in timed],
        "tokens": [step.tokens for step in timed],
        "said": [line for text in said for line in text.splitlines() if "padding" in line],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=shapes.SHAPES, default="llama-34m")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--documents", type=int, default=128, help="spread over the library")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device-memory", default="3GiB")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(write(args) if args.child == "model" else train(args, args.child)))
        return
    with tempfile.TemporaryDirectory(prefix="outsize-packing-") as place:
        data = common.run_child("model", Path(place))
        runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant in VARIANTS:
                runs[variant].append(common.run_child(variant, Path(place)))
    report(args, data, runs)


def report(args: argparse.Namespace, data: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print the table and end with the JSON line."""
    cases: dict[str, dict[str, Any]] = {}
    for variant, found in runs.items():
        rates = [sum(run["tokens"]) / sum(run["seconds"]) for run in found]
        cases[variant] = {
            "steps": len(found[0]["seconds"]),
            "tokens": sum(found[0]["tokens"]),
            "epoch_s": [sum(run["seconds"]) for run in found],
            "tokens_per_s": common.Spread.of(rates).median,
            "said": found[0]["said"],
        }
    slowest = cases["none"]["tokens_per_s"]
    for case in cases.values():
        case["gain"] = case["tokens_per_s"] / slowest
    common.print_table(
        ("data.pack", "steps of an epoch", "its trained tokens", "a second", "to none"),
        [
            (name, case["steps"], case["tokens"], case["tokens_per_s"], case["gain"])
            for name, case in cases.items()
        ],
        title=f"{data['documents']} docstrings, {args.tokens_per_step} tokens per step of {args.seq_len} a sequence",
    )
    common.finish(
        {
            "bench": "packing",
            "machine": common.machine(),
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "dir", "child")},
            **data,
            "cases": cases,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
