"""The class of a wrapped model: its own class, with the methods in between that must know where the bytes are.

A wrapped model stays the object it was. Its class becomes a subclass of its former one, of the same name, so
``isinstance``, ``config``, ``get_input_embeddings``, ``save_pretrained`` and the names of parameters stay what they
were. (PyTorch's FSDP2 does the same.)
"""

import contextlib
import inspect
import logging
from collections.abc import Iterable, Mapping
from functools import partial, wraps
from itertools import product
from typing import Any, NoReturn, Self, cast

import torch
from torch import nn

from outsize.checkpoint.files.checkpoint_writer import write_checkpoint
from outsize.checkpoint.saver import weight_bytes
from outsize.compat.torch_private import parameters_of, place_to_move_to, version_of
from outsize.errors import ConfigError, ModelError
from outsize.model.walk import is_walking
from outsize.runtime.trial.trial_pass import cached_tensors, check_caches
from outsize.wrapped.at_home.at_rest import is_same
from outsize.wrapped.at_home.home_parameter import plainly
from outsize.wrapped.batching import check_thread
from outsize.wrapped.inferring import CalledOutside, generation, generation_config_as_it_is, on_device
from outsize.wrapped.runner import Runner
from outsize.wrapped.wrap_planning import IN_PLACE

_log = logging.getLogger(__name__)
_RUNNER = "_outsize_runner"
# What `save_pretrained` is asked for where it writes unit by unit.
_BY_UNITS = {"save_directory", "is_main_process", "state_dict", "kwargs"}


class Wrapped(nn.Module):
    """What a wrapped model does otherwise than its own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; inside a walk without hooks of the model itself, which have run outside.

        A forward that somebody has put in the place of the model's runs around that where it calls it, as autocasts do.
        Where it calls layers by itself, as TRL's, it is called again, inside the walk.
        """
        if is_walking():
            forward = kwargs.pop(IN_PLACE, None) or partial(own_class(self).forward, self)
            return forward(*args, **kwargs)
        in_place = vars(self).get("forward")
        runner = runner_of(self)
        if in_place is None or runner.is_inferring:
            return super().__call__(*args, **kwargs)
        if not runner.calls_units(in_place):
            with contextlib.suppress(CalledOutside), runner.watching_units(self, in_place):
                return super().__call__(*args, **kwargs)
        del self.forward
        try:
            return super().__call__(*args, **kwargs, **{IN_PLACE: in_place})
        finally:
            self.forward = in_place

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module.state_dict`; over a disk home its tensors are read as they are used."""
        runner_of(self).settle()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See `torch.nn.Module.load_state_dict`; weights go home, also after an optimizer was built.

        Raises:
            ConfigError: ``assign=True`` for what has values, which would take parameters away from their home.
        """
        if assign:  # as PEFT fills adapters that it has made on meta
            present = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
            if any(name in present and not present[name].is_meta for name in state_dict):
                raise ConfigError(
                    "load_state_dict(assign=True) would take parameters from their home; leave it out"
                )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.nn.Module.zero_grad`."""
        runner = runner_of(self)
        if not set_to_none:
            runner.settle()
            runner.parameters.multiply_gradients(list(runner.parameters.factors))
        with plainly():
            for parameter in runner.parameters.named.values():
                if parameter.grad is not None:
                    if set_to_none:
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing but say so: each unit is recomputed from its input, or what it needs kept, as it is."""
        _log.info(
            "a wrapped model recomputes units as its memory asks for it; gradient checkpointing changes nothing"
        )

    def quantisation_errors(self) -> dict[str, float]:
        """What codecs have done to frozen weights, by name: root mean square error by that of the weights."""
        return dict(runner_of(self).parameters.errors)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Stay where it is: where a wrapped model computes was said to `outsize.wrap`.

        Raises:
            ConfigError: another dtype is asked for, or the device ``meta``, where weights have no bytes.
        """
        device, dtype = place_to_move_to(*args, **kwargs)
        if device is not None and device.type == "meta":
            raise ConfigError("a wrapped model keeps its weights; outsize.unwrap frees its home")
        if dtype is not None and dtype not in {p.dtype for p in runner_of(self).parameters.named.values()}:
            raise ConfigError("a wrapped model keeps its dtype; convert it before outsize.wrap")
        return self

    def cuda(self, device: Any = None) -> Self:
        """See `to`."""
        return self

    def cpu(self) -> Self:
        """See `to`."""
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing but say so: a call streams, and runs as it is."""
        _log.info('model.compile() changes nothing: outsize.wrap(..., compile="blocks") compiles the blocks')

    def share_memory(self) -> NoReturn:
        """Refuse: weights and their steps are those of one process."""
        raise ConfigError(
            "a wrapped model keeps its memory to itself; share that of the model before outsize.wrap"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What a module around this one asks for: stay, see `to`; a function that changes values does so at home."""
        runner = runner_of(self)
        changes = False
        # What moves or keeps returns a tensor that is right already as it is, and writes to none.
        for dtype, shape in product({p.dtype for p in runner.parameters.named.values()}, [(8,), (2, 4)]):
            sample = torch.linspace(-3, 3, 8).to(dtype).view(shape)
            before, version = sample.clone(), version_of(sample)
            result = fn(sample)
            if result.dtype != dtype or result.device not in (torch.device("cpu"), runner.device):
                raise ConfigError("a wrapped model keeps device and dtype; change it before outsize.wrap")
            if result.is_shared():
                self.share_memory()
            is_other = result is not sample and result.device == sample.device
            changes = (
                changes or is_other or version_of(sample) != version or not torch.equal(result.cpu(), before)
            )
        return super()._apply(fn, recurse) if changes else self  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ModelError(
            "a wrapped model cannot be copied: a copy would share or double the home of its weights. Copy the model "
            "before outsize.wrap, or write it with save_pretrained and load that"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(
            "a wrapped model cannot be pickled: threads, files and pinned memory belong to it. Save its state_dict(), "
            "or use save_pretrained"
        )

    def __copy__(self) -> NoReturn:
        self.__deepcopy__({})


def wrapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a wrapped model of class ``kind``."""
    signature = _without_self(inspect.signature(kind.forward))

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_walking():
            return kind.forward(self, *args, **kwargs)
        runner = runner_of(self)
        if _has_other_weights(runner):
            return kind.forward(self, *args, **kwargs)
        check_thread()
        in_place = kwargs.get(IN_PLACE)
        inputs = _named(inspect.signature(in_place) if in_place else signature, self, args, kwargs)
        if in_place is None and runner.infers(self):
            with runner.inferring():
                return kind.forward(self, **on_device(inputs, runner.device))
        if torch.is_grad_enabled():  # adapters around a wrapped model give it their cache
            check_caches(self, [cached_tensors(inputs.get("past_key_values")) or ()])
        return runner.forward(inputs)

    # Within `torch.compile` of a model, or around it, a call runs as it is: lanes and walks cannot be traced.
    called = torch.compiler.disable(  # type: ignore[no-untyped-call]
        Wrapped.__call__,
        reason='a wrapped model streams; outsize.wrap(..., compile="blocks") compiles its blocks',
    )
    members: dict[str, Any] = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    members["__call__"] = called
    if hasattr(kind, "save_pretrained"):
        members["save_pretrained"] = _save_pretrained(kind)
    if hasattr(kind, "generate"):
        members["generate"] = generation(kind, runner_of)
    if isinstance(getattr(kind, "device", None), property):
        members["device"] = property(lambda self: runner_of(self).device)
    members["__qualname__"] = kind.__qualname__
    return type(kind.__name__, (Wrapped, kind), members)


def own_class(model: nn.Module) -> type[nn.Module]:
    """The class that a wrapped model had before."""
    return cast("type[nn.Module]", type(model).__mro__[2])


def is_wrapped(model: object) -> bool:
    """Whether ``model`` is wrapped."""
    return isinstance(model, Wrapped)


def attach(model: nn.Module, runner: Runner) -> None:
    """Make a module a wrapped one."""
    object.__setattr__(model, _RUNNER, runner)
    model.__class__ = wrapped_class(type(model))


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    model.__class__ = own_class(model)
    object.__delattr__(model, _RUNNER)


def runner_of(model: nn.Module) -> Runner:
    """Return what streams a wrapped model.

    Raises:
        ConfigError: it is not wrapped.
    """
    if not is_wrapped(model):
        rest = "call outsize.wrap(model) first" if isinstance(model, nn.Module) else "give the model that was"
        raise ConfigError(f"{type(model).__name__} is not wrapped; {rest}")
    return cast(Runner, vars(model)[_RUNNER])


def _has_other_weights(runner: Runner) -> bool:
    """Whether tensors stand where parameters were, as `torch.func.functional_call` has it: they are not streamed."""
    found = (
        parameters_of(module).get(name) for places in runner.split.owners.values() for module, name in places
    )
    return any(value is not None and not isinstance(value, nn.Parameter) for value in found)


def _named(
    signature: inspect.Signature, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a forward by name, with no cache of keys and values that nobody asked for."""
    named = dict(kwargs)
    if args:
        named |= _by_name(signature, model, args)
    config = getattr(model, "config", None)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    # PEFT's models pass it on by keyword.
    passes_on = inspect.Parameter.VAR_KEYWORD in kinds and getattr(config, "use_cache", False)
    takes_cache = "use_cache" in signature.parameters or passes_on
    if takes_cache and named.get("use_cache") is None and named.get("past_key_values") is None:
        named["use_cache"] = False
    return named


def _by_name(signature: inspect.Signature, model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments of a forward by name: by those of the model inside, where PEFT's passes all on."""
    named: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args).arguments.items():
        if signature.parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
            continue
        inner = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else None
        if inner is None:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes *{name}: outsize has to know which argument is which; "
                "give that forward named parameters, and call it by them"
            )
        named |= _by_name(_without_self(inspect.signature(type(inner).forward)), inner, value)
    return named


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _save_pretrained(kind: type[nn.Module]) -> Any:
    own = cast(Any, kind).save_pretrained
    signature = _without_self(inspect.signature(own))

    @wraps(own)
    def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        runner = runner_of(self)
        runner.settle()
        bound = signature.bind(save_directory, *args, **kwargs).arguments
        asked = {**bound, **bound.get("kwargs", {})}
        usual = asked.keys() <= _BY_UNITS and _is_own_state(self, asked.get("state_dict"))
        # PEFT writes adapters alone. Shards of another size, or of other weights, are read as transformers writes them.
        if runner.parameters.in_memory or hasattr(self, "peft_config") or not usual:
            with generation_config_as_it_is(self, save_directory):
                return own(self, save_directory, *args, **kwargs)
        if not asked.get("is_main_process", True):
            return None
        config, spec = cast(Any, self).config, runner.split.spec
        needed = weight_bytes(spec, adapters=False)
        written = write_checkpoint(
            save_directory, self, config, spec.units, runner.parameters.read, overwrite=True, num_bytes=needed
        )
        if getattr(self, "generation_config", None) is not None:
            with generation_config_as_it_is(self, written):
                cast(Any, self).generation_config.save_pretrained(written)
        return written

    return save_pretrained


def _is_own_state(model: nn.Module, state: Mapping[str, Any] | None) -> bool:
    """Whether a state to be saved is that of the model as it is, which `Trainer` hands over."""
    own = {} if state is None else model.state_dict()
    return state is None or (state.keys() == own.keys() and all(is_same(own[n], state[n]) for n in own))


def iterate_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters of a wrapped model, without waiting for anything."""
    return nn.Module.parameters(model)
