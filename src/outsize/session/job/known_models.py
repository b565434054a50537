"""Models in the numbers that a plan needs: counted without them, or noted by a trial, and remembered for the user.

What is counted depends on the config of the model, on settings of the run, on the versions of torch, transformers and
PEFT, and on our source: all of them make the name of an entry. So a question about a model that has been asked about
needs no torch. What a trial notes depends on the machine as well.
"""

import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from outsize import user_cache
from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.runtime.trial.counts import Counts, dump, parse
from outsize.runtime.trial.measured import KnownRows, Row, trial_lengths

_KIND, _TRIALS = "counts", "trials"
# Folders of what decides a count.
_ROOMS = ("compat", "checkpoint/files", "codecs", "config", "model", "optim", "runtime", "session/job")

# Packages whose versions are part of an entry's name.
_PACKAGES = (
    *("torch", "transformers", "peft", "diffusers", "accelerate"),
    *("liger-kernel", "kernels", "flash-attn", "torchao"),
)
# Modules of code that these and our source vouch for; the last compute nothing.
_VERSIONED = {name.replace("-", "_") for name in _PACKAGES} | {"outsize"} | sys.stdlib_module_names
_VERSIONED |= {"huggingface_hub", "safetensors", "tqdm", "typing_extensions"}


@dataclass(frozen=True, slots=True)
class Described:
    """A model in transformers' words.

    Attributes:
        kind: its model type, or that of its text part.
        positions: tokens of the longest sequence; None for no limit.
        part: the model type of its text part, where that is what is meant; None where it is the whole model.
        has_more: whether it has parts beside a text part, which a batch of text leaves out, that cannot be built alone.
        stored: the format of its weights and what that allows, where they are quantised.
        cached: of each layer that keeps keys and values, their elements of a token, and the tokens of its window or 0.
        experts: of a layer, and how many of them a token chooses; None of a dense model.
        image_tokens: that the image in a sequence takes of it; 0 where none was asked about.
    """

    kind: str
    positions: int | None
    part: str | None
    has_more: bool
    stored: str | None
    cached: Sequence[tuple[int, int]]
    experts: tuple[int, int] | None
    image_tokens: int


def described(hf_config: Mapping[str, Any]) -> Described:
    """Return what transformers makes of a ``config.json``.

    Raises:
        ModelError: it does not know the architecture, or not with such values.
    """
    name = user_cache.digest_of(["described", hf_config, _here()])
    content = user_cache.load(_KIND, name)
    if content is not None:
        try:
            return Described(**json.loads(content))
        except (TypeError, ValueError):
            pass  # broken: asked again
    from outsize.session.job.model_setup import describe  # torch and transformers take seconds to import

    description = describe(hf_config)
    user_cache.store(_KIND, name, json.dumps(asdict(description)).encode())
    return description


def counted(hf_config: Mapping[str, Any], config: Config) -> Counts:
    """Return what a model takes as a run with ``config`` would train it.

    Raises:
        ModelError: none that a run can train, or one that cannot be counted without its weights.
        ConfigError: adapters for layers that it does not have.
    """
    name = user_cache.digest_of(["counted", hf_config, _settings(config), _here()])
    content = user_cache.load(_KIND, name)
    if content is not None:
        try:
            return parse(content)
        except ValueError:
            pass  # broken: counted again
    from outsize.session.job.model_setup import count_model

    counts = count_model(hf_config, config)
    user_cache.store(_KIND, name, dump(counts))
    return counts


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run that what a model takes may depend on."""
    model, train, optimizer = config.model, config.train, config.optimizer
    return {
        "model": model.model_dump(mode="json", exclude={"path"}),
        "data": [trial_lengths(config.data.seq_len, 2), config.data.pack],
        "train": [train.method, train.mlp_parts, train.head_chunk_tokens],
        "lora": config.lora.model_dump(mode="json") if train.method == "lora" else None,
        "rates": [optimizer.layer_decay, [group.model_dump(mode="json") for group in optimizer.groups]],
    }


class KnownTrials(KnownRows):
    """Notes of the trials of a run, which a second run like it begins with.

    Args:
        model: what tells the model from others, of what JSON knows: units, settings, code, and what computes.
        num_units: of the model, streamed.
    """

    def __init__(self, model: Sequence[Any], num_units: int) -> None:
        super().__init__()
        self._model, self._num_units = model, num_units

    def get(self, name: str) -> list[Row] | None:
        """Return the notes of passes, of this process or of one before."""
        rows = super().get(name)
        if rows is None and (content := user_cache.load(_TRIALS, self._entry(name))) is not None:
            try:
                rows = _rows().validate_json(content)
            except ValueError:
                return None  # broken: tried again
            if any(len(row.kept) not in (self._num_units, self._num_units - 1) for row in rows):
                return None
            super().put(name, rows)
        return rows

    def put(self, name: str, rows: list[Row]) -> None:
        """Remember the notes of passes, for other processes as well."""
        super().put(name, rows)
        user_cache.store(_TRIALS, self._entry(name), _rows().dump_json(rows))

    def _entry(self, name: str) -> str:
        return user_cache.digest_of(["trial", name, self._model, _here()])


def has_unversioned_code(model: Any) -> bool:
    """Whether any code of ``model``, of its hooks and of attention comes from packages whose versions name no entry.

    That is a program's own, and remote code. It may change without a sign, by what it calls, so that notes of it say
    nothing later. Looked at are classes and their methods, what stands in their files under a name, hooks, and
    functions among a module's attributes.
    """
    from outsize.compat.torch_private import has_hooks_of_all, hooks_of  # which takes seconds to import
    from outsize.compat.transformers_private import attention_functions

    classes = {each for module in model.modules() for each in type(module).__mro__}
    namespaces: list[Mapping[str, Any]] = [vars(each) for each in classes]
    namespaces += [vars(sys.modules[each.__module__]) for each in classes if each.__module__ in sys.modules]
    namespaces += [vars(module) for module in model.modules()]
    named = (value for names in namespaces for value in list(names.values()))
    functions = (value for value in named if isinstance(value, FunctionType | MethodType | partial))
    hooks = (hook for module in model.modules() for each in hooks_of(module) for hook in each.values())
    code = chain(classes, attention_functions(), hooks, functions)
    return has_hooks_of_all() or any(_is_unversioned(each) for each in code)


def _is_unversioned(code: Any) -> bool:
    while isinstance(code, partial):
        code = code.func
    names = getattr(code, "__globals__", {}).get("__name__", ""), getattr(code, "__module__", None) or ""
    return not all(name.partition(".")[0] in _VERSIONED for name in names if name) or not any(names)


@cache
def _rows() -> TypeAdapter[list[Row]]:
    return TypeAdapter(list[Row])


@cache
def _here() -> list[Any]:
    return [dict(user_cache.versions_of(*_PACKAGES)), user_cache.source_digest(*_ROOMS)]


# Models of diffusers: the tokens that their pipelines make of an image or a video and a text.
CLASS, SAMPLE = "_class_name", "_outsize_sample"
# Of a vision-language model: the pixels of the image in each sequence, and the settings of its processor.
IMAGE = "_outsize_image"
# Tokens of the shortest sequence that is tried; longer ones are this twice and four times.
_SHORTEST = 64


class Sample(NamedTuple):
    """Tokens of one sample: of its image or video, and of its text."""

    image: int
    text: int

    @property
    def tokens(self) -> int:
        """Both together."""
        return self.image + self.text

    @property
    def rows(self) -> int:
        """In how many rows tokens of a trial's image lie, so that no side is long."""
        powers = (1 << power for power in range(self.image.bit_length() // 2 + 1))
        return max(rows for rows in powers if self.image % rows == 0)

    def trials(self, multiple: int) -> "tuple[Sample, ...]":
        """Return shorter samples in much the same shares, each twice the one before; images go by even numbers."""
        whole = max(multiple, 2)
        text = max(round(self.text * _SHORTEST / self.tokens / multiple), 1) * multiple
        image = max(round(self.image * text / self.text / whole), 1) * whole
        return tuple(Sample(image * times, text * times) for times in (1, 2, 4))


@dataclass(frozen=True, slots=True)
class Family:
    """How a pipeline of diffusers makes tokens for its transformer.

    Attributes:
        pixels: of a side that its VAE makes one latent of.
        frames: that it makes one latent of; 0 for images.
        packs: latents of a side that the pipeline puts into one token, before any patches of the model.
        text: tokens of a text, where the pipeline is not told otherwise.
        multiple: of which the model rounds up numbers of tokens.
    """

    pixels: int = 8
    frames: int = 0
    packs: int = 1
    text: int = 512
    multiple: int = 1


FAMILIES: Mapping[str, Family] = {
    "FluxTransformer2DModel": Family(packs=2),
    "Flux2Transformer2DModel": Family(packs=2),
    "ChromaTransformer2DModel": Family(packs=2),
    "QwenImageTransformer2DModel": Family(packs=2),
    "SD3Transformer2DModel": Family(text=333),
    "PixArtTransformer2DModel": Family(text=300),
    "SanaTransformer2DModel": Family(pixels=32, text=300),
    "Lumina2Transformer2DModel": Family(text=256),
    "ZImageTransformer2DModel": Family(multiple=32),
    "WanTransformer3DModel": Family(frames=4),
    "LTXVideoTransformer3DModel": Family(pixels=32, frames=8, text=128),
    "HunyuanVideoTransformer3DModel": Family(frames=4, text=256),
    "CogVideoXTransformer3DModel": Family(frames=4, text=226),
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a model of diffusers.

    Raises:
        ModelError: one whose inputs are not known.
    """
    name = hf_config.get(CLASS)
    if name not in FAMILIES:
        raise ModelError(
            f"no plan of a {name}: what its samples look like is not known here; known are {', '.join(FAMILIES)}. "
            "outsize.wrap measures any model on a batch of yours"
        )
    return FAMILIES[str(name)]


def patch_of(hf_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the latents, in time and of a side, of which the model itself makes one token."""
    family = family_of(hf_config)
    patch = hf_config.get("patch_size") or (hf_config.get("all_patch_size") or [1])[0]
    if isinstance(patch, list | tuple):
        return int(patch[0]), int(patch[-1])
    return int(hf_config.get("patch_size_t") or 1), 1 if family.packs > 1 else int(patch)


def sample_of(
    hf_config: Mapping[str, Any], seq_len: int | None, image: str | None, frames: int | None
) -> Sample:
    """Return the tokens of a sample of a model of diffusers.

    Args:
        hf_config: of the model.
        seq_len: tokens of a sample, of its text too; None where ``image`` says it.
        image: pixels, such as ``1024x768``; None for the 1,024 of a square, or as ``seq_len`` says.
        frames: of a video; None for one image.

    Raises:
        ModelError: what its samples look like is not known.
        ConfigError: sizes that are none of this model.
    """
    family = family_of(hf_config)
    if frames is not None and not family.frames:
        raise ConfigError(f"--frames: {hf_config[CLASS]} makes images; leave it out")
    if seq_len is not None:
        if image is not None or frames is not None:
            raise ConfigError("--seq-len and --image or --frames both say how large a sample is; write one")
        if seq_len <= family.text + 1:
            raise ConfigError(
                f"--seq-len: {seq_len} tokens are a text of {family.text} and no image; raise it"
            )
        return Sample(seq_len - family.text, family.text)
    in_time, side = patch_of(hf_config)
    step = family.pixels * family.packs * side
    sides = [side // step for side in pixels_of(image or "1024x1024", step)]
    latents = 1 + ((frames or 1) - 1) // family.frames if family.frames else 1
    return Sample(math.ceil(latents / in_time) * math.prod(sides), family.text)


def pixels_of(image: str, step: int = 1) -> list[int]:
    """Return the width and the height of an image, of ``step`` at least."""
    try:
        pixels = [int(part) for part in image.lower().split("x")]
    except ValueError:
        pixels = []
    pixels = pixels * 2 if len(pixels) == 1 else pixels
    if len(pixels) != 2 or min(pixels) < step:
        raise ConfigError(f"--image: {image!r} is to be pixels, such as 1024x768, at least {step} a side")
    return pixels


# Where configs have the width of what a text encoder hands on, the first that there is.
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "caption_channels", "text_embed_dim", "cap_feat_dim")
# Models that take latents as tokens: [B, tokens, channels].
_AS_TOKENS = ("LTXVideoTransformer3DModel",)
_FRAMES_FIRST = ("CogVideoXTransformer3DModel",)


def made_up_sample(model: Any, hf_config: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """Return what the forward of ``model``, one of diffusers, takes for one sample."""
    import torch

    config: Any = model.config
    dtype = next(model.parameters()).dtype
    (in_time, side), high = patch_of(hf_config), sample.rows
    wide = sample.image // high
    one = torch.ones(1, dtype=dtype)

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=dtype)

    pixels = (config.in_channels, high * side, wide * side)
    text = zeros(1, sample.text, next(config[name] for name in _TEXT_WIDTHS if config.get(name)))
    mask = torch.ones(1, sample.text, dtype=torch.bool)
    if hf_config[CLASS] == "ZImageTransformer2DModel":
        return {"x": [zeros(pixels[0], 1, *pixels[1:])], "t": one, "cap_feats": [text[0]]}
    if family_of(hf_config).packs > 1 or hf_config[CLASS] in _AS_TOKENS:
        latents = zeros(1, sample.image, config.in_channels)
    elif not family_of(hf_config).frames:
        latents = zeros(1, *pixels)
    elif hf_config[CLASS] in _FRAMES_FIRST:
        vars(model.patch_embed)["max_text_seq_length"] = sample.text  # of which it makes positions
        latents = zeros(1, in_time, *pixels)
    else:
        latents = zeros(1, pixels[0], in_time, *pixels[1:])
    inputs: dict[str, Any] = {
        "hidden_states": latents,
        "encoder_hidden_states": text,
        "timestep": torch.tensor([500]),
        "pooled_projections": zeros(1, config.get("pooled_projection_dim") or 1),
        "guidance": one if config.get("guidance_embeds", True) else None,
        "encoder_attention_mask": mask,
        "encoder_hidden_states_mask": mask,
        "img_shapes": [[(1, high, wide)]],
        "num_frames": 1,
        "height": high,
        "width": wide,
    }
    if axes := config.get("axes_dims_rope"):
        inputs |= {
            "img_ids": torch.zeros(sample.image, len(axes)),
            "txt_ids": torch.zeros(sample.text, len(axes)),
        }
    if config.get("use_rotary_positional_embeddings"):
        inputs["image_rotary_emb"] = (torch.ones(sample.image, config.attention_head_dim),) * 2
    if hf_config[CLASS] == "PixArtTransformer2DModel":
        given = {"resolution": zeros(1, 2), "aspect_ratio": zeros(1, 1)}
        inputs["added_cond_kwargs"] = given if model.use_additional_conditions else dict.fromkeys(given)
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}
