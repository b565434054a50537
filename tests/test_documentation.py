"""What the pages tell a reader to type, name or follow is there."""

import ast
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from typer.main import get_command

import outsize
import zoo
import zoo_of_lists
from outsize.cli.app import app
from outsize.cli.plan.plan_options import PlanFlags
from outsize.config import Config, MemoryConfig
from outsize.config.messages import all_keys

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# A file of the project, from its root or from the package: `bench/common.py`, `planner/program/program.py`.
FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|c|h|md|sh|toml|yaml))`")
PLACES = (ROOT, ROOT / "src" / "outsize")
# What ends the words of a command in a line of shell.
ENDS = {"|", ">", "&&", "&", ";"}


def blocks(page: Path, language: str) -> Iterator[str]:
    return (text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language)


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words behind ``outsize`` of every line of shell that runs it, by itself or under torchrun."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "outsize" not in words:
                continue
            place = words.index("outsize")
            if place and words[place - 1] != "-m":
                continue
            given = words[place + 1 :]
            end = next((at for at, word in enumerate(given) if word in ENDS), len(given))
            yield given[:end]


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    text = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in HEADING.findall(page.read_text())]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in text}


def of_the_root(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=of_the_root)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=of_the_root)
def test_files_that_are_named_exist(page):
    for name in FILE.findall(page.read_text(encoding="utf-8")):
        folder = name.partition("/")[0]
        if any((place / folder).is_dir() for place in PLACES):
            assert any((place / name).is_file() for place in PLACES), name


@pytest.mark.parametrize("page", [page for page in PAGES if any(command_lines(page))], ids=of_the_root)
def test_commands_are_ones_that_the_command_line_takes(page):
    root = get_command(app)
    for words in command_lines(page):
        name, *arguments = words
        if name.startswith("-"):
            continue
        given = root.commands[name].make_context(name, arguments).params  # type: ignore[attr-defined]
        for override in given.get("overrides") or ():
            assert override.partition("=")[0] in all_keys(), override


@pytest.mark.parametrize("page", PAGES, ids=of_the_root)
def test_configurations_have_keys_that_exist(page):
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block)
        if not isinstance(tree, dict) or not tree.keys() <= Config.model_fields.keys():
            continue
        written = {f"{section}.{key}" for section, content in tree.items() for key in content or ()}
        assert written <= set(all_keys()), written - set(all_keys())


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))], ids=of_the_root)
def test_python_names_what_is_there_and_passes_what_it_takes(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("outsize"):
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("outsize."):
                assert_takes(getattr(outsize, node.func.attr), node)  # type: ignore[attr-defined]


def assert_takes(called: Any, call: ast.Call) -> None:
    """Fail where a name of the call is no parameter, or a value is none of those that its annotation lists."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    takes = inspect.signature(called)
    takes.bind_partial(*call.args, **given)
    # Beyond their own names `wrap` and `load` take keys of the section memory, and `predict` options of its command.
    beyond = get_type_hints(PlanFlags) if called is outsize.predict else MemoryConfig.model_fields
    assert given.keys() - takes.parameters.keys() <= beyond.keys()
    hints = get_type_hints(called) if inspect.isfunction(called) else {}
    for name, value in given.items():
        hint = hints.get(name)
        if get_origin(hint) is Literal and isinstance(value, ast.Constant):
            assert value.value in get_args(hint), f"{name}={value.value!r}"


def test_the_page_of_models_has_tried_all_that_the_tests_train():
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert {*zoo.ARCHITECTURES, *zoo_of_lists.MODELS} <= {kind for kind, *_ in rows}
    results = {result for row in rows for result in row[4:9]}
    assert {result.partition(" ")[0] for result in results} <= {"equal", "no"}  # no linear layer
    assert all(row[9].startswith(("equal", "no: ")) for row in rows)


def test_what_papers_are_beside_is_what_the_bench_has_predicted():
    result = json.loads((ROOT / "bench" / "results" / "documents_2026-11.json").read_text(encoding="utf-8"))
    lines = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
    rows = [line.rsplit("|", 2)[0] for line in lines if "`bench/bench_documents.py`" in line]
    numbers = {number.rstrip(",.") for row in rows for number in re.findall(r"\d[\d,.]*", row)}
    rates = [row["tokens_per_s"] for part in ("guide", "roundpipe") for row in result[part].values()]
    rates += [row["predicted"] for name, row in result["velocity"].items() if name.endswith("tokens/s")]
    assert {f"{rate:,.0f}" for rate in rates} - numbers == set()
