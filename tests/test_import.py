import json
import subprocess
import sys

import pytest

import outsize

HEAVY = [
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "pydantic",
    "safetensors",
    "accelerate",
    "yaml",
    "rich",
]

REPORT = """
import json, sys, threading
files = len(__import__("os").listdir("/proc/self/fd"))
{statement}
print(json.dumps({{
    "modules": sorted(sys.modules),
    "threads": threading.active_count(),
    "new_files": len(__import__("os").listdir("/proc/self/fd")) - files,
}}))
"""


def run(statement):
    """Run ``statement`` in a fresh interpreter; return what is loaded, and what it printed besides."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(statement=statement)], capture_output=True, text=True, check=True
    )
    *printed, report = done.stdout.splitlines()
    return json.loads(report), "\n".join(printed) + done.stderr


def test_importing_the_package_does_nothing():
    report, printed = run("import outsize")
    assert printed == ""
    assert report["threads"] == 1
    assert report["new_files"] == 0
    assert not set(HEAVY) & set(report["modules"])


def test_help_needs_no_heavy_library():
    report, printed = run("""
from outsize.cli import main
for arguments in (
    ["--help"],
    ["train", "--help"],
    ["probe", "--help"],
    ["inspect", "--help"],
    ["plan", "--help"],
    ["--version"],
):
    try:
        main(arguments)
    except SystemExit as done:
        assert not done.code, arguments
""")
    assert "train" in printed
    assert not {"torch", "transformers", "numpy", "outsize.config"} & set(report["modules"])


@pytest.mark.parametrize(
    "module", ["outsize.config", "outsize.training.records", "outsize.model.sizes.model_spec"]
)
def test_what_only_describes_needs_no_torch(module):
    report, printed = run(f"import {module}")
    assert printed == ""
    assert "torch" not in report["modules"]


def test_public_names_are_sorted_and_exist():
    assert outsize.__all__ == sorted(outsize.__all__)
    assert dir(outsize) == outsize.__all__
    for name in outsize.__all__:
        assert hasattr(outsize, name)
