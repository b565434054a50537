"""How a trained unit lies at home changes no bit where it says so: streamed equals resident, resumed equals whole."""

from pathlib import Path
from typing import Any

import pytest

from outsize.train.verify import verify
from support import make_run

SPLIT: dict[str, Any] = {"masters": "split"}
RING = {"clip": "unit", "max_grad_norm": 0.05}
EMULATED = {"device": "emulated:1"}
DISK = {"home": "disk"}
BF16 = {"dtype": "bf16"}
# What is trained, how it lies at home and where that is; each is exact.
EXACT: dict[str, dict[str, Any]] = {
    "split": {"model": BF16, "optimizer": SPLIT},
    "split on disk": {"model": BF16, "optimizer": SPLIT, "memory": DISK},
    "split on disk below another device": {"model": BF16, "optimizer": SPLIT, "memory": {**DISK, **EMULATED}},
    "split over two workers": {"model": BF16, "optimizer": SPLIT, "memory": {"device": "emulated:2"}},
    "by unit": {"optimizer": RING, "memory": EMULATED},
    "by unit, split": {"model": BF16, "optimizer": {**RING, **SPLIT}},
    "by unit, split, on disk": {"model": BF16, "optimizer": {**RING, **SPLIT}, "memory": DISK},
    "by unit, on disk below another device": {"optimizer": RING, "memory": {**DISK, **EMULATED}},
    "by unit over two workers": {"optimizer": RING, "memory": {"device": "emulated:2"}},
    "not clipped": {"optimizer": {"clip": "off"}, "memory": EMULATED},
    "not clipped, on disk": {"optimizer": {"max_grad_norm": 0.0}, "memory": DISK},
    "gradients in bf16": {"optimizer": {"gradients": "bf16"}, "memory": EMULATED},
    "gradients in bf16, split, on disk": {
        "model": BF16,
        "optimizer": {**SPLIT, "gradients": "bf16"},
        "memory": DISK,
    },
    "gradients in bf16 on disk below another device": {
        "optimizer": {"gradients": "bf16"},
        "memory": {**DISK, **EMULATED},
    },
}


@pytest.mark.parametrize("case", EXACT)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(make_run(tmp_path, **EXACT[case]))
    assert (result.equal, result.differing) == (True, [])


def test_a_weight_that_units_share_waits_for_all_of_them(tmp_path: Path) -> None:
    """The rest takes part in every backward, and steps once the last has run."""
    run = make_run(tmp_path, "llama_tied", train={"microbatches": 2}, optimizer=RING, memory=EMULATED)
    result = verify(run)
    assert (result.equal, result.differing) == (True, [])
