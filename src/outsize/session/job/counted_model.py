"""A model that is not there, in the numbers that a plan needs: of any architecture that a run can train."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from outsize.config import Config
from outsize.errors import ModelError
from outsize.model.adapters import put_in
from outsize.model.build import build_skeleton, unquantised
from outsize.model.liger import save_as_liger
from outsize.model.sizes.config_sizes import num_positions
from outsize.model.tiled import can_take_in_parts, take_in_parts
from outsize.model.unit_lists import ALL_LISTS, UnitChoice
from outsize.runtime.trial.calibrate import count
from outsize.runtime.trial.counts import Counts
from outsize.runtime.trial.trial_pass import in_turn
from outsize.session.job.known_models import Described
from outsize.session.job.model_setup import lora_of, made_up_inputs, split_model


def count_model(hf_config: Mapping[str, Any], config: Config) -> Counts:
    """Count the model that a ``config.json`` describes, as a run with ``config`` would train it.

    Raises:
        ModelError: none that a run can train, or one that cannot be counted without its weights.
        ConfigError: adapters for layers that it does not have.
    """
    described, _ = _text_part(hf_config)
    dtype, frozen = config.model.dtype, config.train.method == "lora"
    model = build_skeleton(described, dtype, config.model.attention, frozen=frozen)
    adapters = put_in(model, lora_of(config, model), config.train.seed) if frozen else None
    parts = split_model(model, dtype, config, adapters)
    can_part = config.train.mlp_parts == 1 and can_take_in_parts(parts)
    take_in_parts(parts, config.train.mlp_parts)
    if config.model.kernels == "liger":
        save_as_liger(parts.modules)

    def counted(choice: UnitChoice) -> Counts:
        parts = split_model(model, dtype, config, adapters, choice)
        lengths, rows = count(
            parts,
            partial(made_up_inputs, config.data.pack, described),
            seq_len=config.data.seq_len,
            chunk_tokens=config.train.head_chunk_tokens,
            shifted=not type(model).__name__.endswith("ForMaskedLM"),
        )
        return Counts.of(parts.spec, can_part, config.train.head_chunk_tokens, lengths, rows)

    return in_turn(counted, ALL_LISTS)


def describe(hf_config: Mapping[str, Any]) -> Described:
    """Return what transformers makes of a ``config.json``.

    Raises:
        ModelError: transformers does not know the architecture, or not with such values.
    """
    config, part = _text_part(hf_config)
    return Described(str(config.model_type), num_positions(config.to_dict()), part)


def _text_part(hf_config: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return the config of a model, or of its text part, and the model type of that where it is one of several."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    kind = hf_config.get("model_type")
    if kind not in CONFIG_MAPPING:
        remote = " this one comes with Python code of its own;" if hf_config.get("auto_map") else ""
        raise ModelError(
            f"no sizes of a {kind!r} model (model_type of its config): transformers does not know it;{remote} try a "
            "newer transformers, or the config of a model that it knows"
        )
    try:
        config = unquantised(CONFIG_MAPPING[kind].from_dict(dict(hf_config)))
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelError(
            f"the config of this {kind} model cannot be read: {error}; take the one that lies beside its weights"
        ) from error
    encodes = getattr(config, "is_encoder_decoder", False)  # refused as what it is when it is built
    for size in () if encodes else ("hidden_size", "num_hidden_layers", "vocab_size"):
        named = type(config).attribute_map.get(size, size)
        if hasattr(config, size) and named not in hf_config and size not in hf_config:
            raise ModelError(
                f"the config of this {kind} model lacks a size, {named!r}; give the config.json that lies beside its "
                "weights"
            )
    text = config.get_text_config()
    if text is config or encodes:
        return config, None
    return text, str(text.model_type)
