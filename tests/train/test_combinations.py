"""What changes how a run computes, drawn together: streamed equals resident, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outsize.training.short_runs import verify
from support import make_run
from train.test_compile import BLOCKS, LORA, OFFLOADED, cheap
from train.test_compile import assert_equal as assert_compiled_and_equal
from train.test_liger import LIGER, stand_in

__all__ = ["cheap", "stand_in"]  # fixtures
HOMES = {"home": st.sampled_from(["host", "disk"])}
WHAT = {
    "model": st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["fp32", "bf16"]),
            "products": st.sampled_from(["native", "fp8", "fp8-rowwise"]),
        }
    ),
    "blocks": st.sampled_from([BLOCKS, LIGER]),
    "data": st.fixed_dictionaries({"pack": st.sampled_from(["stream", "documents", "none"])}),
    "train": st.fixed_dictionaries(
        {
            "method": st.sampled_from(["full", "lora"]),
            "microbatches": st.integers(1, 4),
            "round_microbatches": st.sampled_from([None, 1, 2]),
        }
    ),
    "optimizer": st.sampled_from(
        [{}, {"name": "muon"}, {"name": "muon", "ns_on": "device"}, {"masters": "split24"}]
    ),
    "lora": st.fixed_dictionaries({"base_codec": st.sampled_from(["raw", "nf4", "fp8"])}),
    "memory": st.fixed_dictionaries(
        {
            **HOMES,
            "activations": st.sampled_from(["auto", "recompute", "keep"]),
            "device": st.sampled_from(["cpu", "emulated:2"]),
        }
    )
    | st.fixed_dictionaries({**HOMES, **{key: st.just(value) for key, value in OFFLOADED.items()}}),
}


def documents_in(directory: Path) -> Path:
    """Twenty documents of two or three tokens: several in each sequence, so that all have masks."""
    path = directory / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": "ab"[: 1 + number % 2]}) + "\n" for number in range(20)))
    return path


@pytest.mark.slow
@settings(max_examples=4, phases=[Phase.generate])
@given(sections=st.fixed_dictionaries(WHAT))
def test_whatever_goes_together(
    tmp_path_factory: pytest.TempPathFactory, sections: dict[str, dict[str, Any]]
) -> None:
    """Sequences so short that the trial has one form."""
    directory = tmp_path_factory.mktemp("run")
    blocks, adapts = sections.pop("blocks"), sections["train"]["method"] == "lora"
    in_24_bits = sections["optimizer"].get("masters") and sections["model"]["dtype"] == "bf16" and not adapts
    config = make_run(
        directory,
        model={**sections["model"], **blocks},
        data={"path": str(documents_in(directory)), "seq_len": 5, **sections["data"]},
        train={"steps": 2, "tokens_per_step": 20, **sections["train"]},
        optimizer=sections["optimizer"] if in_24_bits or "name" in sections["optimizer"] else {},
        lora={**LORA, **sections["lora"]} if adapts else {},
        memory=sections["memory"],
    )
    if blocks == BLOCKS:
        assert_compiled_and_equal(config)
    else:
        result = verify(config)
        assert (result.equal, result.differing) == (True, [])
