"""Sizes of a ``config.json`` that no model has, refused before anything is built of them. No torch.

How long a sequence a model takes, by its config. No torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from outsize.errors import ModelError

# What every model has at least one of, where its config says how many.
_AT_LEAST_ONE = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        *("n_embd", "n_layer", "n_head", "d_model"),
    }
)
_WIDTHS = frozenset(
    {"intermediate_size", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_inner"}
)
_POSITIONS = frozenset({"max_position_embeddings", "n_positions", "n_ctx"})
_LAYERS = frozenset({"num_hidden_layers", "n_layer"})
# Modules of more layers, and rows and columns of larger matrices, are none that a machine could hold.
MOST_LAYERS, MOST_EXPERTS, MOST_WIDE, MOST_POSITIONS = 10_000, 100_000, 1 << 24, 1 << 31


def check_sizes(config: Any, where: object) -> None:
    """Check the sizes that a config tells, of the model and of its parts.

    Args:
        config: as parsed.
        where: the file, for the message.

    Raises:
        ModelError: one is no whole number, or one that no model has; the file and the key are named.
    """
    for key, size in _sizes(config):
        name = key.rpartition(".")[2]
        least, most = int(name in _AT_LEAST_ONE), _most(name)
        if type(size) is not int or not least <= size <= most:
            shown = repr(size) if len(repr(size)) <= 40 else f"{repr(size)[:40]}..."
            raise ModelError(
                f"{where}: {key} is {shown}, and not a whole number from {least} to {most:,}; fetch the file again, or "
                "write the size that the weights have"
            )


def _most(name: str) -> int:
    if name in _LAYERS:
        return MOST_LAYERS
    if name in _POSITIONS:
        return MOST_POSITIONS
    return MOST_EXPERTS if name.endswith("experts") else MOST_WIDE


def _sizes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield each size by its key, those of parts by ``part.key``; a size that is null is for its model to choose."""
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key in _AT_LEAST_ONE | _WIDTHS | _POSITIONS:
            each = value if isinstance(value, list) and value else [value]  # one for each layer
            yield from ((key, size) for size in each if size is not None)
        elif isinstance(value, Mapping):
            for name, size in value.items():
                yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in _sizes({name: size}))


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
    in_config = config.get("max_position_embeddings")
    if (
        "relative_attention_num_buckets" not in config
    ):  # beside which T5 says positions that it does not count
        in_config = in_config or config.get("n_positions")
    if not isinstance(in_config, int) or in_config <= 0:
        return None
    most = in_config
    for rope in _ropes(config):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if kind not in _STRETCHED or not isinstance(factor, int | float) or factor <= 1:
            continue
        original = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        most = max(most, int(factor * (original or in_config)))
    return most


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is said of rotary positions: of all layers, or of each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            yield rope
            yield from (value for value in rope.values() if isinstance(value, Mapping))
