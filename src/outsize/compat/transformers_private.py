"""Private names of transformers, TRL, PEFT and Liger Kernel: one function each.

They are of models and tokenizers, of padding that models read as text, of the steps of a `Trainer`, and of layers that
PEFT changes.
"""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn


def attention_of(model: nn.Module) -> str:
    """Return the name of the attention that ``model`` computes with, such as ``sdpa``."""
    config: Any = model.config
    return str(config._attn_implementation)


def attention_functions() -> list[Any]:
    """Return what attention is registered, and what makes masks for it: transformers' own, and a program's."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return [*ALL_ATTENTION_FUNCTIONS.values(), *ALL_MASK_ATTENTION_FUNCTIONS.values()]


def cache_layers(cache: Any) -> tuple[list[Any], list[Any]]:
    """Return the layers of a cache that grow with a text, and those over what an encoder has read, which do not."""
    crossed = getattr(cache, "cross_attention_cache", None)
    grow = getattr(cache, "self_attention_cache", cache)
    return list(getattr(grow, "layers", ())), list(getattr(crossed, "layers", ()))


def cached_tensors(layer: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that a layer of a cache holds, by attribute."""
    return [
        (name, value) for name, value in vars(layer).items() if isinstance(value, Tensor) and value.numel()
    ]


def window_length(layer: Any) -> int:
    """Return how many tokens a layer of a cache shows at most; 0 or less for all of a text."""
    return int(getattr(layer, "get_max_length", lambda: -1)())


def layer_numbers(unit: nn.Module) -> list[int]:
    """Return which layers of a cache a unit uses, as its attention has been told."""
    indices = (getattr(module, "layer_idx", None) for module in unit.modules())
    return sorted({number for number in indices if isinstance(number, int)})


def initialize(model: nn.Module, module: nn.Module) -> None:
    """Draw the parameters of ``module``, a part of ``model``, as a new model draws them."""
    untyped: Any = model
    untyped._init_weights(module)


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Return parts of names of what ``model`` keeps in fp32 where the rest is of ``dtype``."""
    untyped: Any = model
    return tuple(untyped._get_dtype_plan(dtype))


@cache
def output_collector() -> Any:
    """Return the context variable with the lists that layers put outputs in."""
    from transformers.utils import output_capturing

    return output_capturing._active_collector


def output_variable() -> Any:
    """Return the variable of Python behind `output_collector`, which compiled code cannot read."""
    return getattr(output_collector(), "context_var", output_collector())


# What `put_output_hooks` changes, which is no state that a forward leaves.
OUTPUT_HOOKS = ("._output_capturing_hooks_installed", "._forward_hooks", "._forward_hooks_with_kwargs")


def put_output_hooks(model: nn.Module) -> None:
    """Give models inside ``model`` the hooks that record outputs of layers, before a call asks for any."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            maybe_install_capturing_hooks(module)


def records_outputs(hook: object) -> bool:
    """Return whether a forward hook is one of those that record outputs of layers for the model's own code."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def has_hub_kernels(module: nn.Module) -> bool:
    """Return whether transformers has put kernels of the hub into ``module``."""
    return bool(getattr(module, "_use_kernels", False))


def encodes_as_the_library(tokenizer: Any) -> bool:
    """Return whether the class of a fast ``tokenizer`` has no code of its own for a text that becomes tokens."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    return bool(
        kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.__call__ is PreTrainedTokenizerFast.__call__
    )


def response_templates(tokenizer: Any, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield ways to take replies of a model apart: the tokenizer's or transformers' for its kind, and TRL's."""
    from transformers.cli.serving import utils

    known = getattr(utils, "get_response_template", None)  # not in the oldest one that is supported
    template = known(tokenizer, model) if known else getattr(tokenizer, "response_template", None)
    if template is not None:
        yield template
    if importlib.util.find_spec("trl"):
        from trl.chat_template_utils import add_response_schema

        with suppress(ValueError):  # a chat template that TRL does not know
            yield add_response_schema(copy.copy(tokenizer)).response_template


def sampling_by(draw: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return what `generate` takes as ``custom_generate`` to sample as it does, with draws of the caller's.

    Args:
        draw: given the scores [B, V] that tokens are drawn by, behind all that changes them; returns the tokens [B].
    """

    def drawn(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).scatter_(-1, draw(scores)[:, None], 0.0)

    def decode(model: Any, input_ids: Tensor, logits_processor: Any, **more: Any) -> Any:
        logits_processor.append(drawn)
        return model._sample(input_ids, logits_processor=logits_processor, **more)

    return decode


# What models call whose layers carry a state over all tokens, to have padding change none of it.
_LEAVES_OUT = "apply_mask_to_padding_states"


def reads_padding(model: nn.Module) -> bool:
    """Return whether padding before a text may change what a model that goes on with the text makes of it.

    An encoder is given its mask, and its decoder begins with one token. Others have to be given the mask and places
    that do not count padding, and to carry no state besides; whichever cannot show that they do, are taken to read it.
    """
    if cast(Any, model).config.is_encoder_decoder:
        return False
    modules = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    loaded = [module for name in modules if (module := sys.modules.get(name)) is not None]
    if any(map(_has_cache, loaded)):
        return True
    if any(hasattr(module, _LEAVES_OUT) for module in loaded):
        return False
    return bool(getattr(model, "_is_stateful", False)) or not _is_given_places(cast(Any, model))


def _has_cache(module: Any) -> bool:
    """Return whether a module of a model has a cache of keys and values of its own, which may count padding."""
    from transformers import DynamicCache

    kinds = (value for value in vars(module).values() if inspect.isclass(value))
    return any(issubclass(kind, DynamicCache) and kind.__module__ == module.__name__ for kind in kinds)


def _is_given_places(model: Any) -> bool:
    """Return whether a forward takes positions, and what prepares its arguments hands them and the mask on."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    ids = torch.ones((1, 2), dtype=torch.long)
    try:
        inputs = model.prepare_inputs_for_generation(
            ids, attention_mask=ids, position_ids=ids, use_cache=False
        )
    except (
        Exception
    ):  # each model writes it anew: then it is taken to count places by itself, the careful way
        return False
    return inputs.get("attention_mask") is not None and inputs.get("position_ids") is not None


class TrainerSteps:
    """Stands before the class of a trainer, and gives some of its private steps names of their own."""

    args: Any

    def clipped(self, most: float) -> Any:
        """Clip the gradients to a norm of ``most``, and return the norm that they had."""
        raise NotImplementedError

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which a checkpoint is written."""
        yield

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.clipped(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.clipped(float("inf")) if grad_norm is None else grad_norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.saving():
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _send_telemetry(self) -> None:
        """Tell nobody; TRL would tell its makers which trainer ran on which model."""


def on_device(trainer: Any, batch: Any) -> Any:
    """Return ``batch`` where ``trainer`` computes."""
    return trainer._prepare_inputs(batch)


def forget_metrics(trainer: Any) -> None:
    """Throw away what TRL's ``trainer`` has noted of steps for its next line of a log."""
    for kind in ("_metrics", "_stored_metrics"):
        for noted in getattr(trainer, kind, {}).values():
            noted.clear()


def use_one_device(arguments: Any) -> None:
    """Have a trainer of ``arguments`` compute on one GPU, whichever else there are."""
    if arguments.device is not None:  # asking sets the number
        arguments._n_gpu = min(arguments.n_gpu, 1)


def put_kernels_in(model: nn.Module, **kernels: bool) -> None:
    """Have Liger put its kernels into ``model``; keywords leave some out."""
    from liger_kernel.transformers import monkey_patch

    monkey_patch._apply_liger_kernel_to_instance(model, **kernels)


def changed_weight(around: nn.Module, config: Any, path: str, layer: nn.Module) -> Tensor:
    """Return the weight that PEFT leaves a layer with when it puts an adapter around it.

    Args:
        around: PEFT's model, with an adapter of LoRA.
        config: of that adapter.
        path: of the layer in the model, which may decide its rank.
        layer: with its weight, which is changed.
    """
    parent = nn.Module()
    parent.add_module("layer", layer)
    tuner = cast(Any, around).base_model
    tuner._create_and_replace(config, "default", layer, "layer", parent, current_key=path)
    return cast(Tensor, layer.weight).detach()


def image_processor_of(config: Any, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what sizes the images of a vision-language model, by Pillow, and what it is called with.

    Args:
        config: of the model.
        settings: of the processor that lies beside it; where there are none, the family's own, with sides and patches
            that ``config`` states.

    Raises:
        KeyError: transformers has none for such models.
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    make: Any = IMAGE_PROCESSOR_MAPPING[type(config)]["pil"]
    processor = make.from_dict(dict(settings)) if settings else make(**_stated_sizes(make, config))
    arguments: dict[str, Any] = {}
    with suppress(ImportError):  # of one that asks for torchvision, for its videos
        arguments = dict(getattr(PROCESSOR_MAPPING[type(config)], "images_kwargs", None) or {})
    merge_size = getattr(config, "spatial_merge_size", None)
    if merge_size and "patch_size" in vars(make):  # of Pixtral's, one token is of several patches
        arguments["patch_size"] = config.vision_config.patch_size * merge_size
    return processor, arguments


def _stated_sizes(make: Any, config: Any) -> dict[str, Any]:
    """Return the arguments of an image processor that a config states."""
    vision = config.vision_config
    side, patch = (
        value[0] if isinstance(value, list | tuple) else value
        for value in (getattr(vision, "image_size", None), vision.patch_size)
    )
    sizes: dict[str, Any] = {}
    square = {"height": side, "width": side}
    usual = getattr(make, "size", None) or {}
    if side and getattr(make, "max_image_size", None):  # an image in tiles, of up to four a side
        sizes |= {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
    elif side and "height" in usual:
        sizes["size"] = square
    elif side and len(usual) == 1:
        sizes["size"] = dict.fromkeys(usual, side)
    if side and getattr(make, "crop_size", None):
        sizes["crop_size"] = square
    others = {
        "patch_size": patch,
        "merge_size": getattr(vision, "spatial_merge_size", None),
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None),
        "image_grid_pinpoints": getattr(config, "image_grid_pinpoints", None),
    }
    return sizes | {name: value for name, value in others.items() if value and getattr(make, name, None)}
