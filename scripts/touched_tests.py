"""Print the test files that a change touches, one per line: those that changed, and those that import what changed.

A change is everything since the branch left ``main``, and whatever is not committed yet. A test file imports a changed
module by itself or through a helper beside the tests. Where nothing of that sort changed, the files of the rooms
without torch are printed: they are the fast ones.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAST = (
    "tests/config",
    "tests/planner",
    "tests/hardware",
    "tests/doctor",
    "tests/test_config.py",
    "tests/test_units.py",
)
ALWAYS = ("tests/test_architecture.py", "tests/test_documentation.py")
# A file that imports more than this much of the change is as likely hit through a closer one.
MOST_FILES = 24


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed() -> set[str]:
    """Return the paths, below the root, of files that a change adds or edits."""
    base = git("merge-base", "main", "HEAD") or git("rev-parse", "HEAD~1") or ["HEAD"]
    found = [*git("diff", "--name-only", base[0]), *git("ls-files", "--others", "--exclude-standard")]
    return {name for name in found if (ROOT / name).is_file()}


def imported(path: Path) -> set[str]:
    """Return the dotted modules that a file names in its imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def modules_of(names: set[str]) -> set[str]:
    """Return the dotted modules of changed files, of the package and of helpers beside the tests."""
    found = set()
    for name in names:
        parts = Path(name).with_suffix("").parts
        if name.endswith(".py") and parts[0] in ("src", "tests"):
            found.add(".".join(parts[1:]))
    return found


def touched() -> list[str]:
    """Return the test files to run, those that changed first, then those that import the most of the change."""
    names = changed()
    modules = modules_of(names)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    hits = {str(path.relative_to(ROOT)): len(imported(path) & modules) for path in files}
    own = [name for name in hits if name in names]
    near = sorted((name for name in hits if hits[name] and name not in names), key=lambda name: -hits[name])
    found = [*own, *near][:MOST_FILES]
    return [*(found or FAST), *ALWAYS]


if __name__ == "__main__":
    sys.stdout.write("\n".join(dict.fromkeys(touched())) + "\n")
