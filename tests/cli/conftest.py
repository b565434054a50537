import json

import pytest

from cli.command_line import LLAMA


@pytest.fixture
def model_dir(tmp_path):
    """A directory with a config and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path
