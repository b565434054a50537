"""Forwards of a wrapped model that no backward follows: generation, and frozen models without a gradient.

They run in the caller's thread, as the model's own code, in an `InferenceSession` that keeps and streams weights and
nothing else: no room for gradients, no trial, no microbatches. Where weights rest in the memory that computes (a host
home, on a CPU) there is nothing to stream, and the model runs as if nobody had wrapped it. The home and its budgets are
those of the model's one session, in which there is room for either that or the engine: what opens the one closes the
other.

`generate` is transformers' own, with weights that come and go under it. Blocks append to a cache of keys and values,
and what they append stays on the device. Forwards of transformers take ``use_cache`` as an argument, or make a cache
because a config deep inside says so.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_files import read_generation_config
from outsize.compat import torch_private
from outsize.inference.experts import find_experts, without
from outsize.inference.inference_session import InferenceSession, InferenceStatistics
from outsize.inference.kv_cache import Growth, ordinary
from outsize.inference.source import Source
from outsize.inference.waves import GenerationWave, forward_together
from outsize.model.walk import Walk
from outsize.planner.search.forward_plan import plan_scan
from outsize.runtime.device.device import Device
from outsize.runtime.forward.unit_state import FlightState, LeftState
from outsize.runtime.ops.link_codecs import decoding_bytes
from outsize.session.job.demand import fixed_bytes
from outsize.wrapped.planned import Planned

if TYPE_CHECKING:
    from outsize.wrapped.runner import Runner


class CalledOutside(BaseException):  # no `except Exception` of that forward shall take it
    """A unit was called outside of all passes, by what stands in the place of the model's forward."""


class Inferring(Planned):
    """A planned model that can infer; arguments as of `Planned`."""

    _scan: InferenceSession | None = None
    _scan_weights = 0
    _calls_units: weakref.ref[Callable[..., Any]] | None = None
    _depth = 0
    _flight_state: FlightState | None = None

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where its inputs are best made."""
        return self._device

    @property
    def is_inferring(self) -> bool:
        """Whether the context of `inferring` lasts; units stream wherever they are called then."""
        return bool(self._depth)

    def infers(self, model: nn.Module) -> bool:
        """Whether a forward now is one that `inferring` is for."""
        if self._depth:
            return True
        if torch.is_grad_enabled() or self.microbatches > 1:
            return False
        if torch.is_inference_mode_enabled():
            return True
        # Of a model that trains, and whose adapters are off for a forward, the engine has another backward to come.
        training = self._engine is not None and any(self._flags.values())
        return not training and not any(p.requires_grad for p in model.parameters())

    @contextlib.contextmanager
    def inferring(self, growth: Growth | None = None) -> Iterator[None]:
        """Have forwards of the model, in this thread, run without a backward to come.

        Args:
            growth: how far a generation goes on; what the outermost of several says holds.

        Raises:
            ConfigError: the model has been unwrapped.
            ModelError: its parameters were replaced.
            InfeasiblePlanError: the device is too small for the largest unit.
        """
        with contextlib.ExitStack() as stack:
            if not self._depth:
                model = self._check()
                self.settle()
                if not self._rests_where_it_computes():
                    stack.enter_context(self._open_scan(model).active(growth))
                elif self._memory.device_memory:  # which bounds nothing here, and elsewhere would hold a unit
                    units = without(self.split, find_experts(self.split)).spec.units
                    blocks = [
                        unit.weight_bytes(self.split.spec.dtype) for unit in units if unit.kind == "block"
                    ]
                    plan_scan(blocks, self.session.machine.device_bytes, prefetch=0)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def calls_units(self, in_place: Callable[..., Any]) -> bool:
        """Return whether what stands in the place of the model's forward is known to call units by itself."""
        return self._calls_units is not None and self._calls_units() is in_place

    @contextlib.contextmanager
    def watching_units(self, model: nn.Module, in_place: Callable[..., Any]) -> Iterator[None]:
        """Raise `CalledOutside` where ``in_place`` calls a unit by itself; all is then as before.

        It is remembered, so that nothing is tried in its further calls, and it runs once.
        """
        boundaries, before = self.session.boundaries, LeftState(model.modules(), self._device, moves=False)

        def outside(unit: int, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._depth:
                return real(*args, **kwargs)
            raise CalledOutside

        if boundaries.outside is None:
            boundaries.outside = outside
        try:
            yield
        except CalledOutside:
            before.undo()
            self._calls_units = weakref.ref(in_place)
            raise
        finally:
            if boundaries.outside is outside:
                boundaries.outside = None

    def forward_together(
        self, inputs: Sequence[Mapping[str, Any]], waiting_bytes: int, on_output: Callable[[int, Any], None]
    ) -> int:
        """Run a forward of the model on each of the inputs, all of them unit by unit: weights come up once for all.

        Args:
            inputs: keyword arguments of each forward; ids are [B, S] under ``input_ids``.
            waiting_bytes: see `outsize.inference.waves.forward_together`, and for what is returned.
            on_output: given the number and the output of each, before the next one goes on.

        Raises:
            OutsizeError: as `inferring`.
        """
        model = self._check()
        with torch.no_grad(), self.inferring():
            if self._rests_where_it_computes():
                for number, one in enumerate(inputs):
                    on_output(number, model(**one))
                return 0
            starts = [partial(Walk, model, on_device(one, self.device)) for one in inputs]
            assert self._scan is not None
            with self._watched(model) as leaves:
                return forward_together(
                    self._scan, self.session.boundaries, starts, waiting_bytes, on_output, leaves
                )

    def generate_together(
        self,
        starts: Sequence[Callable[[], Any]],
        sizes: Sequence[Growth],
        in_flight: int | None,
        on_output: Callable[[int, Any], None],
    ) -> int:
        """Run generations, as many at once as hide loading: weights come up once for all in flight.

        Args:
            starts: each calls the model's `generate`.
            sizes: how far each goes on.
            in_flight: at most so many at once; None for as many as hide loading and have room.
            on_output: given the number and the output of each as it ends, in any order.

        Returns the rows of all in flight, at most.

        Raises:
            OutsizeError: as `inferring`.
        """
        with torch.no_grad(), self.inferring():
            if self._rests_where_it_computes():
                for number, start in enumerate(starts):
                    on_output(number, start())
                return max((one.rows for one in sizes), default=0)
            assert self._scan is not None
            model = self._model()
            assert model is not None
            with self._watched(model) as leaves:
                wave = GenerationWave(
                    self._scan, self.session.boundaries, sizes, in_flight, on_output, leaves
                )
                wave.run(starts)
            return wave.most_rows

    def _watched(self, model: nn.Module) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        self._flight_state = self._flight_state or FlightState()
        return self._flight_state.watched(model, self._device)

    @property
    def streaming(self) -> InferenceSession | None:
        """What streams weights for forwards alone; None before the first, or where nothing streams."""
        return self._scan

    def inference_statistics(self) -> InferenceStatistics | None:
        """What inference has moved so far; None where it has streamed nothing."""
        return None if self._scan is None else self._scan.statistics()

    def stop(self) -> None:
        """See `Planned.stop`."""
        self._close_scan()
        super().stop()

    def close(self) -> None:
        """See `Planned.close`."""
        self._close_scan()
        super().close()

    def _plan_anew(self) -> None:
        self._close_scan()
        super()._plan_anew()

    def _rests_where_it_computes(self) -> bool:
        return self.parameters.in_memory and self.session.machine.devices.is_cpu

    def _open_scan(self, model: nn.Module) -> InferenceSession:
        weights = self.parameters.version_of_all
        if self._scan is not None and weights != self._scan_weights:
            self._close_scan()
        if self._scan is None:
            self._close_engine()
            machine = self.session.machine
            opening = weakref.ref(self.session)  # the loader's thread must not hold the model

            def open_room() -> Device:
                session = opening()
                assert session is not None
                return session.open_device()

            with contextlib.ExitStack() as stack, ordinary():
                device = open_room()
                stack.callback(device.close)
                source = Source(
                    self.split.spec, device, self.session.home, self.session.ledger, self.session.pinner
                )
                stack.pop_all()  # a session that cannot be opened closes both
            self.session.home.pin()
            fixed = fixed_bytes(model, machine) + decoding_bytes(self.split.spec, machine.devices)
            prefetch = self._memory.prefetch
            if prefetch is None and self._memory.slots is not None:
                prefetch = self._memory.slots - 1
            room = machine.device_bytes - fixed - sum(self.session.home.on_device.values())
            self._scan = InferenceSession(
                self.split, self.session.boundaries, device, source, open_room, room, prefetch
            )
            self._scan_weights = weights
        return self._scan

    def _close_scan(self) -> None:
        if self._scan is not None:
            self._scan.close()
            self._scan = None


_log = logging.getLogger(__name__)


def generation(kind: type[nn.Module], runner_of: Callable[[nn.Module], "Runner"]) -> Callable[..., Any]:
    """Return the method ``generate`` for the wrapped class of ``kind``."""
    own = cast(Any, kind).generate

    @wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = runner_of(self)
        with torch.no_grad(), runner.inferring(_growth(self, args, kwargs)):
            args, kwargs = on_device((args, kwargs), runner.device)
            return own(self, *args, **kwargs)

    return generate


def _growth(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Growth | None:
    """Return how far a generation goes on at most; None where it keeps no keys and values of what it writes."""
    given = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    prompt = next((value for value in given if isinstance(value, Tensor) and value.dim() >= 2), None)
    configs = [
        c for c in (kwargs.get("generation_config"), cast(Any, model).generation_config) if c is not None
    ]

    def said(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    if prompt is None or said("use_cache") is False:
        return None
    begun = kwargs.get("decoder_input_ids") if getattr(model.config, "is_encoder_decoder", False) else prompt
    before = 1 if begun is None else begun.shape[1]
    most = said("max_length")
    num_new = said("max_new_tokens") or (most - before if most else None)
    if num_new is None or num_new < 1:
        return None
    beams = said("num_beams") or 1
    rows = len(prompt) * max(beams, said("num_return_sequences") or 1)
    return Growth(rows, before + num_new, num_new, reorders=beams > 1)


def take_generation_config(model: nn.Module, directory: Path) -> None:
    """Have a model generate as its checkpoint says: the marks that end a text, how tokens are chosen.

    Raises:
        CheckpointError: what it says cannot be read.
    """
    if hasattr(model, "generation_config") and (given := read_generation_config(directory)) is not None:
        cast(Any, model).generation_config = given


@contextlib.contextmanager
def generation_config_as_it_is(model: nn.Module, directory: Any) -> Iterator[None]:
    """Save a model whose generation config transformers takes and does not write, such as a temperature of no sampling.

    It is no part of what was trained, and a save is too late to find fault with it: the file gets what was loaded.

    Args:
        model: saved while the context lasts, into
        directory: where its file is written.
    """
    from transformers import GenerationConfig

    held: Any = model
    given: Any = getattr(model, "generation_config", None)
    try:
        if given is not None:
            given.validate(strict=True)
    except ValueError as error:
        _log.info("generation_config.json is saved as it was: %s", str(error).strip().partition("\n")[0])
        held.generation_config = GenerationConfig()
        try:
            yield
        finally:
            held.generation_config = given
        path = Path(directory) / "generation_config.json"
        if path.is_file():  # as far as the save wrote one
            path.write_text(given.to_json_string(use_diff=True), encoding="utf-8")
        return
    yield


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return inputs with their tensors where the model computes."""
    return torch_private.map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), inputs)


def say_without_cache(model: nn.Module) -> None:
    """Say that a model which trains goes without the cache of keys and values that a config of it asks for."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and any(vars(config).get("use_cache") for config in _configs_of(model)):
        _log.info(
            "%s trains as with use_cache=False: a forward that fills a cache, as its config has it, lays keys out "
            "otherwise, and its gradients may have other last bits (rows packed by position_ids another loss)",
            type(model).__name__,
        )


@contextmanager
def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Have no config of ``model`` ask for a cache while the context lasts, unless the caller's ``inputs`` do."""
    asks = inputs.get("use_cache") or inputs.get("past_key_values") is not None
    asking = [] if asks else [one for one in _configs_of(model) if vars(one).get("use_cache")]
    wishes = [one.use_cache for one in asking]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(asking, wishes, strict=True):
            config.use_cache = value


def _configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model of transformers: its own, and those of its parts, which may be copies."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            waiting += [
                one
                for one in vars(config).values()
                if hasattr(one, "use_cache") or hasattr(one, "to_diff_dict")
            ]
    return list(found.values())
