"""What is released is whole: the wheels, built from the source archive, work where nothing else of ours is."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler for the kernels"),
]
ROOT = Path(__file__).parent.parent
CHECK = """
import json, outsize
from outsize.native import library
print(json.dumps([outsize.__file__, library.available(), library.reason()]))
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Built in a copy: two processes that build in one tree are in each other's way."""
    source = tmp_path_factory.mktemp("tree") / "outsize"
    others = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=others)
    package = runpy.run_path(str(ROOT / "scripts" / "package.py"))["package"]
    made: list[Path] = package(tmp_path_factory.mktemp("dist"), source)
    return made


def run(*command: object) -> str:
    """Run a command that knows nothing of this checkout."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OUTSIZE"))}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=bare, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_archive_and_two_wheels_are_released(released: list[Path]):
    any_wheel, platform_wheel, archive = (path.name for path in released)
    version = archive.removeprefix("outsize-").removesuffix(".tar.gz")
    assert any_wheel == f"outsize-{version}-py3-none-any.whl"
    assert platform_wheel.startswith(f"outsize-{version}-py3-none-manylinux_2_")


@pytest.mark.parametrize("number", [0, 1], ids=["without kernels", "with kernels"])
def test_a_wheel_works_in_an_environment_of_its_own(released: list[Path], number: int, tmp_path: Path):
    """Whose other packages are those of this one, which no index is asked for."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", released[number])
    run(sys.executable, "-m", "pip", "--python", python, *install)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    where, available, reason = json.loads(run(python, "-c", CHECK))
    assert Path(where).is_relative_to(place)
    assert available == (number == 1), reason
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = (place / "bin" / "outsize", "plan", tmp_path / "config.json", "--gpus", "4090", "--no-advice")
    assert "fits, its training state in host memory" in run(*command, "--seq-len", 128)
