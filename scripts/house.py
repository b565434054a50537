"""Measure the structure of the package, and hold each figure to a ceiling that only falls.

`make lint` runs this. It prints a table: figure, value, ceiling, goal. A value above its ceiling fails; a value below
asks for a lower ceiling here, so that what was cleaned stays clean. Reads source text alone: nothing is imported.

    python scripts/house.py            # the table
    python scripts/house.py pronouns   # the places behind one figure, one per line
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "outsize"
PRONOUNS = re.compile(
    r"\b(what|that|which|this|those|these|its?|they|them|ones?|others?|so|there|whatever|who(?:ever|se)?|such|same)\b"
)
PARTICIPLES = re.compile(r"found|told|kept|asked|own|whole|standing|known|made|former|tried|taken|seen|said")
PRIVATE = re.compile(
    r"^\s*(?:from|import)\s+(?:torch|transformers|peft|trl)[\w.]*\._\w+"
    r"|^\s*from\s+(?:torch|transformers|peft|trl)[\w.]*\s+import\s+_\w+"
)
FUNCTION_LINES, FILE_LINES, PRONOUN_SHARE = 60, 400, 0.3


class Figure(NamedTuple):
    """One figure of the table: where its places are listed, the most it may be now, and the goal."""

    name: str
    says: str
    places: Callable[[], Iterator[str]]
    ceiling: int
    goal: int


@cache
def files() -> dict[str, str]:
    """Return the text of every Python file of the package by its path below the root."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every Python file of the package."""
    return {name: ast.parse(text) for name, text in files().items()}


def lines_matching(pattern: str) -> Iterator[str]:
    """Yield each line of the package that a pattern is found in."""
    for name, text in files().items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                yield f"{name}:{number}: {line.strip()}"


def source_lines() -> Iterator[str]:
    """Yield one item for each line of Python."""
    for name, text in files().items():
        yield from (name for _ in text.splitlines())


def long_files() -> Iterator[str]:
    """Yield files of more than FILE_LINES lines."""
    for name, text in files().items():
        if text.count("\n") > FILE_LINES:
            yield f"{name} ({text.count(chr(10))})"


def long_functions() -> Iterator[str]:
    """Yield functions of more than FUNCTION_LINES lines."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{name}:{node.lineno} {node.name} ({length})"


def classes_named_twice() -> Iterator[str]:
    """Yield public names that more than one class of the package has."""
    names = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    yield from (name for name, count in names.items() if count > 1)


def pronoun_lines() -> Iterator[str]:
    """Yield first lines of docstrings of which more than PRONOUN_SHARE of the words are pronouns."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                words = re.findall(r"[A-Za-z]+", first.lower())
                if len(words) > 3 and len(PRONOUNS.findall(first.lower())) / len(words) > PRONOUN_SHARE:
                    yield f"{name}:{getattr(node, 'lineno', 1)}: {first}"


def participles() -> Iterator[str]:
    """Yield bindings whose whole name is a participle or an adjective where a noun belongs."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and PARTICIPLES.fullmatch(node.arg):
                yield f"{name}:{node.lineno}: parameter {node.arg}"
            elif (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Store)
                and PARTICIPLES.fullmatch(node.id)
            ):
                yield f"{name}:{node.lineno}: variable {node.id}"


def private_imports() -> Iterator[str]:
    """Yield imports of private names of torch, transformers, peft and trl outside compat."""
    for name, text in files().items():
        if "/compat/" not in name:
            yield from (
                f"{name}:{number}: {line.strip()}"
                for number, line in enumerate(text.splitlines(), 1)
                if PRIVATE.search(line)
            )


def modules_in_cycles() -> Iterator[str]:
    """Yield modules that import each other at their top, directly or through others."""
    names = {
        ".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__"): path for path in files()
    }
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in names.items():
        for node in trees()[path].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                aims = {f"{node.module}.{alias.name}" for alias in node.names}
                arrows[module] |= {aim if aim in names else node.module for aim in aims}
            elif isinstance(node, ast.Import):
                arrows[module] |= {alias.name for alias in node.names}
        arrows[module] = (arrows[module] & names.keys()) - {module}
    for module in names:
        reached, front = set(), set(arrows[module])
        while front:
            reached |= front
            front = {aim for step in front for aim in arrows[step]} - reached
        if module in reached:
            yield module


FIGURES = (
    Figure("lines", "lines of Python in src", source_lines, 89_085, 62_000),
    Figure("files", "files of Python in src", lambda: iter(files()), 350, 320),
    Figure("long-files", f"files over {FILE_LINES} lines", long_files, 0, 0),
    Figure("long-functions", f"functions over {FUNCTION_LINES} lines", long_functions, 0, 0),
    Figure("classes-twice", "public class names that occur twice", classes_named_twice, 0, 0),
    Figure("cycles", "modules in import cycles", modules_in_cycles, 0, 0),
    Figure("private", "private imports outside compat", private_imports, 0, 0),
    Figure("homes", "isinstance checks of homes", lambda: lines_matching(r"isinstance\([^)]*Home\b"), 0, 0),
    Figure("devices", "calls of choose_device", lambda: lines_matching(r"(?<!def )\bchoose_device\("), 1, 1),
    Figure("accelerators", "uses of is_accelerator", lambda: lines_matching(r"\bis_accelerator\("), 9, 15),
    Figure("pronouns", "first lines that are mostly pronouns", pronoun_lines, 0, 0),
    Figure("participles", "bindings named found, told, kept …", participles, 119, 200),
)


def main() -> int:
    """Print the table, or the places behind one figure; return 1 where a ceiling is passed."""
    if sys.argv[1:]:
        chosen = {figure.name: figure for figure in FIGURES}[sys.argv[1]]
        print("\n".join(chosen.places()))
        return 0
    values = {figure.name: sum(1 for _ in figure.places()) for figure in FIGURES}
    print(f"{'figure':<16}{'is':>8}{'ceiling':>9}{'goal':>8}")
    for figure in FIGURES:
        value = values[figure.name]
        mark = (
            "  TOO MANY"
            if value > figure.ceiling
            else "  lower the ceiling"
            if value < figure.ceiling
            else ""
        )
        print(f"{figure.name:<16}{value:>8,}{figure.ceiling:>9,}{figure.goal:>8,}  {figure.says}{mark}")
    worse = [figure.name for figure in FIGURES if values[figure.name] > figure.ceiling]
    if worse:
        print(f"above the ceiling: {', '.join(worse)}; `python scripts/house.py NAME` lists the places")
    return bool(worse)


if __name__ == "__main__":
    raise SystemExit(main())
