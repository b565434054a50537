"""The accelerator that tests run on: a real one, or with ``--accelerator=late`` a made-up one (`accelerator.late`).

``OUTSIZE_TEST_DEVICE`` and ``OUTSIZE_TEST_DEVICES`` name others; ``emulated:1`` and ``emulated:2`` try the tests
themselves.
"""

import os

import pytest

from outsize.accelerators import count_of, is_accelerator, kind_here, kind_of

_KIND = kind_here() or "cuda"
DEVICE = os.environ.get("OUTSIZE_TEST_DEVICE", f"{_KIND}:0")
DEVICES = os.environ.get("OUTSIZE_TEST_DEVICES") or (
    f"{_KIND}:0,1" if count_of(_KIND) > 1 else f"{_KIND}:0,0"
)
ON_ACCELERATOR = is_accelerator(DEVICE)
TORCH_DEVICE = DEVICE if ON_ACCELERATOR else "cpu"
IS_MADE_UP = kind_of(DEVICE) == "late"
needs_accelerator = pytest.mark.skipif(
    ON_ACCELERATOR and kind_here() is None, reason="no accelerator; --accelerator=late makes one up"
)
