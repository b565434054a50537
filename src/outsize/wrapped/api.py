"""`outsize.wrap`, `outsize.load` and `outsize.unwrap`."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_files import locate_checkpoint
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader, WeightSource
from outsize.checkpoint.run_checkpoint import check_model_files
from outsize.choices import BlockKernels, Compile, Dtype, Home, Moments, Products
from outsize.codecs.codec_spec import FrozenCodec
from outsize.compat.torch_private import is_compiled_in_place, parameters_of
from outsize.errors import ConfigError
from outsize.model.adapters import AdapterSource, put_in
from outsize.model.build import build_skeleton, initial_values, load_hf_config
from outsize.model.compiled import take_eager
from outsize.model.liger import check_plain, take_liger, take_plain
from outsize.model.products import error_of, take_native
from outsize.model.sizes.model_spec import TensorSpec
from outsize.model.split import frozen_by, split
from outsize.model.stored_adapters import StoredAdapters, find_adapters, load_in
from outsize.model.tiled import take_whole
from outsize.session.job.model_setup import change_blocks
from outsize.spin import late_warning
from outsize.storage.prealloc import storage_errors
from outsize.streamed.spec import BlockSettings, choose_dtype
from outsize.wrapped.arguments import (
    Head,
    WrapSettings,
    check_one_process,
    memory_of,
    store_dir_of,
    transport_of,
)
from outsize.wrapped.at_home.home_parameter import HomeParameter, flat_values, plainly, show_plainly
from outsize.wrapped.inferring import say_without_cache, take_generation_config
from outsize.wrapped.module import attach, detach, is_wrapped, runner_of
from outsize.wrapped.optimizer import make_way_for_others
from outsize.wrapped.parameters import Fill
from outsize.wrapped.runner import Runner

_log = logging.getLogger(__name__)


@storage_errors()
def wrap(
    model: nn.Module,
    *,
    device: str = "auto",
    device_memory: str | int | None = None,
    home: Home = "auto",
    microbatches: int = 1,
    store_dir: str | os.PathLike[str] | None = None,
    head: Head = "auto",
    base_codec: FrozenCodec = "raw",
    table_codec: FrozenCodec = "raw",
    transport: Mapping[str, str] | None = None,
    state: Moments = "fp32",
    mlp_parts: int = 1,
    compile: Compile = "off",
    kernels: BlockKernels = "none",
    products: Products = "native",
    run_dir: str | os.PathLike[str] | None = None,
    **memory: Any,
) -> nn.Module:
    """Stream ``model``, the same object, unit by unit from now on; set ``requires_grad`` first.

    Args:
        model: any module whose blocks stand in a `torch.nn.ModuleList`, its parameters fp32, bf16 or fp16, and all that
            train of one of them. It computes as it did.
        device: what computes: ``cpu``, ``cuda:N``, ``emulated:1``, ``auto`` (an accelerator if there is one), or
            several workers, ``cuda:all``, ``cuda:0,1``, ``emulated:4``, which run the units in stages.
        device_memory: budget of each device, e.g. ``"20GiB"``; None is what is free, less a margin.
        home: where weights, gradients and optimizer state rest; ``auto`` is host memory if they fit.
        microbatches: most parts that each batch is cut into; weights cross to the device once per pass all the same.
        store_dir: directory of a disk home, best on a local NVMe, made if absent; None makes a temporary one.
        head: ``resident`` keeps it on the device throughout a pass, for a forward that uses its weight itself, as those
            of TRL's trainers do; ``auto`` does so from the first such forward on; ``streamed`` refuses it.
        base_codec: how frozen matrices of blocks rest and travel: raw, ``nf4``, ``nf4-double``, ``int8`` or ``fp8``.
        table_codec: the same for a frozen embedding and head.
        transport: codecs on the link, e.g. ``{"gradients": "int8"}``; with one of ``weights``, frozen units rest so.
        state: what `outsize.AdamW` keeps its moments in: ``fp32``, ``bf16`` or ``int8``.
        mlp_parts: parts in which MLPs take the tokens of a microbatch, see the section ``train`` of a run.
        compile: ``blocks`` compiles each kind of block at the first call of a form, see the section ``model`` of a run.
        kernels: ``liger`` has norms and other operations of blocks computed by its own, see there.
        products: ``fp8`` and ``fp8-rowwise`` have linear layers of blocks multiply in 8 bits, see there.
        run_dir: directory for the files of a run, for `outsize watch`, `report` and `doctor`. None writes nothing.
        memory: other keys of the section ``memory`` of a run: ``host_memory``, ``disk_memory``, ``activations``, …

    Raises:
        ConfigError: an argument that cannot be, or a model that is wrapped.
        ModelError: a model without a list of blocks, one that trains several dtypes, or one that does not go as asked.
        BudgetExceededError: the home does not fit its tier.
    """
    settings = WrapSettings(
        memory=memory_of(wrap, device, device_memory, home, memory, store_dir),
        microbatches=microbatches,
        store_dir=store_dir_of(store_dir),
        codecs=(base_codec, table_codec),
        head=head,
        transport=transport_of(transport),
        moments=state,
        blocks=BlockSettings(mlp_parts, compile, kernels, products),
    )
    return _recorded(_attach(model, settings, _from_memory(model)), run_dir)


@storage_errors()
def load(  # noqa: D417 - most arguments are those of `wrap`
    path_or_hub_id: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: Dtype = "auto",
    attention: str = "auto",
    trust_remote_code: bool = False,
    trainable: bool = True,
    device: str = "auto",
    device_memory: str | int | None = None,
    home: Home = "auto",
    microbatches: int = 1,
    store_dir: str | os.PathLike[str] | None = None,
    head: Literal["auto", "streamed", "resident", "none"] = "auto",
    base_codec: FrozenCodec = "raw",
    table_codec: FrozenCodec = "raw",
    transport: Mapping[str, str] | None = None,
    state: Moments = "fp32",
    mlp_parts: int = 1,
    compile: Compile = "off",
    kernels: BlockKernels = "none",
    products: Products = "native",
    run_dir: str | os.PathLike[str] | None = None,
    **memory: Any,
) -> nn.Module:
    """Return a wrapped model whose weights went from its checkpoint straight to their home, one unit at a time.

    Args:
        path_or_hub_id: a directory in Hugging Face layout, the id of a model on the hub, or, with ``trainable=False``,
            a directory of adapters in PEFT's format: they stand in the model that they name, and are not merged.
        base: with adapters, the model that they stand in, where the one that they name is not there.
        dtype: of weights and computation; ``auto`` is bf16 on accelerators that multiply it and fp32 elsewhere.
        attention: ``auto`` or a name that transformers knows.
        trust_remote_code: whether code that comes with the model may run.
        trainable: False freezes all of it, in `eval` mode: a home for weights alone, for generation and embeddings.
        device: see `wrap`, as for all other arguments.
        head: as there, and ``none`` leaves it out: a model that ends in hidden states, for embeddings.
        base_codec: as there; with a codec the model is frozen as a whole, for evaluation and generation.

    Raises:
        CheckpointError: files are missing, truncated, or of another shape than the config says.
        OutsizeError: as `wrap`, and a `StorageError` of a disk that fails, whichever library read it.
    """
    settings = WrapSettings(
        memory=memory_of(load, device, device_memory, home, memory, store_dir),
        microbatches=microbatches,
        store_dir=store_dir_of(store_dir),
        codecs=(base_codec, table_codec),
        head="auto" if head == "none" else head,
        transport=transport_of(transport),
        moments=state,
        blocks=BlockSettings(mlp_parts, compile, kernels, products),
    )
    name, adapters = _with_adapters(os.fspath(path_or_hub_id), base, trainable)
    frozen = not trainable or settings.codecs != ("raw", "raw")
    built = Built(dtype, attention, trust_remote_code, _auto_of(name, trust_remote_code, head), frozen)
    model = open_wrapped(name, settings, built, adapters)
    if not trainable:
        model.eval()
    return _recorded(model, run_dir, lambda model: runner_of(model).close())  # nobody else has it


def _auto_of(name: str, trust_remote_code: bool, head: str) -> str | None:
    """Return the class of transformers that builds a model without head, or an encoder-decoder; None for others."""
    if head == "none":
        return "AutoModel"
    encodes = getattr(load_hf_config(name, trust_remote_code), "is_encoder_decoder", False)
    return "AutoModelForSeq2SeqLM" if encodes else None


@dataclass(frozen=True, slots=True)
class Built:
    """How the model of a checkpoint is built.

    Attributes:
        dtype: see `load`, as for the next two.
        attention: see there.
        trust_remote_code: see there.
        auto: class of transformers that builds it, see `build_skeleton`.
        frozen: whether none of it trains.
        changes: what its config says otherwise than the checkpoint's.
        freeze: glob patterns of parameters that do not train.
        lora: PEFT's configuration of adapters that do, begun by the seed of torch's generator; None for none.
        may_lack: whether a head that the checkpoint lacks begins anew, drawn from torch's generator.
        empty: whether weights are left as they are, zeros, for a plan alone.
    """

    dtype: Dtype = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False
    auto: str | None = None
    frozen: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    lora: Any = None
    may_lack: bool = False
    empty: bool = False


def open_wrapped(
    name: str, settings: WrapSettings, built: Built, adapters: StoredAdapters | None = None
) -> nn.Module:
    """Return the model of a checkpoint, wrapped, or PEFT's model around it; see `load`.

    Args:
        name: path or hub id.
        settings: how it is streamed.
        built: how it is built.
        adapters: to put in; None for none.

    Raises:
        OutsizeError: as `load`.
    """
    if not built.empty:
        for place in (name,) if adapters is None else (name, adapters.directory):
            check_model_files(place)
    config = load_hf_config(name, built.trust_remote_code)
    config.update(dict(built.changes))
    dtype = choose_dtype(built.dtype, settings.devices, scaled=built.frozen)
    model = build_skeleton(config, dtype, built.attention, built.trust_remote_code, built.auto, built.frozen)
    source: WeightSource = _Stored(locate_checkpoint(name), model, may_lack=built.may_lack)
    if adapters is not None:
        _, source = load_in(model, adapters, source)
        take_generation_config(model, adapters.directory)
    for parameter in frozen_by(model, built.freeze, everything=built.frozen):
        parameter.requires_grad_(False)
    around = None
    if built.lora is not None:
        found = put_in(model, built.lora, torch.initial_seed())
        source, around = AdapterSource(source, found), found.around

    def fill(tensor: TensorSpec, into: Tensor) -> None:
        if not built.empty:
            source.read(tensor.name, 0, tensor.numel, into)

    _attach(model, settings, fill)
    return model if around is None else around


class _Stored(CheckpointReader):
    """A checkpoint, and what of a model it may lack; gives a model without weights all else that it has."""

    def __init__(self, directory: Path, model: nn.Module, *, may_lack: bool) -> None:
        super().__init__(directory, model, may_lack=may_lack)
        self._begun = initial_values(model, self.lacking)
        if self._begun:
            _log.info("not in %s, and begun anew: %s", directory, ", ".join(self._begun))
        self.load_buffers(model)
        take_generation_config(model, directory)

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """See `WeightSource.read`."""
        if name in self._begun:
            into.view(-1).copy_(self._begun[name].reshape(-1)[start:stop])
        else:
            super().read(name, start, stop, into)


def _with_adapters(
    name: str, base: str | os.PathLike[str] | None, trainable: bool
) -> tuple[str, StoredAdapters | None]:
    """Return the model that is meant, and its adapters; None where it has none."""
    adapters = find_adapters(name, None if base is None else os.fspath(base))
    if adapters is None:
        if base is not None:
            raise ConfigError(f"base: names the model of adapters, and {name} holds none; leave it out")
        return name, None
    if trainable:
        raise ConfigError(
            "outsize.load takes adapters with trainable=False; to train them use PeftModel.from_pretrained, then wrap"
        )
    return adapters.base, adapters


def _from_memory(model: nn.Module) -> Fill:
    """Return what reads the weights that ``model`` has, and lets go of each."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def fill(tensor: TensorSpec, into: Tensor) -> None:
        into.copy_(flat_values(tensor.name, parameters.pop(tensor.name)))

    return fill


def unwrap(model: nn.Module) -> nn.Module:
    """Make a wrapped model an ordinary one again, its weights in host memory, and free all that streamed it.

    Raises:
        ConfigError: it is not wrapped, or tensors of it are held that there is no room for.
    """
    runner = runner_of(model)
    runner.settle()
    runner.stop_with(model)
    runner.parameters.leave()
    for unit in runner.split.spec.units:
        values = {name: value.clone() for name, value in runner.parameters.read(unit).items()}
        for name, value in values.items():
            former = runner.parameters.named[name]
            if former.shape != value.shape:  # resized since the last forward, and plain already
                continue
            with plainly():
                former.grad = None
            if isinstance(former, HomeParameter):
                show_plainly(former, value)
                continue
            parameter = nn.Parameter(value, requires_grad=former.requires_grad)
            for module, attribute in runner.split.owners[name]:
                if parameters_of(module).get(attribute) is former:  # and was not replaced
                    parameters_of(module)[attribute] = parameter
    runner.parameters.is_left = True
    runner.close()
    detach(model)
    _take_own(model)
    return model


def _take_own(model: nn.Module) -> None:
    """Give the model's modules their own forwards back."""
    take_whole(model)
    take_eager(model)
    take_plain(model)
    take_native(model)


def _recorded(
    model: nn.Module, run_dir: str | os.PathLike[str] | None, undo: Callable[[nn.Module], object] = unwrap
) -> nn.Module:
    """Have a wrapped model write a run directory, where there is one; where that cannot be, ``undo`` the wrapping."""
    if run_dir is not None:
        try:
            runner_of(model).record(Path(run_dir))
        except BaseException:
            undo(model)
            raise
    return model


def _attach(model: nn.Module, settings: WrapSettings, fill: Fill) -> nn.Module:
    if any(map(is_wrapped, model.modules())) or any(isinstance(p, HomeParameter) for p in model.parameters()):
        raise ConfigError("this model, or a part of it, is wrapped already; outsize.unwrap(model) undoes it")
    check_one_process(model)
    check_plain(model)
    compiled = [
        name or type(model).__name__ for name, each in model.named_modules() if is_compiled_in_place(each)
    ]
    if compiled:
        raise ConfigError(
            f"{compiled[0]} was compiled in place (module.compile()), and what streams cannot be traced: wrap the "
            'model as it was before, with compile="blocks"'
        )
    late = late_warning()
    if late is not None and torch.get_num_threads() > 1:
        _log.warning(late)
    devices, blocks = settings.devices, settings.blocks
    try:
        if blocks.kernels == "liger":
            _log.info("kernels: %s", take_liger(model, devices))
        change_blocks(split(model), blocks, devices, _log.info, _log.warning)
        say_without_cache(model)
        runner = Runner(model, settings, fill)
        if blocks.products != "native":
            _log.info("products: %s", error_of(runner.split, partial(_read_first, runner)))
        make_way_for_others(runner)
        attach(model, runner)
    except BaseException:
        _take_own(model)
        raise
    return model


def _read_first(runner: Runner, name: str, into: Tensor) -> None:
    """Read the first elements of the weights of that name."""
    units = runner.split.spec.units
    unit = next(unit for unit in units if any(tensor.name == name for tensor in unit.all_tensors))
    into.copy_(runner.parameters.read(unit)[name].flatten()[: into.numel()])
