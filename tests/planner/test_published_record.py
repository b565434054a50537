"""Predictions held to what others have published; `bench_published.py` prints all rows."""

import pytest
from published_record import MODELS, answer, rows

from outsize.hardware.cards import find_card, split_count

ROWS = {row["id"]: row for row in rows()}
# The quick ones: of one GPU, whose systems recompute as the planner does.
QUICK = (
    *("llmq-0.5b-4090", "llmq-7b-4090", "llmq-7b-h100-fp8", "slideformer-8b-4090", "dataflow-8b-h100-9"),
    "zero3-8b-4090-32k",
)
WORST = 0.20


def test_every_row_is_of_a_known_model_and_card_and_has_a_source():
    assert len(ROWS) >= 20
    for row in ROWS.values():
        assert row["model"] in MODELS
        if row["gpus"]:
            assert find_card(split_count(row["gpus"])[1]).peaks[row["dtype"]] > 0
        else:
            assert "--gpu-spec" in row["options"]
        assert row["kernels"] in ("eager", "fused")
        assert row["optimizer"] in ("streamed", "after", "recomputed")
        assert row["kind"]
        assert float(row["tokens_per_s"]) > 0
        assert row["source"]


@pytest.mark.parametrize("name", QUICK)
def test_predictions_are_near_what_was_published(name):
    found, published = answer(ROWS[name]), float(ROWS[name]["tokens_per_s"])
    assert found.tokens_per_s == pytest.approx(published, rel=WORST)
    assert found.low < found.tokens_per_s < found.high
