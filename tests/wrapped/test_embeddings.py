"""Real pretrained weights: an encoder, streamed in a quarter of its bytes, gives the bits of the resident one."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "embeddings.py"


def test_embeddings_are_bit_equal_in_a_quarter_of_the_weights():
    spec = importlib.util.spec_from_file_location("embeddings", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    directory = example.model_directory()
    if directory is None:
        pytest.skip(f"{example.PACKAGE} is not installed")
    found = example.compare(directory)
    assert found["bit_equal"]
    assert found["budget_bytes"] == found["weights_bytes"] // 4
    assert found["most_weights_held_bytes"] + found["workspace_bytes"] <= found["budget_bytes"]
    assert found["units_streamed"] > 0
    assert found["similarity_of_the_first_two"] > 0.5 > found["similarity_of_the_first_and_the_last"]
