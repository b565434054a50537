"""What kind of value each entry of a run's state is, where it was read from a file that anyone may have changed."""

import math
from typing import Any


def check_kinds(state: Any) -> None:
    """Check the entries that a resume needs.

    Raises:
        ValueError: one is missing, of another kind, or below zero; says which.
    """
    if not isinstance(state, dict):
        raise ValueError("not an object")
    wrong = [
        key
        for key, is_right in (
            *((key, _counts(state.get(key))) for key in ("step", "tokens", "skipped", "seed")),
            *((key, isinstance(state.get(key), str)) for key in ("model", "dtype")),
            ("loss", "loss" in state and (state["loss"] is None or _is_number(state["loss"]))),
            ("updates", _is_map(state.get("updates")) and all(map(_counts, state["updates"].values()))),
            ("loss_scale", _is_loss_scale(state.get("loss_scale"))),
            ("data", _is_data(state.get("data"))),
        )
        if not is_right
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: missing, or of the wrong kind")


def _counts(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_data(value: Any) -> bool:
    if not _is_map(value) or not isinstance(value.get("pack"), str | bool):
        return False
    return _counts(value.get("seq_len")) and _counts(value.get("tokens_per_step"))


def _is_loss_scale(value: Any) -> bool:
    if not _is_map(value) or not _is_number(value.get("value")) or not _is_number(value.get("good")):
        return False
    return math.isfinite(value["value"]) and value["value"] > 0 and math.isfinite(value["good"])
