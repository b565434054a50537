"""Which waits of the source no test misses: each is taken out, one at a time, and the tests are run on a late device.

Found in the syntax tree, not in a list: statements that do nothing but call `wait`, `wait_event`, `hold`,
`record_stream`, `synchronize`, or a caller's `finish` and `take`. A copy of the source without one has to fail a
test on the made-up accelerator (docs/testing.md), in one of the profiles. What survives is not needed, or not tested.

    python bench/bench_waits.py --list
    python bench/bench_waits.py --output bench/results/waits.json [--only runtime/device]
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outsize"
ROOMS = ("runtime", "inference", "wrapped", "session", "training")
CALLS = {"wait", "wait_event", "hold", "record_stream", "synchronize", "finish", "take"}
PROFILES = ("late-copies", "late-kernels")
TESTS = ("tests/accelerator",)
# A mutant that hangs is noticed, too.
LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A statement that can be taken out.

    Attributes:
        file: below the package.
        line: its first.
        text: of the statement.
    """

    file: str
    line: int
    text: str


def waits() -> Iterator[Wait]:
    """Yield every such statement of the rooms that touch streams."""
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Expr) and _is_wait(node.value):
                    yield Wait(
                        file=str(path.relative_to(SOURCE)), line=node.lineno, text=ast.unparse(node.value)
                    )


def _is_wait(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CALLS


def without(wait: Wait, into: Path) -> None:
    """Copy the package to ``into`` and take the statement out of the copy."""
    shutil.copytree(SOURCE, into / "outsize", ignore=shutil.ignore_patterns("__pycache__"))
    path = into / "outsize" / wait.file
    tree = ast.parse(path.read_text(encoding="utf-8"))

    class Out(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            found = node.lineno == wait.line and _is_wait(node.value)
            return ast.copy_location(ast.Pass(), node) if found else node

    path.write_text(ast.unparse(Out().visit(tree)), encoding="utf-8")


def noticed_by(source: Path, tests: tuple[str, ...], seed: int) -> str | None:
    """Return the profile and the first test that fails on ``source``; None where none does."""
    for profile in PROFILES:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--accelerator=late"]
        command += [f"--lateness={profile}", f"--late-seed={seed}", "-m", "not slow", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(source)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{profile}: hung"
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return f"{profile}: {failed[0] if failed else f'exit {done.returncode}'}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what would be taken out")
    parser.add_argument("--only", default="", help="of files whose path begins so")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = [wait for wait in waits() if wait.file.startswith(args.only)]
    rows = []
    for wait in found:
        if args.list:
            print(f"{wait.file}:{wait.line}: {wait.text}")
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            without(wait, Path(directory))
            by = noticed_by(Path(directory), tuple(args.tests), args.seed)
        rows.append({**asdict(wait), "noticed_by": by, "seconds": round(time.perf_counter() - began, 1)})
        print(f"{wait.file}:{wait.line}: {wait.text}: {by or 'SURVIVES'}", flush=True)
        if args.output:
            args.output.write_text(json.dumps(rows, indent=1) + "\n")
    if not args.list:
        print(f"{sum(row['noticed_by'] is None for row in rows)} of {len(rows)} survive")


if __name__ == "__main__":
    main()
