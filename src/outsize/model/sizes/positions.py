"""How long a sequence a model takes, by its config. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

# Ways of stretching rotary positions of which ``factor`` says by how much; of all others the config says the length.
_STRETCHED = ("linear", "dynamic", "yarn", "llama3", "longrope", "su", "ntk")


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest sequence that a model computes positions for; None where nothing limits them.

    Rotary positions that are stretched (``rope_scaling``, or ``rope_parameters`` of newer configs) reach ``factor``
    times as far as the model was trained first: ``original_max_position_embeddings``, or without it
    ``max_position_embeddings``. Some configs say the stretched length there and some leave it as it was; the larger of
    both holds.

    Args:
        config: of the model or of its text part, as JSON.
    """
    said = config.get("max_position_embeddings")
    if (
        "relative_attention_num_buckets" not in config
    ):  # beside which T5 says positions that it does not count
        said = said or config.get("n_positions")
    if not isinstance(said, int) or said <= 0:
        return None
    most = said
    for rope in _ropes(config):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if kind not in _STRETCHED or not isinstance(factor, int | float) or factor <= 1:
            continue
        original = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        most = max(most, int(factor * (original or said)))
    return most


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is said of rotary positions: of all layers, or of each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name)
        if isinstance(found, Mapping):
            yield found
            yield from (value for value in found.values() if isinstance(value, Mapping))
