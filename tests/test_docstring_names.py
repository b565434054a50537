"""Names in docstrings: a dotted name between single backquotes is something that exists, here or in a library."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import outsize
from outsize.config import Config

SOURCE = Path(outsize.__file__).parent
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)`(?!`)")
FILES = re.compile(r"\.(json|jsonl|yaml|bin|safetensors|npy|txt|c|h|jinja|csv|html|md|pt)$")
LIBRARIES = {"torch", "transformers", "peft", "trl", "torchao", "time", "os", "json", "numpy", "datasets"}
Names = dict[str, "Names"]


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package, by their name without that of the package."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


@cache
def names_of(module: str) -> Names:
    return _names(trees()[module])


def _names(tree: ast.Module | ast.ClassDef) -> Names:
    found: Names = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = {}
            case ast.ClassDef(name=name):
                inner = _names(node)
                attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
                inner |= {each.attr: {} for each in attributes if ast.unparse(each.value) == "self"}
                found[name] = inner
            case ast.Assign(targets=targets):
                found |= {
                    each.id: {}
                    for target in targets
                    for each in ast.walk(target)
                    if isinstance(each, ast.Name)
                }
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = {}
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                found |= {(alias.asname or alias.name).partition(".")[0]: {} for alias in names}
    return found


def holds(names: Names, parts: list[str]) -> bool:
    for part in parts:
        if part not in names:
            return False
        names = names[part]
    return True


def exists(name: str, module: str) -> bool:
    """Whether there is something of that name: a module or what one has, by the end of its path, or a class's own."""
    parts = name.removeprefix("outsize.").split(".")
    if name.startswith("outsize.") and len(parts) == 1 and hasattr(outsize, parts[0]):
        return True
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        known = (each for each in trees() if each == head or each.endswith("." + head))
        if any(holds(names_of(each), parts[count:]) for each in known):
            return True
    classes = (names_of(each).get(parts[0]) for each in [module, *trees()])
    return any(each and holds(each, parts[1:]) for each in classes)


def exists_elsewhere(name: str) -> bool:
    head, _, rest = name.partition(".")
    if head == "Tensor":
        head, rest = "torch", name
    if head not in LIBRARIES:
        return False
    found = importlib.import_module(head)
    for part in rest.split("."):
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        found = getattr(found, part)
    return True


def test_every_dotted_name_in_a_docstring_exists():
    keys = {f"{section}.{key}" for section, field in Config.model_fields.items() for key in keys_of(field)}
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    named = {
        (module, name)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        for name in NAME.findall(ast.get_docstring(node) or "")
    }
    assert len(named) > 100
    missing = [
        (module, name)
        for module, name in sorted(named)
        if name not in keys and not FILES.search(name)
        if not (exists(name, module) or exists_elsewhere(name))
    ]
    assert missing == []


def keys_of(field):
    return getattr(field.annotation, "model_fields", {})
