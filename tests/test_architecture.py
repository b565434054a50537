"""The arrows of the house: which room may lean on which. docs/architecture.md draws them."""

import ast
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import outsize

SOURCE = Path(outsize.__file__).parent
GROUND = {"errors", "files", "units"}
# room -> what it may import: a room with all the rooms in it, or one module of it. Its own modules are always allowed.
ARROWS = {
    "errors": {"units"},
    "units": set(),
    "files": set(),
    "choices": set(),
    "detail": set(),
    "spin": set(),
    "local_server": {"errors"},
    "user_cache": set(),
    "accelerators": {"errors"},
    "config": GROUND | {"accelerators", "choices", "codecs.codec_spec", "optim.optimizer_names"},
    "native": set(),
    "hardware": GROUND | {"accelerators", "native.library"},
    "codecs": GROUND | {"accelerators", "native"},
    "model.sizes": GROUND,
    "checkpoint.files": GROUND | {"model.sizes"},
    "compat": set(),
    "model": GROUND | {"accelerators", "checkpoint.files", "choices", "codecs", "compat", "model.sizes"},
    "optim": GROUND | {"choices", "codecs", "compat", "model.sizes.model_spec", "native"},
    "planner.program": GROUND | {"optim.optimizer_spec"},
    "planner.memory": GROUND
    | {
        "codecs.transport",
        "model.sizes",
        "optim.optimizer_spec",
        "optim.shares",
        "planner.program",
    },
    "planner.passes": GROUND | {"planner.memory", "planner.program"},
    "planner.simulate": GROUND
    | {
        "codecs.codec_spec",
        "codecs.transport",
        "hardware.machine_spec",
        "model.sizes",
        "optim.optimizer_spec",
        "planner.memory",
        "planner.program",
    },
    "planner.search": GROUND
    | {
        "choices",
        "codecs.transport",
        "model.sizes",
        "optim.optimizer_spec",
        "optim.shares",
        "planner.memory",
        "planner.passes",
        "planner.program",
        "planner.simulate",
    },
    "planner.predict": GROUND
    | {
        "choices",
        "codecs.codec_spec",
        "codecs.transport",
        "hardware.link_fit",
        "hardware.machine_spec",
        "model.sizes",
        "optim.optimizer_spec",
        "optim.shares",
        "planner.memory",
        "planner.passes",
        "planner.program",
        "planner.search",
        "planner.simulate",
    },
    "storage": GROUND | {"accelerators", "codecs", "model.sizes", "optim.optimizer_spec", "optim.shares"},
    "group": GROUND,
    "runtime.device": GROUND | {"accelerators", "hardware", "native", "planner.program", "storage"},
    "runtime.forward": GROUND | {"accelerators", "compat", "model", "runtime.device"},
    "runtime.ops": GROUND
    | {
        "accelerators",
        "codecs",
        "compat",
        "group",
        "hardware",
        "model",
        "optim",
        "planner.memory",
        "planner.program",
        "runtime.device",
        "runtime.forward",
        "storage",
    },
    "runtime.engine": GROUND
    | {
        "accelerators",
        "model",
        "optim",
        "planner",
        "runtime.device",
        "runtime.forward",
        "runtime.ops",
        "storage",
    },
    "runtime.trial": GROUND
    | {
        "accelerators",
        "compat",
        "group",
        "model",
        "optim",
        "planner.simulate",
        "runtime.device",
        "runtime.forward",
        "runtime.ops",
    },
    "data.reading": GROUND | {"choices"},
    "data.chat": GROUND,
    "data": GROUND | {"choices", "compat", "data.chat", "data.reading", "runtime.device.heap"},
    "probing": GROUND
    | {
        "accelerators",
        "codecs",
        "data",
        "hardware",
        "model.sizes.model_spec",
        "native.library",
        "optim",
        "planner",
        "runtime",
        "storage",
    },
    "doctor": GROUND | {"accelerators", "hardware", "telemetry"},
    "telemetry": GROUND | {"config.config_rules", "hardware"},
    "reporting": GROUND | {"doctor", "local_server", "planner.program", "planner.simulate", "telemetry"},
    "streamed": GROUND | {"accelerators", "choices", "config", "group"},
    "session.job": GROUND
    | {
        "detail",
        "accelerators",
        "checkpoint.files",
        "choices",
        "codecs",
        "compat",
        "config",
        "data",
        "group",
        "hardware",
        "model",
        "native.library",
        "optim",
        "planner",
        "runtime",
        "storage",
        "streamed",
        "user_cache",
    },
    "session.decide": GROUND
    | {
        "detail",
        "accelerators",
        "choices",
        "codecs",
        "config",
        "group",
        "hardware",
        "model",
        "optim",
        "planner",
        "probing",
        "runtime",
        "session.job",
        "storage",
        "streamed",
    },
    "session": GROUND
    | {
        "accelerators",
        "checkpoint.files",
        "choices",
        "codecs",
        "config",
        "data",
        "group",
        "hardware",
        "model",
        "optim",
        "planner.memory",
        "planner.search",
        "planner.simulate",
        "runtime",
        "session.job",
        "storage",
    },
    "checkpoint": GROUND
    | {
        "detail",
        "checkpoint.files",
        "choices",
        "compat",
        "config",
        "model",
        "optim",
        "runtime",
        "session",
        "storage",
        "telemetry",
    },
    "training": GROUND
    | {
        "detail",
        "accelerators",
        "checkpoint",
        "choices",
        "compat",
        "config",
        "data",
        "group",
        "hardware",
        "model",
        "optim",
        "planner",
        "probing",
        "reporting",
        "runtime",
        "session",
        "storage",
        "streamed",
        "telemetry",
    },
    "inference": GROUND
    | {
        "accelerators",
        "codecs",
        "compat",
        "hardware",
        "model",
        "planner.program",
        "planner.search",
        "runtime",
        "storage",
    },
    "wrapped.at_home": {"compat", "errors"},
    "wrapped": GROUND
    | {
        "accelerators",
        "checkpoint",
        "choices",
        "codecs",
        "compat",
        "config",
        "group",
        "hardware",
        "inference",
        "model",
        "optim",
        "planner",
        "reporting",
        "runtime",
        "session",
        "spin",
        "storage",
        "streamed",
        "telemetry",
        "training",
        "wrapped.at_home",
    },
    "wrapped.writing": GROUND
    | {"choices", "compat", "inference", "model.sizes", "planner.search", "wrapped"},
    "objectives": GROUND
    | {
        "accelerators",
        "checkpoint",
        "choices",
        "compat",
        "config",
        "data",
        "group",
        "model",
        "planner.search",
        "runtime.device",
        "session",
        "storage",
        "streamed",
        "telemetry",
        "training",
        "wrapped",
    },
    "cli.text": GROUND
    | {"config", "detail", "doctor", "hardware", "objectives", "planner", "probing", "training"},
    "cli.plan": GROUND
    | {
        "accelerators",
        "choices",
        "cli.text",
        "codecs.codec_spec",
        "codecs.transport",
        "config",
        "data.reading",
        "hardware",
        "model.sizes",
        "planner",
        "reporting",
        "runtime.trial.counts",
        "session",
    },
    "cli": GROUND
    | {
        "accelerators",
        "checkpoint",
        "choices",
        "cli.plan",
        "cli.text",
        "codecs.transport",
        "config",
        "doctor",
        "group",
        "hardware",
        "local_server",
        "model",
        "objectives",
        "optim.optimizer_spec",
        "planner",
        "probing",
        "reporting",
        "runtime.device.heap",
        "session",
        "storage.prealloc",
        "training",
        "wrapped",
    },
}
# Imported by no room: these stand on top of the others.
TOPS = {
    "__main__": {"cli"},
    "__init__": {"functions"} | set(ARROWS),
    "functions": set(ARROWS) - {"cli", "cli.plan", "cli.text"},
}
TORCH_FREE = [
    "native",
    "planner",
    "config",
    "hardware",
    "doctor",
    "telemetry",
    "reporting",
    "model/sizes",
    "cli/plan/plan_command.py",
    "cli/plan/plan_question.py",
    "cli/plan/plan_table.py",
    "cli/doctor_command.py",
    "cli/text/records_text.py",
    "codecs/codec_spec.py",
    "codecs/transport.py",
    "codecs/transport.py",
    "optim/shares.py",
    "optim/optimizer_spec.py",
    "runtime/forward/unit_facts.py",
    "runtime/trial/counts.py",
    "runtime/trial/measured.py",
    "runtime/trial/measured.py",
    "session/job/known_models.py",
    "user_cache.py",
]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the folder of ``path``, dotted; of a module beside the rooms its own name."""
    folders = path.relative_to(SOURCE).parts[:-1]
    return ".".join(folders) or path.stem


def room_of_module(module: str) -> str:
    """Return the room of ``module``, a dotted name below ``outsize``; of a name in a module the room of the module."""
    parts = module.split(".")
    while len(parts) > 1 and not SOURCE.joinpath(*parts).is_dir():
        parts.pop()
    return ".".join(parts)


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return ``(line, dotted module)`` of every import, in functions and under TYPE_CHECKING too."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module
            # `from outsize.training import run` names a module as well.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_allowed(room: str, module: str) -> bool:
    target = module.removeprefix("outsize.")
    if target == "__version__" or room_of_module(target) == room:
        return True
    return any(target == name or target.startswith(f"{name}.") for name in (ARROWS | TOPS)[room])


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


def rooms() -> set[str]:
    """Return every folder with modules of its own, and every module beside the rooms."""
    return {room_of(path) for path in files() if path.name != "__init__.py" or path.parent == SOURCE}


def test_every_room_is_on_the_map():
    assert rooms() <= ARROWS.keys() | TOPS.keys()


def test_no_room_is_crowded():
    """A room holds at most twenty files, so that a stranger can read its listing."""
    crowded = {
        room: [p.name for p in files() if room_of(p) == room and p.name != "__init__.py"] for room in rooms()
    }
    assert {room: len(names) for room, names in crowded.items() if len(names) > 20} == {}


def leans_on(room: str) -> set[str]:
    """Return the rooms that ``room`` may import from: an entry stands for the rooms in it as well."""
    inside = {
        other
        for name in ARROWS[room]
        for other in ARROWS
        if other == room_of_module(name) or other.startswith(f"{name}.")
    }
    return inside - {room}


def test_the_map_has_no_cycles():
    """A room comes after everything it leans on, so whole rooms can be understood one after the other."""
    left = {room: leans_on(room) for room in ARROWS}
    while left:
        done = [room for room, others in left.items() if not others & left.keys()]
        assert done, f"cycle among {sorted(left)}"
        for room in done:
            del left[room]


# What exceeds the limits still; it only shrinks.
WIDE = {
    "planner/simulate/costs.py cost_model",
    "wrapped/api.py load",
    "wrapped/api.py wrap",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(SOURCE)} {node.name}", node


def num_parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(set(names) - {"self", "cls"}) + sum(map(bool, (arguments.vararg, arguments.kwarg)))


def test_a_function_fits_a_screen():
    """Sixty lines, with its docstring and the functions in it."""
    assert [name for name, node in functions() if (node.end_lineno or 0) - node.lineno >= 60] == []


def test_a_function_takes_ten_parameters_at_most():
    """Beyond, some of them belong together, and that has a name."""
    assert {name for name, node in functions() if num_parameters(node) > 10} == WIDE


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    assert breaches(path) == []


def test_the_documentation_draws_the_same_arrows():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    drawn = {room.strip(" `"): set(allowed.replace("`", " ").split()) for room, _, allowed in rows}
    assert drawn == {room: allowed for room, allowed in ARROWS.items() if room in drawn}
    assert drawn.keys() == rooms() - TOPS.keys()


def test_planner_and_storage_do_not_know_each_other():
    for room in (room for room in ARROWS if room.startswith("planner.")):
        assert not is_allowed(room, "outsize.storage.home")
        assert not is_allowed("storage", f"outsize.{room}")


def test_only_what_opens_runs_reads_the_configuration():
    readers = {room for room, allowed in ARROWS.items() if "config" in allowed}
    assert readers == {
        "checkpoint",
        "cli",
        "cli.plan",
        "cli.text",
        "objectives",
        "session",
        "session.decide",
        "session.job",
        "streamed",
        "training",
        "wrapped",
    }


def torch_free_modules() -> list[str]:
    names = []
    for entry in TORCH_FREE:
        path = SOURCE / entry
        if path.is_file():
            names.append(f"outsize.{entry.removesuffix('.py').replace('/', '.')}")
        elif path.is_dir():
            package = f"outsize.{entry.replace('/', '.')}"
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


def test_one_file_calls_what_a_vendor_alone_has():
    """All others ask torch by names that every kind of device has."""
    texts = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in files()}
    vendors = ("torch.cuda.", "torch.xpu.", "torch.npu.")
    found = {
        (name, ast.unparse(node))
        for name, text in texts.items()
        if name != "accelerators.py" and any(vendor in text for vendor in vendors)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and f"{ast.unparse(node)}.".startswith(vendors)
    }
    assert found == set()


def test_nobody_asks_a_home_of_which_kind_it_is():
    """What differs between homes is a method of `outsize.storage.home.Home`."""
    homes = {"Home", "HostHome", "DiskHome", "CommittedHome"}
    asked = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "type")
        and homes & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    ]
    assert asked == []


# Private by their form alone: of named tuples, and of `os`.
PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}


def private_names(path: Path) -> Iterator[str]:
    """Yield the names of other packages that ``path`` imports or looks up though they begin with an underscore."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                if not name.startswith(("outsize", "_", "__future__")) and "._" in name:
                    yield name
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            of_modules = node.attr in ("_parameters", "_buffers") and ast.unparse(node.value) != "self"
            yield f"{node.attr} of a module" if of_modules else node.attr


def own_private_names() -> set[str]:
    """Return the private names that a class or module of the package gives to what is its own."""
    names = set(PUBLIC)
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def test_private_names_of_libraries_stand_in_compat_alone():
    """A release that moves one is mended in one place, and breaks a feature instead of an import."""
    own = own_private_names()
    outside = [path for path in files() if room_of(path) != "compat"]
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path in outside
        for name in private_names(path)
        if name not in own
    }
    assert found == set()
    patching = [path for path in outside if any(module.startswith("unittest") for _, module in imports(path))]
    assert patching == []


def test_compat_asks_for_private_names_when_it_is_called():
    for path in (path for path in files() if room_of(path) == "compat"):
        at_top = [
            node
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert [ast.unparse(node) for node in at_top if re.search(r"[. ]_", ast.unparse(node))] == [], path


def at_import(path: Path) -> set[str]:
    """Return the modules of the package that importing ``path`` imports: none in functions, none for types."""
    pending: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    found = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outsize"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def test_no_module_is_imported_in_a_circle():
    names = {".".join(("outsize", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in files()}
    left = {name: at_import(path) & (names.keys() - {name}) for name, path in names.items()}
    while left:
        done = [name for name, needed in left.items() if not needed & left.keys()]
        assert done, f"circle among {sorted(left)}"
        for name in done:
            del left[name]


def test_a_name_occurs_once():
    """Each file name and each public class name of the source names one thing."""
    files_named = Counter(path.name for path in files() if path.name not in ("__init__.py", "__main__.py"))
    classes = Counter(
        node.name
        for path in files()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in (files_named + classes).items() if count > 1] == []
