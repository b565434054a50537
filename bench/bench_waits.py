"""Which waits of the source no test misses: each is taken out, one at a time, and tests are run on a late device.

Found in the syntax tree, not in a list, in the rooms that touch streams (`ROOMS`):

* statements that do nothing but call `wait`, `wait_event`, `hold`, `record_stream`, `synchronize`, `catch_up` or
  `finish`;
* marks: calls of `record` and `mark`, whose value is None then: nobody waits for what they would have marked;
* `query`, whose value is True then: what is under way counts as done;
* `lane` and `behind`: what they surround goes to whichever stream is the current one;
* `take` of a caller, which is handed on as a function, and does nothing then.

Waits for time, and those of `Threads` on each other outside the executor, order no stream and are not counted; nor are
probes, whose waits surround what a clock measures: without them a figure is wrong, and never a bit.

A source without one has to fail a test on the made-up accelerator (docs/testing.md), in one of the profiles. What
survives is not needed, or not tested: `EXPLAINED` says which of them are left in the source, and why.

One process imports torch and transformers once, and forks one for each trial; the tests that are nearest go first.

    python bench/bench_waits.py --list
    python bench/bench_waits.py --output bench/results/waits_2026-11.json [--only runtime/device]
"""

import argparse
import ast
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outsize"
ROOMS = ("runtime", "inference", "wrapped", "session", "training", "checkpoint")
STATEMENTS = {"wait", "wait_event", "hold", "record_stream", "synchronize", "finish", "catch_up", "record"}
# What takes the place of a call whose value is used.
VALUES = {
    "record": "None",
    "mark": "None",
    "query": "True",
    "lane": "__import__('contextlib').nullcontext()",
    "behind": "__import__('contextlib').nullcontext()",
}
# Who is asked: a `record` of an account is no mark, a `wait` of a clock waits for no work.
ASKED = (
    "device",
    "devices[",
    ".of(",
    "stream",
    "mark",
    "event",
    "caller",
    "engine",
    "executor",
    "task",
    "saver",
)
ASKED += ("dependency", "tensor", "value", "other", "accelerator", "origin", "_waits", "ended", "_torch")
PROFILES = ("late-copies", "late-kernels")
# A mutant that hangs is noticed, too.
LIMIT_S = 400
EQUAL = "tests/accelerator/test_equal_to_resident.py"
CUDA = "tests/gpu/test_cuda.py"
# These need no device: what they miss is the order of threads.
SAVING, EVALUATION = "tests/train/test_saving.py", "tests/train/test_evaluation.py"
ACCOUNTS = "tests/train/test_accounts.py"
CUT_SHORT = (
    "tests/runtime/test_engine.py"
    "::test_a_checkpoint_that_an_error_cut_short_is_whole_when_its_rest_has_been_stored"
)
FAILURE = "tests/bad_input/test_failures.py::test_the_run_before_the_exception_can_be_continued"
# By the beginning of a file's path: the tests to try before all others.
NEAR = {
    "inference": tuple(
        f"tests/gpu/test_generate.py::test_greedy_tokens_are_those_of_the_resident_model[llama-{home}]"
        for home in ("host", "disk")
    ),
    "wrapped": (
        f"{EQUAL}::test_a_wrapped_model_waits_for_inputs_that_are_on_their_way",
        "tests/gpu/test_wrap.py::test_losses_and_gradients_on_a_gpu[3-host]",
    ),
    "runtime/ops/co": (f"{EQUAL}::test_the_set_of_the_seeds[two devices, encoded]",),
    "runtime/ops": (
        f"{CUDA}::test_whatever_becomes_of_activations[offload-host]",
        f"{CUDA}::test_streamed_is_resident_bit_for_bit[fp32-host-offloaded]",
    ),
    "runtime/engine/workers": ("tests/gpu/test_workers_on_cuda.py::test_other_families[gemma2]",),
    "runtime/engine/engine": (CUT_SHORT, SAVING, EVALUATION, FAILURE),
    "runtime/engine": (
        f"{EQUAL}::test_the_set_of_the_seeds[on disk, offloaded]",
        "tests/gpu/test_wrap.py::test_losses_and_gradients_on_a_gpu[3-host]",
        "tests/accelerator/test_faults.py",
    ),
    "runtime/forward": (f"{EQUAL}::test_the_set_of_the_seeds[two devices, encoded]",),
    "runtime": (
        f"{EQUAL}::test_the_set_of_the_seeds[on disk, offloaded]",
        f"{EQUAL}::test_the_set_of_the_seeds[two devices, encoded]",
    ),
    "session/stream": (ACCOUNTS, SAVING, EVALUATION, FAILURE),
    "training/loop": (SAVING, EVALUATION, FAILURE),
    "checkpoint": (SAVING, EVALUATION, FAILURE),
    "": (f"{EQUAL}::test_a_run_goes_on_to_the_same_bits", "tests/accelerator/test_faults.py"),
}
MADE_FOR_IT = tuple(
    str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/accelerator/test_waits*.py"))
)
ALL = (
    *MADE_FOR_IT,
    EQUAL,
    "tests/accelerator/test_faults.py",
    "tests/gpu/test_generate.py",
    "tests/gpu/test_wrap.py",
)
# Why the source keeps what no test misses, by file and what its line holds.
CLOCK = "what a clock measures ends there: without it a figure is wrong, and no bit"
EXPLAINED: dict[tuple[str, str], str] = {
    ("runtime/device/device.py", "self._origin.synchronize()"): CLOCK,
    (
        "runtime/device/device_group.py",
        "self.devices[target].behind(name)",
    ): "a stream of its own, so that what comes from two workers does not wait for each other: speed, and no bit",
    (
        "inference/loader.py",
        'self._device.lane("up")',
    ): "without it loads are in the caller's own order: slower, no bit",
    ("runtime/engine/executor.py", "dependency.mark.query()"): "which op a timeline says was waited for",
    ("runtime/engine/executor.py", "timed.ended.query()"): CLOCK,
    ("runtime/engine/executor.py", "begun = time.perf_counter(), self._device.record(lane)"): CLOCK,
    ("inference/loader.py", "self._waits[0][1].query()"): CLOCK,
    ("accelerators.py", "module_of(device).synchronize(device)"): CLOCK,
    ("session/job/machine.py", "torch.accelerator.synchronize(source)"): CLOCK,
    ("session/job/machine.py", "torch.accelerator.synchronize(target)"): CLOCK,
}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A call that can be taken out.

    Attributes:
        file: below the package.
        line: where it begins.
        column: of that line.
        text: of the call.
    """

    file: str
    line: int
    column: int
    text: str


def waits() -> Iterator[Wait]:
    """Yield every such call of the rooms that touch streams."""
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            finder = _Finder()
            finder.visit(ast.parse(path.read_text(encoding="utf-8")))
            for node in finder.found:
                yield Wait(
                    file=str(path.relative_to(SOURCE)),
                    line=node.lineno,
                    column=node.col_offset,
                    text=ast.unparse(node),
                )


class _Finder(ast.NodeTransformer):
    """Finds what can be taken out, and takes out the one at a place."""

    def __init__(self, line: int = 0, column: int = 0) -> None:
        self.found: list[ast.expr] = []
        self._place = line, column

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _asks(node.value, STATEMENTS):
            return ast.copy_location(ast.Pass(), node) if self._notes(node.value) else node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _asks(node, VALUES.keys()):
            assert isinstance(node.func, ast.Attribute)
            instead = ast.parse(VALUES[node.func.attr], mode="eval").body
            return ast.copy_location(instead, node) if self._notes(node) else node
        self.generic_visit(node)
        for index, argument in enumerate(node.args):
            is_take = isinstance(argument, ast.Attribute) and argument.attr == "take"
            if is_take and "caller" in ast.unparse(argument) and self._notes(argument):
                node.args[index] = ast.parse("lambda value: None", mode="eval").body
        return node

    def _notes(self, node: ast.expr) -> bool:
        self.found.append(node)
        return (node.lineno, node.col_offset) == self._place


def _asks(node: ast.expr, names: object) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "catch_up" and node.func.id in names  # type: ignore[operator]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    asked = ast.unparse(node.func.value).lower()
    is_of_streams = node.func.attr == "catch_up" or any(each in asked for each in ASKED)
    return node.func.attr in names and is_of_streams  # type: ignore[operator]


def reason(wait: Wait) -> str | None:
    """Return why the source keeps ``wait`` though no test misses it; None where nobody has said."""
    line = (SOURCE / wait.file).read_text(encoding="utf-8").splitlines()[wait.line - 1]
    return next((why for (file, part), why in EXPLAINED.items() if file == wait.file and part in line), None)


def take_out(wait: Wait) -> None:
    """Have this process import the package without ``wait``."""
    path = SOURCE / wait.file
    tree = _Finder(wait.line, wait.column).visit(ast.parse(path.read_text(encoding="utf-8")))
    code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
    ordinary = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str):  # type: ignore[no-untyped-def]
        return code if Path(self.path) == path else ordinary(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def warm_up() -> None:
    """Import what every trial imports, but not the package."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    names = (
        "torch",
        "torch._meta_registrations",
        "transformers",
        "pytest",
        "numpy",
        "safetensors.torch",
        "peft",
    )
    for name in (*names, "transformers.modeling_utils", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    assert "outsize" not in sys.modules


def failure(wait: Wait | None, tests: tuple[str, ...], profile: str, seed: int) -> str | None:
    """Return the first of ``tests`` that fails without ``wait``, in a process of its own; None where none does."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            _try(wait, tests, profile, seed, output.fileno())
        until = time.monotonic() + LIMIT_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hung"
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        told = output.read().splitlines()
    if code == 0:
        return None
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit("\n".join([f"these are no tests: {' '.join(tests)}", *told[-3:]]))
    failed = [line.split(" - ")[0] for line in told if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" ")[2] if failed else f"exit {code}: {told[-3:]}"


def _try(wait: Wait | None, tests: tuple[str, ...], profile: str, seed: int, output: int) -> None:
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        if wait is not None:
            take_out(wait)
        options = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "--accelerator=late",
            "-m",
            "not slow",
        ]
        options += ["--assert=plain", "--tb=line", f"--lateness={profile}", f"--late-seed={seed}"]
        code = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def noticed_by(wait: Wait, seed: int, profiles: Sequence[str], *, only_near: bool) -> str | None:
    """Return the profile and the first test that fails without ``wait``; None where none does."""
    near = next(tests for prefix, tests in NEAR.items() if wait.file.startswith(prefix))
    rest = tuple(each for each in ALL if each not in MADE_FOR_IT)
    for tests in ((*MADE_FOR_IT, *near), () if only_near else rest):
        if not tests:
            break
        for profile in profiles:
            found = failure(wait, tests, profile, seed)
            if found is not None:
                return f"{profile}: {found}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what would be taken out")
    parser.add_argument("--only", nargs="+", default=[""], help="of places that begin so: file, or file:line")
    parser.add_argument("--near", action="store_true", help="try the nearest tests alone")
    parser.add_argument("--profiles", nargs="+", default=PROFILES, choices=PROFILES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = [wait for wait in waits() if f"{wait.file}:{wait.line}".startswith(tuple(args.only))]
    if args.list:
        print("\n".join(f"{wait.file}:{wait.line}: {wait.text}" for wait in found))
        print(f"{len(found)} can be taken out")
        return
    warm_up()
    rows = []
    for wait in found:
        began = time.perf_counter()
        by = noticed_by(wait, args.seed, args.profiles, only_near=args.near)
        why = None if by else reason(wait)
        rows.append(
            {**asdict(wait), "noticed_by": by, "why": why, "seconds": round(time.perf_counter() - began, 1)}
        )
        print(
            f"{wait.file}:{wait.line}: {wait.text}: {by or why or 'SURVIVES'} ({rows[-1]['seconds']} s)",
            flush=True,
        )
        if args.output:
            args.output.write_text(json.dumps(rows, indent=1) + "\n")
    survive = [row for row in rows if row["noticed_by"] is None]
    unexplained = sum(row["why"] is None for row in survive)
    print(f"{len(survive)} of {len(rows)} survive, {unexplained} of them without a reason")


if __name__ == "__main__":
    main()
