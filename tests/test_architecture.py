"""The arrows of the house: which room may lean on which. docs/architecture.md draws them."""

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outsize

SOURCE = Path(outsize.__file__).parent
GROUND = {"errors", "units"}
FILES = {"files"}
CHOICES = {"choices"}
# room -> what it may import: a whole room, or one module of it. Its own modules are always allowed.
ARROWS = {
    "errors": {"units"},
    "choices": set(),
    "files": set(),
    "units": set(),
    "config": GROUND | CHOICES,
    "native": set(),
    "hardware": GROUND | {"native.library"},
    "codecs": GROUND | {"native"},
    "model": GROUND | FILES | {"codecs.spec"},
    "optim": GROUND | {"codecs", "model.spec", "native"},
    "planner": GROUND
    | CHOICES
    | {
        "hardware.spec",
        "model.spec",
        "codecs.spec",
        "codecs.transport",
        "codecs.wire",
        "optim.shares",
        "optim.spec",
    },
    "storage": GROUND | FILES | {"codecs", "model.spec", "optim.spec"},
    "group": GROUND,
    "runtime": GROUND | {"codecs", "group", "hardware", "model", "optim", "planner", "storage"},
    "data": GROUND | FILES | {"runtime.allocator"},
    "probe": GROUND
    | {
        "codecs",
        "data",
        "hardware",
        "model.spec",
        "native.library",
        "optim",
        "planner.hazards",
        "planner.lanes",
        "planner.ops",
        "runtime",
        "storage",
    },
    "doctor": GROUND | {"hardware", "telemetry.schema"},
    "telemetry": GROUND | {"hardware"},
    "report": GROUND | {"doctor", "planner", "telemetry"},
    "train": GROUND
    | FILES
    | CHOICES
    | {
        "native.library",
        "codecs",
        "config",
        "data",
        "group",
        "hardware",
        "model",
        "optim",
        "planner",
        "probe",
        "report",
        "runtime",
        "storage",
        "telemetry",
    },
    "inference": GROUND | {"codecs", "hardware", "model", "planner", "runtime", "storage"},
    "wrapped": GROUND
    | CHOICES
    | {
        "codecs",
        "config",
        "hardware",
        "inference",
        "model",
        "optim",
        "planner",
        "runtime",
        "storage",
        "train",
    },
    "cli": GROUND
    | CHOICES
    | {
        "codecs.wire",
        "config",
        "doctor",
        "group",
        "hardware",
        "model",
        "optim.spec",
        "planner",
        "probe",
        "report",
        "train",
        "wrapped",
    },
}
# Imported by no room: these stand on top of the others.
TOPS = {"__main__": {"cli"}, "__init__": set(ARROWS), "testing": set(ARROWS) - {"cli"}}
TORCH_FREE = [
    "native",
    "planner",
    "config",
    "hardware",
    "doctor",
    "telemetry",
    "report",
    "model/spec.py",
    "model/spec_from_config.py",
    "model/workload.py",
    "cli/plan.py",
    "cli/plan_question.py",
    "cli/plan_table.py",
    "cli/doctor.py",
    "cli/doctor_text.py",
    "codecs/spec.py",
    "codecs/transport.py",
    "codecs/wire.py",
    "optim/shares.py",
    "optim/spec.py",
]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line, dotted module)`` of every import, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module
            # `from outsize.train import run` names a module as well.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_allowed(room: str, module: str) -> bool:
    target = module.removeprefix("outsize.")
    if target == "__version__":
        return True
    allowed = (ARROWS | TOPS)[room] | {room}
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def breaches(path: Path) -> list[str]:
    room = room_of(path)
    return [
        f"{path.relative_to(SOURCE.parent)}:{line}: {room} must not import {module}"
        for line, module in imports(path)
        # `from outsize.model import spec` also yields `outsize.model`, which the second form then judges.
        if module.startswith("outsize.")
        and not is_allowed(room, module)
        and not is_prefix_only(path, line, module)
    ]


def is_prefix_only(path: Path, line: int, module: str) -> bool:
    """Whether ``module`` is a package of which the same import statement names an allowed module."""
    room = room_of(path)
    return any(
        other_line == line and other.startswith(f"{module}.") and is_allowed(room, other)
        for other_line, other in imports(path)
    )


def test_every_room_is_on_the_map():
    assert {room_of(path) for path in files()} <= ARROWS.keys() | TOPS.keys()


def test_the_map_has_no_cycles():
    """A room comes after everything it leans on, so whole rooms can be understood one after the other."""
    left = {room: {name.partition(".")[0] for name in allowed} for room, allowed in ARROWS.items()}
    while left:
        done = [room for room, allowed in left.items() if not allowed & left.keys()]
        assert done, f"cycle among {sorted(left)}"
        for room in done:
            del left[room]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    assert breaches(path) == []


def test_the_documentation_draws_the_same_arrows():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    drawn = {room.strip(" `"): set(allowed.replace("`", " ").split()) for room, _, allowed in rows}
    assert drawn == {room: allowed for room, allowed in ARROWS.items() if room in drawn}
    standing = {room_of(path) for path in files()} - TOPS.keys()
    assert drawn.keys() == standing


def test_planner_and_storage_do_not_know_each_other():
    assert not is_allowed("planner", "outsize.storage")
    assert not is_allowed("storage", "outsize.planner")


def test_only_train_wrapped_and_cli_read_the_configuration():
    assert {room for room, allowed in ARROWS.items() if "config" in allowed} == {"train", "wrapped", "cli"}


def torch_free_modules() -> list[str]:
    names = []
    for entry in TORCH_FREE:
        path = SOURCE / entry
        if path.is_file():
            names.append(f"outsize.{entry.removesuffix('.py').replace('/', '.')}")
        elif path.is_dir():
            package = f"outsize.{entry}"
            names += [package, *(m.name for m in pkgutil.walk_packages([str(path)], f"{package}."))]
    return names


def test_the_deciding_half_loads_no_torch():
    """Not even through what it imports: a plan is made on a machine that has no torch."""
    statements = "".join(f"import {name}\n" for name in torch_free_modules())
    check = "import sys\nassert not {'torch', 'transformers'} & sys.modules.keys()\n"
    done = subprocess.run(
        [sys.executable, "-c", statements + check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((SOURCE / "planner").rglob("*.py")), ids=lambda path: path.name)
def test_the_planner_knows_no_clock_thread_or_file(path):
    modules = {module.partition(".")[0] for _, module in imports(path)}
    assert not modules & {
        "torch",
        "time",
        "threading",
        "queue",
        "os",
        "pathlib",
        "io",
        "subprocess",
        "asyncio",
    }
