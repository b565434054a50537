"""How long threads of OpenMP spin is said before torch is loaded, or that it was too late."""

import os
import subprocess
import sys

import pytest

from outsize.spin import SPIN_TURNS

FREE = {
    name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
}
SHOW = """
import os
from outsize.spin import late_warning
print(os.environ.get("GOMP_SPINCOUNT"))
print(late_warning())
print(late_warning())
"""


def lines(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code + SHOW],
        capture_output=True,
        text=True,
        check=True,
        env=FREE | environment,
    )
    return done.stdout.splitlines()


def test_importing_outsize_first_limits_how_long_threads_spin():
    assert lines("import outsize") == [SPIN_TURNS, "None", "None"]


@pytest.mark.parametrize("said", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}])
def test_what_the_environment_says_stays(said: dict[str, str]):
    assert lines("import outsize", **said) == [said.get("GOMP_SPINCOUNT", "None"), "None", "None"]


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of GNU")
def test_a_torch_that_was_there_first_is_told_of_once():
    count, first, second = lines(
        "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); import outsize"
    )
    assert (count, second) == (SPIN_TURNS, "None")
    assert "import outsize first" in first
