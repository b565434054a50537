from typing import Any

import pytest

from outsize.session.run_state import check_kinds

GOOD: dict[str, Any] = {
    "step": 2,
    "tokens": 128,
    "skipped": 0,
    "loss": None,
    "updates": {"a": 2},
    "loss_scale": {"value": 1.0, "good": 0},
    "model": "m",
    "seed": 3,
    "dtype": "fp32",
    "data": {"seq_len": 16, "pack": "stream", "tokens_per_step": 64},
}


def test_what_a_run_writes_is_taken():
    check_kinds(GOOD)
    check_kinds({**GOOD, "loss": 2.5, "more": "of it"})
    check_kinds({**GOOD, "data": {**GOOD["data"], "pack": True}})  # of before there were three


@pytest.mark.parametrize("key", GOOD)
def test_each_entry_has_to_be_there(key: str):
    with pytest.raises(ValueError, match=rf"^{key}: missing"):
        check_kinds({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", True),
        ("tokens", 1.5),
        ("model", None),
        ("loss", "low"),
        ("updates", {"a": "b"}),
        ("updates", [1]),
        ("loss_scale", {"value": 0.0, "good": 0}),
        ("loss_scale", {"value": float("inf"), "good": 0}),
        ("loss_scale", {"value": 1.0}),
    ],
)
def test_and_of_its_kind(key: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{key}: "):
        check_kinds({**GOOD, key: value})


@pytest.mark.parametrize("state", [None, [], "text", 3])
def test_anything_else_is_no_state(state: Any):
    with pytest.raises(ValueError, match="not an object"):
        check_kinds(state)
