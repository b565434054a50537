from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
