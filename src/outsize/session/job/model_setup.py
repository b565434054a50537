"""Build the model of a run without its weights: split, its blocks changed as configured, its sizes counted."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from outsize.accelerators import Devices
from outsize.checkpoint.files.checkpoint_files import has_tokenizer, locate_checkpoint
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader, WeightSource
from outsize.checkpoint.files.quantised import stored_as
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError, ModelError
from outsize.model.adapters import Adapters, AdapterSource, peft_config, put_in
from outsize.model.build import build_image_model, build_skeleton, is_built_alone, without_quantisation
from outsize.model.compiled import compile_blocks
from outsize.model.liger import save_as_liger, take_liger
from outsize.model.products import take_products
from outsize.model.shared_memory import check_memory
from outsize.model.sizes.model_spec import num_positions
from outsize.model.split import ALL_LISTS, Split, UnitChoice, split
from outsize.model.stored_adapters import read_weights
from outsize.model.tiled import can_take_in_parts, take_in_parts
from outsize.optim.rate_groups import RateGroup, decay_parameter_names, with_rates
from outsize.runtime.device.heap import trim
from outsize.runtime.trial.calibrate import count
from outsize.runtime.trial.counts import Counts
from outsize.runtime.trial.measured import trial_lengths
from outsize.runtime.trial.trial_pass import in_turn
from outsize.session.job.demand import ImageInputs, made_up_inputs
from outsize.session.job.known_models import (
    CLASS,
    IMAGE,
    SAMPLE,
    Described,
    Sample,
    family_of,
    made_up_sample,
)
from outsize.session.job.own_code import take_loss
from outsize.streamed.spec import BlockSettings, RunSpec

Announce = Callable[[str], None]
# Builds models whose text part transformers does not build alone.
_WHOLE = "AutoModelForImageTextToText"


def skeleton_of(run: RunSpec, hf_config: Any, announce: Announce) -> nn.Module:
    """Build the model of a run without its weights, with the embedding, loss and kernels that its settings name."""
    config, model, frozen = run.config, run.config.model, run.config.train.method == "lora"
    built = build_skeleton(hf_config, run.dtype, model.attention, model.trust_remote_code, frozen=frozen)
    trim()  # building a model takes its weights for a moment, one after the other
    check_memory(built)
    _add_noise(built, config.train.neftune_noise_alpha)
    take_loss(built, config.train.loss_function)
    if run.blocks.kernels == "liger":
        announce(f"kernels: {take_liger(built, run.devices)}")
    return built


def _add_noise(model: nn.Module, alpha: float | None) -> None:
    """Have the embedding of ``model`` add NEFTune's noise while it trains (arXiv 2310.05914).

    Noise is drawn within the embedding's own forward, where streamed and resident runs seed alike, not by a hook.
    """
    if alpha is not None:
        try:
            table = cast(Any, model).get_input_embeddings()
        except NotImplementedError:
            raise ModelError(
                f"train.neftune_noise_alpha: {type(model).__name__} names no embedding to add noise to; leave it out"
            ) from None
        table.neftune_noise_alpha = alpha
        table.forward = MethodType(_noisy, table)  # a method, so that a copy of the embedding has its own


def _noisy(table: nn.Module, ids: Tensor) -> Tensor:
    from transformers.integrations.neftune import neftune_post_forward_hook

    return cast(Tensor, neftune_post_forward_hook(table, ids, type(table).forward(table, ids)))


def change_blocks(
    parts: Split, blocks: BlockSettings, devices: Devices, announce: Announce, warn: Announce
) -> None:
    """Have blocks compute as ``blocks`` says; ``warn`` is told which of them are not compiled."""
    take_in_parts(parts, blocks.mlp_parts)
    if blocks.products != "native":
        announce(f"products: {take_products(parts, blocks.products, devices)}")
    if blocks.compile == "blocks":
        compile_blocks(parts, warn, devices.own_processor)


def sourced(
    run: RunSpec, model: nn.Module, source: WeightSource | None, adapters_from: Path | None
) -> tuple[Path, WeightSource, Adapters | None]:
    """Return the model's directory, where its weights come from, and the adapters that were put in."""
    config, path = run.config, run.model_path
    directory = Path(path) if source is not None else locate_checkpoint(path)
    if source is None:
        source = CheckpointReader(directory, model)
        source.load_buffers(model)
    if config.train.method != "lora":
        return directory, source, None
    lora = lora_of(config, model)
    if adapters_from is None:
        adapters = put_in(model, lora, config.train.seed)
    else:
        adapters = _stored(model, lora, adapters_from)
        if has_tokenizer(adapters_from):
            directory = adapters_from
    return directory, AdapterSource(source, adapters), adapters


def _stored(model: nn.Module, lora: Any, directory: Path) -> Adapters:
    """Put adapters that begin with those in ``directory`` into a skeleton."""
    weights = read_weights(directory)
    try:
        adapters = put_in(model, lora, 0, weights=weights)
    except CheckpointError as error:
        raise CheckpointError(
            f"{directory}: {error}; go on with the section lora that they were made with, and with their model"
        ) from error
    more = sorted(weights.keys() - set(adapters.names.values()))
    if more:
        raise CheckpointError(
            f"{directory} holds more than adapters that train ({more[0]}), which train.method=lora would not save "
            "again; train them on with outsize.wrap around PEFT's model"
        )
    return adapters


def lora_of(config: Config, model: nn.Module) -> Any:
    """Return PEFT's configuration of the adapters that ``config`` names."""
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    settings = config.lora.for_peft()
    return peft_config(settings, config.model.path, causal)


def check_length(seq_len: int, hf_config: Any) -> None:
    """Check the length of sequences before the model sees one.

    Raises:
        ConfigError: they are longer than the model takes.
    """
    limit = num_positions(hf_config.get_text_config().to_dict())
    if limit is not None and seq_len > limit:
        raise ConfigError(
            f"data.seq_len: {seq_len} is longer than the {limit} positions of the model; lower it"
        )


def split_model(
    model: nn.Module,
    dtype: str,
    config: Config,
    adapters: Adapters | None = None,
    choice: UnitChoice = ALL_LISTS,
) -> Split:
    """Split a model with the rates, weight-decay groups and frozen parameters of ``config``; see `split`.

    With ``adapters`` these train, in fp32, and all else lies apart.

    Raises:
        ModelError: nothing is left to train.
    """
    decaying = decay_parameter_names(model)
    if adapters is not None:
        lora = config.lora
        apart = adapters.apart(model, dtype, lora.base_codec, lora.table_codec)
        parts = split(model, "fp32", decays=decaying.__contains__, apart=apart, choice=choice)
    else:
        parts = split(model, dtype, decays=decaying.__contains__, freeze=config.model.freeze, choice=choice)
    if not parts.spec.num_trainable:
        raise ModelError("model.freeze leaves no parameter to train")
    optimizer = config.optimizer
    groups = [RateGroup(**group.model_dump()) for group in optimizer.groups]
    return replace(parts, spec=with_rates(parts.spec, optimizer.layer_decay, groups))


def count_model(hf_config: Mapping[str, Any], config: Config) -> Counts:
    """Count the model that a ``config.json`` describes, as a run with ``config`` would train it.

    Raises:
        ModelError: none that a run can train, or one that cannot be counted without its weights.
        ConfigError: adapters for layers that it does not have.
    """
    dtype, frozen = config.model.dtype, config.train.method == "lora"
    if CLASS in hf_config:
        if frozen and config.lora.target_modules is None and config.lora.target_parameters is None:
            raise ConfigError(
                f"lora.target_modules: PEFT knows no usual ones of a {hf_config[CLASS]}; name them, for example "
                "--lora-modules to_q,to_k,to_v"
            )
        model: nn.Module = build_image_model(hf_config, dtype)
        samples = Sample(*hf_config[SAMPLE]).trials(family_of(hf_config).multiple)
        of_length = {sample.tokens: sample for sample in samples}
        lengths = tuple(of_length)

        def make_inputs(_: int, length: int) -> Mapping[str, Any]:
            return made_up_sample(model, hf_config, of_length[length])

    else:
        described, _ = _text_part(hf_config)
        text = described.get_text_config()
        auto = None if text is described or getattr(described, "is_encoder_decoder", False) else _WHOLE
        model = build_skeleton(described, dtype, config.model.attention, auto=auto, frozen=frozen)
        lengths = trial_lengths(config.data.seq_len, 2)
        make_inputs = partial(made_up_inputs, config.data.pack, text)
        if image := hf_config.get(IMAGE):
            images = ImageInputs(model, image)
            make_inputs, lengths = partial(images), images.lengths
    adapters = put_in(model, lora_of(config, model), config.train.seed) if frozen else None
    parts = split_model(model, dtype, config, adapters)
    can_part = config.train.mlp_parts == 1 and can_take_in_parts(parts)
    take_in_parts(parts, config.train.mlp_parts)
    if config.model.kernels == "liger":
        save_as_liger(parts.modules)

    def counted(choice: UnitChoice) -> Counts:
        parts = split_model(model, dtype, config, adapters, choice)
        rows = count(
            parts,
            make_inputs,
            lengths=lengths,
            twice=IMAGE in hf_config,
            chunk_tokens=config.train.head_chunk_tokens,
            shifted=not type(model).__name__.endswith("ForMaskedLM"),
        )
        return Counts.of(parts.spec, can_part, config.train.head_chunk_tokens, lengths, rows)

    return in_turn(counted)


def describe(hf_config: Mapping[str, Any]) -> Described:
    """Return what transformers makes of a ``config.json``.

    Raises:
        ModelError: transformers does not know the architecture, or not with such values.
    """
    if CLASS in hf_config:
        return Described(str(hf_config[CLASS]), None, None, False, None, (), None, 0)
    config, part = _text_part(hf_config)
    text = config.get_text_config()
    has_more = text is not config and not getattr(config, "is_encoder_decoder", False)
    tokens = 0
    if image := hf_config.get(IMAGE):
        if not has_more:
            raise ConfigError(f"--image: a {config.model_type} takes no images; leave it out")
        tokens = ImageInputs(build_skeleton(config, "bf16", auto=_WHOLE, frozen=True), image).tokens
    positions = num_positions(text.to_dict())
    kind, stored = str(config.model_type), stored_as(hf_config)
    return Described(kind, positions, part, has_more, stored, _cached(text), _experts(text), tokens)


def _cached(config: Any) -> tuple[tuple[int, int], ...]:
    """Return of each layer that keeps keys and values their elements of a token, and the tokens of its window or 0."""
    heads = getattr(config, "num_attention_heads", None) or 0
    if not isinstance(heads, int) or not heads:
        return ()
    if getattr(config, "kv_lora_rank", None):  # transformers keeps them as attention takes them
        elements = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        elements = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    # What is linear or a convolution keeps a state that does not grow.
    return tuple((elements, window * ("full" not in kind)) for kind in kinds if kind.endswith("attention"))


def _experts(config: Any) -> tuple[int, int] | None:
    """Return the experts of a layer and how many a token chooses; None of a dense model."""
    number = next(
        (
            int(value)
            for name in ("num_experts", "n_routed_experts", "num_local_experts")
            if (value := getattr(config, name, None))
        ),
        0,
    )
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    return (number, int(chosen)) if number and chosen else None


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
        config = without_quantisation(CONFIG_MAPPING[kind].from_dict(dict(hf_config)))
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
    if text is config or encodes or IMAGE in hf_config or not is_built_alone(text):
        return config, None
    return text, str(text.model_type)
