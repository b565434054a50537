"""The launch templates: what can be checked without the launchers."""

import ast
import subprocess
from pathlib import Path

import pytest
import yaml

from outsize.config import Surroundings, load_config

NODES = Path(__file__).parents[2] / "examples" / "nodes"


def test_the_configuration_loads_and_says_nothing_without_effect():
    config = load_config(NODES / "train.yaml", [], {}, {})
    assert config.train.resume == "auto"
    assert config.notes(Surroundings(num_processes=2)) == []


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_bash(name):
    done = subprocess.run(["bash", "-n", str(NODES / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def commands():
    """Return the command line of each template that starts torchrun."""
    sky = yaml.safe_load((NODES / "sky.yaml").read_text(encoding="utf-8"))
    texts = {name: (NODES / name).read_text(encoding="utf-8") for name in ("torchrun.sh", "slurm.sbatch")}
    return {**texts, "sky.yaml": sky["run"]}


def test_all_start_the_same_command_and_start_it_again():
    for name, text in commands().items():
        joined = text.replace("\\\n", " ")
        line = next(line for line in joined.splitlines() if "torchrun" in line and "--nnodes" in line)
        words = line.split()
        assert words[words.index("-m") : words.index("-m") + 3] == ["-m", "outsize", "train"], name
        assert {"--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"} <= set(words), name


def test_torchrun_knows_every_option_that_is_given():
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    for name, text in commands().items():
        given = text.rpartition("-m outsize")[0].rpartition("torchrun")[2]
        options = {word for word in given.split() if word.startswith("--")}
        assert options <= known, name


def test_a_job_of_slurm_is_queued_again_and_warned():
    lines = (NODES / "slurm.sbatch").read_text(encoding="utf-8").splitlines()
    options = {
        line.split()[1].partition("=")[0]: line.partition("=")[2] for line in lines if "#SBATCH" in line
    }
    assert options["--ntasks-per-node"] == "1"
    assert options["--signal"].startswith("TERM@")
    assert "--requeue" in options


def test_a_task_of_skypilot_mounts_what_the_configuration_names():
    task = yaml.safe_load((NODES / "sky.yaml").read_text(encoding="utf-8"))
    config = load_config(NODES / "train.yaml", [], {}, {})
    assert task["num_nodes"] == 2
    mounted = tuple(task["file_mounts"])
    assert all(
        path.startswith(mounted) for path in (config.model.path, config.data.path, config.train.run_dir)
    )


def test_the_ray_example_is_python_and_keeps_its_imports_to_where_ray_is():
    tree = ast.parse((NODES / "ray_train.py").read_text(encoding="utf-8"))
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert top == {"argparse", "os", "socket", "subprocess", "sys"}
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"ray.train", "ray.train.torch"}
