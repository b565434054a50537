"""What a run borrows of torch for the whole process."""

import os
import subprocess
import sys

import pytest
import torch

from outsize.accelerators import Devices
from outsize.errors import ConfigError
from outsize.session.process_settings import borrowed_torch


@pytest.mark.parametrize(("said", "read"), [({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")])
def test_importing_outsize_says_how_products_repeat(said: dict[str, str], read: str):
    """cuBLAS reads it once, before the first product of a process, whosever that is."""
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    code = "import os, outsize; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | said
    )
    assert done.stdout.strip() == read


def test_a_product_that_came_before_is_an_error_that_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def product(*_: object) -> None:
        raise RuntimeError(
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ..., but "
            "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. ... you must set an "
            "environment variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.empty(shape))
    monkeypatch.setattr(torch, "mm", product)
    with (
        pytest.raises(
            ConfigError, match=r"set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, import outsize"
        ),
        borrowed_torch(deterministic=True, devices=Devices.parse("cuda")),
    ):
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_device_that_is_not_there_is_none_to_ask():
    with borrowed_torch(deterministic=True, devices=Devices.parse("cuda:7")):
        assert torch.are_deterministic_algorithms_enabled()
