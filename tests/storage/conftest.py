"""What the storage tests share."""

from collections.abc import Iterator

import pytest

from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool


@pytest.fixture
def pool() -> Iterator[IOPool]:
    """Three I/O threads."""
    with IOPool(3) as pool:
        yield pool


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Host memory without a ledger."""
    with Arena() as arena:
        yield arena
