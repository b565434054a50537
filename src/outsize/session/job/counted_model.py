"""A model that is not there, in the numbers that a plan needs: of any architecture that a run can train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from outsize.config import Config
from outsize.errors import ModelError
from outsize.model.adapters import put_in
from outsize.model.build import build_skeleton, unquantised
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.model.tiled_mlp import can_take_in_parts, take_in_parts
from outsize.runtime.trial.counted import count
from outsize.session.job.model_inputs import made_up_inputs
from outsize.session.job.prepare import lora_of, split_model


@dataclass(frozen=True, slots=True)
class Described:
    """A model in transformers' words.

    Attributes:
        config: of the model, or of its text part.
        part: the model type of that text part; None where it is the whole model.
    """

    config: Any
    part: str | None = None


@dataclass(frozen=True, slots=True)
class CountedModel:
    """A model that was counted.

    Attributes:
        spec: its units.
        workload_of: what a microbatch of so many sequences of so many tokens takes.
        can_part: whether its MLPs could take their tokens in parts, and do not.
    """

    spec: ModelSpec
    workload_of: Callable[[int, int], Workload]
    can_part: bool


def count_model(described: Any, config: Config) -> CountedModel:
    """Count the model that ``described`` builds, as a run with ``config`` would train it.

    Raises:
        ModelError: none that a run can train, or one that cannot be counted without its weights.
        ConfigError: adapters for layers that it does not have.
    """
    dtype, frozen = config.model.dtype, config.train.method == "lora"
    model = build_skeleton(described, dtype, config.model.attention, frozen=frozen)
    adapters = put_in(model, lora_of(config, model), config.train.seed) if frozen else None
    parts = split_model(model, dtype, config, adapters)
    can_part = config.train.mlp_parts == 1 and can_take_in_parts(parts)
    take_in_parts(parts, config.train.mlp_parts)
    counts = count(
        parts,
        partial(made_up_inputs, config, described),
        seq_len=config.data.seq_len,
        chunk_tokens=config.train.head_chunk_tokens,
        shifted=not type(model).__name__.endswith("ForMaskedLM"),
    )
    return CountedModel(parts.spec, counts.workload, can_part)


def describe(hf_config: Mapping[str, Any]) -> Described:
    """Return the model that a ``config.json`` describes; of one of several parts, its text part.

    Raises:
        ModelError: transformers does not know the architecture, or not with such values.
    """
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
    text = config.get_text_config()
    if text is config or getattr(config, "is_encoder_decoder", False):
        return Described(config)
    return Described(text, str(text.model_type))
