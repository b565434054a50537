"""A Hugging Face model without its weights: the config, and the module tree on the meta device.

Every *parameter* of a skeleton lies on the meta device and holds no bytes; every *buffer* is real and right,
because rotary frequencies, causal masks and the like are computed when a module is built and are stored
nowhere else. So the module tree of a 70B model costs megabytes, and binding its parameters to memory is all
that is left to do.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outsize import files
from outsize.checkpoint.files.checkpoint_files import ADAPTER_CONFIG, describe_missing
from outsize.checkpoint.files.quantised import KEY, quantisation_of, require_readable
from outsize.compat.torch_private import buffers_of, parameters_of
from outsize.compat.transformers_private import attention_of, initialize, kept_in_fp32
from outsize.errors import CheckpointError, ModelError, StorageError
from outsize.model.sizes.model_spec import check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# What code of models raises where a config says what it cannot build.
_NOT_BUILT = (ValueError, ImportError, LookupError, AttributeError, TypeError, RuntimeError, ArithmeticError)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A tensor from `torch.empty` of this many elements becomes a parameter (buffers have contents, or are small).
# It is made on the meta device right away: the kernel refuses to promise a machine of 24 GiB the 30 GiB of
# one layer's experts.
_LARGE_ELEMENTS = 1 << 20

_NOT_READ_AGAIN = (
    "{}/config.json was read, and a moment later could not be: its disk or share fails, or the file was removed "
    "meanwhile; look at the kernel log (dmesg), or copy the model to another disk"
)


def load_hf_config(
    path_or_hub_id: str | os.PathLike[str], trust_remote_code: bool = False
) -> "PretrainedConfig":
    """Return the config of a model.

    Args:
        path_or_hub_id: a directory with a ``config.json``, the file itself, or the id of a model on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        CheckpointError: the directory has no ``config.json``, or it is not JSON.
        ModelError: there is no such model, transformers does not know its architecture, a size is none that a model
            has, or code of its own is not trusted.
        StorageError: a library could not read what was read a moment before.
    """
    from huggingface_hub.errors import HFValidationError, StrictDataclassError
    from transformers import AutoConfig

    name = os.fspath(path_or_hub_id)
    path = Path(os.path.expanduser(name))
    if path.exists():
        fields = _require_config(path / "config.json" if path.is_dir() else path)
        name = str(path)
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or name.endswith(".json"):
        raise ModelError(
            f"{name}: no such file or directory; give a model directory, a config.json or a hub id"
        )
    else:
        name = download_small_files(name)
        fields = _require_config(Path(name) / "config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} comes with Python code of its own, which runs only where you say so: model.trust_remote_code "
                "in the configuration of a run, --trust-remote-code of a command, trust_remote_code=True of a call"
            ) from error
        first_line = str(error).strip().partition("\n")[0]
        unseen = "config.json" in first_line or isinstance(error.__cause__ or error, HFValidationError)
        if unseen and isinstance(fields, dict) and "model_type" in fields:
            raise StorageError(_NOT_READ_AGAIN.format(name)) from error
        raise ModelError(
            f"cannot read the config of {name}: {first_line}; check the name, and that this version of "
            "transformers knows the architecture"
        ) from error
    return cast("PretrainedConfig", config)


def download_small_files(hub_id: str, revision: str | None = None) -> str:
    """Return the local directory of a model of the hub, its small files there; transformers would retry for long.

    Args:
        hub_id: of the model.
        revision: branch, tag or commit; None is the main one.

    Raises:
        ModelError: the hub hands out no such model.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(hub_id, revision=revision, allow_patterns=["*.json", "*.py"])
    except (
        Exception
    ) as error:  # the hub client raises a dozen kinds: no network, no such model, gated, bad name
        raise ModelError(
            f"{describe_missing(hub_id, error)}; check the name and the network, or give the directory of a model"
        ) from error


def build_skeleton(
    hf_config: "PretrainedConfig",
    dtype: str = "fp32",
    attention: str = "auto",
    trust_remote_code: bool = False,
    auto: str | None = None,
    frozen: bool = False,
) -> nn.Module:
    """Return the model of ``hf_config`` in training mode: parameters on the meta device, buffers real.

    Tied weights are one and the same parameter. The model has a config of its own, with the cache of keys and
    values off; the attention that it will use is in `compat.transformers_private.attention_of` it. Buffers that
    transformers keeps in fp32 whatever the dtype (router corrections of DeepSeek-V3) are fp32. Buffers that a
    checkpoint stores hold their initial values until `CheckpointReader.load_buffers`.

    Args:
        hf_config: what to build.
        dtype: dtype of the parameters, ``fp32``, ``bf16`` or ``fp16``.
        attention: ``auto`` (sdpa where the architecture has it, else eager) or a name that transformers
            knows.
        trust_remote_code: whether code that comes with the model may run.
        auto: class of transformers that builds it, e.g. ``AutoModel`` for one that ends in hidden states; None makes
            decoders causal, and encoders masked language models.
        frozen: whether its own weights do not train, so that a quantised checkpoint will do
            (`checkpoint.files.quantised`).

    Raises:
        ModelError: not a language model outsize can train, or it cannot be built as asked.
    """
    config = unquantised(hf_config, trains=not frozen)
    for part in (config, config.get_text_config()):
        part.use_cache = False
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    if attention != "auto":
        options["attn_implementation"] = attention
    with quiet_torchao():
        factory = _factory(config) if auto is None else _class_of(auto).from_config
    try:
        with quiet_torchao(), _parameters_on_meta():
            model: nn.Module = factory(config, **options)
    except _NOT_BUILT as error:
        if auto is not None:
            advice = f"; transformers has {auto} for other architectures"
        else:
            advice = "; attention=eager works" if _can_be_built(factory, config, options) else ""
        raise ModelError(
            f"cannot build a {config.model_type} model with attention={attention!r}: {error}{advice}"
        ) from error
    _finish(model, DTYPES[dtype])
    logger.info("%s: attention %s", type(model).__name__, attention_of(model))
    return model.train()


def build_image_model(config: Mapping[str, Any], dtype: str) -> nn.Module:
    """Return the model of diffusers that ``config`` describes, in training mode, its parameters on the meta device.

    Raises:
        ModelError: diffusers is not installed, or cannot build it.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ModelError(
            f"a {config['_class_name']} is a model of diffusers; install it with: pip install 'outsize[diffusion]'"
        ) from error
    try:
        with quiet_torchao(), _parameters_on_meta():
            model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    except (AttributeError, *_NOT_BUILT) as error:
        raise ModelError(
            f"diffusers cannot build a {config['_class_name']} of this config: {error}"
        ) from error
    return cast(nn.Module, nn.Module.to(model, DTYPES[dtype]).train())


def _can_be_built(
    factory: Callable[..., nn.Module], config: "PretrainedConfig", options: dict[str, Any]
) -> bool:
    """Return whether a model that could not be built as asked can be built with eager attention."""
    if options.get("attn_implementation") == "eager":
        return False
    try:
        with quiet_torchao(), _parameters_on_meta():
            factory(config, **{**options, "attn_implementation": "eager"})
    except _NOT_BUILT:
        return False
    return True


def unquantised(hf_config: "PretrainedConfig", *, trains: bool = False) -> "PretrainedConfig":
    """Return a copy of a config that says nothing of quantisation, for weights that are decoded as they are read.

    Raises:
        ModelError: the format is not read, or the weights are to train.
    """
    quantisation = quantisation_of(hf_config)
    if quantisation is not None:
        require_readable(quantisation, trains=trains)
    return without_quantisation(hf_config)


def without_quantisation(hf_config: "PretrainedConfig") -> "PretrainedConfig":
    """Return a copy of a config, and of its parts, that says nothing of how weights are stored."""
    config = copy.deepcopy(hf_config)
    for part in (config, *vars(config).values()):
        if hasattr(part, KEY):
            delattr(part, KEY)
    return config


def _require_config(path: Path) -> Any:
    """Return what ``path`` holds; raise unless it is a file of JSON, with sizes that a model can have."""
    if not path.exists():
        adapters = path.parent / ADAPTER_CONFIG
        if adapters.is_file():
            raise CheckpointError(
                f"{path.parent} holds adapters, and not the model that they adapt; name that model here; with "
                f"train.method=lora and lora.from={path.parent} they train on"
            )
        raise CheckpointError(f"{path.parent} has no {path.name}; a Hugging Face model directory has one")
    fields = files.read_json(path, CheckpointError, "download it again")
    check_sizes(fields, path)
    return fields


def _factory(config: "PretrainedConfig") -> Callable[..., nn.Module]:
    """Return what builds a language model of ``config``: causal, or masked for an encoder."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{config.model_type} is an encoder-decoder, which outsize train takes for sft alone"
        )
    if not is_built_alone(config):
        raise ModelError(
            f"{config.model_type} is not a language model that transformers can build as AutoModelForCausalLM"
        )
    auto = AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM
    return cast(Callable[..., nn.Module], auto.from_config)


def is_built_alone(config: "PretrainedConfig") -> bool:
    """Return whether transformers builds a language model of a config."""
    from transformers.models.auto import modeling_auto

    tables = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    own_code = {"AutoModelForCausalLM", "AutoModelForMaskedLM"} & set(getattr(config, "auto_map", None) or {})
    return bool(own_code) or any(config.model_type in table for table in tables)


def is_masked(config: "PretrainedConfig") -> bool:
    """Return whether what is built of a config without further words predicts hidden tokens, and not the next one."""
    from transformers.models.auto import modeling_auto

    remote = getattr(config, "auto_map", None) or {}
    causal = (
        config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or "AutoModelForCausalLM" in remote
    )
    masked = (
        config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        or "AutoModelForMaskedLM" in remote
    )
    # Encoders that can also decode (BERT, RoBERTa, …) are in both tables; their config says which they are.
    if getattr(config, "is_encoder_decoder", False):
        return False
    named = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ())
    return masked and not (causal and (getattr(config, "is_decoder", False) or named))


def _class_of(auto: str) -> Any:
    import transformers

    return getattr(transformers, auto)


def initial_values(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return what parameters of a skeleton begin with, drawn as the model draws them; the skeleton stays one.

    Args:
        model: of transformers.
        names: of the parameters, a new head's, say.
    """
    values = {}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        skeletons = {name: p for name, p in parameters_of(module).items() if p is not None}
        for name, p in skeletons.items():
            parameters_of(module)[name] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype))
        with torch.no_grad():
            initialize(model, module)
        values.update({f"{path}.{name}": parameters_of(module)[name] for name in skeletons})
        parameters_of(module).update(skeletons)
    return {name: cast(Tensor, values[name]).detach() for name in names}


# What layers are initialised with, torch's functions or those that transformers puts in their place; on the meta device
# they would take 2 ms for each parameter of a model. transformers' `no_init_weights` would leave out buffers as well.
_DRAWS = ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_")


# Factories whose elements are all alike: one element stands for all of them until something is written.
_UNIFORM = (torch.zeros, torch.ones, torch.full)


class _WithoutContents(TorchFunctionMode):
    """Makes large tensors without memory, and draws no contents for tensors on the meta device.

    Those that have no contents yet go on the meta device. Those whose elements are all alike are one element that is
    expanded: whether they become a parameter, which goes on the meta device, or a buffer is known later.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _DRAWS:
            drawn = args[0] if args else kwargs["tensor"]
            if drawn.is_meta:
                return drawn
        if func is torch.empty and kwargs.get("device") is None:
            empty = func(*args, **{**kwargs, "device": "meta"})
            return empty if empty.numel() >= _LARGE_ELEMENTS else func(*args, **kwargs)
        if func in _UNIFORM and not {"device", "out", "requires_grad"} & kwargs.keys():
            shape = func(*args, **{**kwargs, "device": "meta"})
            if shape.numel() >= _LARGE_ELEMENTS:
                value = 1.0 if func is torch.ones else 0.0
                if func is torch.full:
                    value = args[1] if len(args) > 1 else kwargs["fill_value"]
                return torch.full((), value, dtype=shape.dtype).expand(shape.shape)
        return func(*args, **kwargs)


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Context of imports of torchao, or of transformers, which imports it where it is installed.

    It warns of each of its libraries that was built for another machine, and torch of how it registers itself.
    """
    logs = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While it lasts, parameters are made on the meta device and buffers on the CPU."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _WithoutContents():
        yield


def _finish(model: nn.Module, dtype: torch.dtype) -> None:
    """Tie what is tied (each registration made a parameter of its own); give buffers their final dtype."""
    cast(Any, model).tie_weights()
    keep_fp32 = kept_in_fp32(model, dtype)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} was not computed when the model was built; this model is not supported"
            )
        final = buffer.float() if buffer.is_floating_point() and any(p in name for p in keep_fp32) else buffer
        if (final := final.contiguous()) is not buffer:
            owner, _, leaf = name.rpartition(".")
            buffers_of(model.get_submodule(owner))[leaf] = final
