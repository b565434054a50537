"""Forwards of a wrapped model that no backward follows: generation, and frozen models without a gradient.

They run in the caller's thread, as the model's own code, in an `InferenceSession` that keeps and streams weights and
nothing else: no room for gradients, no trial, no microbatches. Where weights rest in the memory that computes (a host
home, on a CPU) there is nothing to stream, and the model runs as if nobody had wrapped it. The home and its budgets are
those of the model's one session, in which there is room for either that or the engine: what opens the one closes the
other.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outsize.inference.inference_session import InferenceSession, InferenceStatistics
from outsize.inference.kv_cache import Growth, ordinary
from outsize.inference.source import Source
from outsize.inference.waves import GenerationWave, forward_together
from outsize.model.walk import Walk
from outsize.runtime.device.device import Device
from outsize.runtime.forward.unit_state import LeftState
from outsize.runtime.ops.link_codecs import decoding_bytes
from outsize.session.job.demand import fixed_bytes
from outsize.wrapped.generating import on_device
from outsize.wrapped.planned import Planned


class CalledOutside(BaseException):  # no `except Exception` of that forward shall take it
    """A unit was called outside of all passes, by what stands in the place of the model's forward."""


class Inferring(Planned):
    """A planned model that can infer; arguments as of `Planned`."""

    _scan: InferenceSession | None = None
    _scan_weights = 0
    _calls_units: weakref.ref[Callable[..., Any]] | None = None
    _depth = 0

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
            walks = [Walk(model, on_device(one, self.device)) for one in inputs]
            assert self._scan is not None
            return forward_together(self._scan, self.session.boundaries, walks, waiting_bytes, on_output)

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
            before = _kept_by_modules(model)
            wave = GenerationWave(
                self._scan,
                self.session.boundaries,
                sizes,
                in_flight,
                on_output,
                lambda: any(before.get(key) is not value for key, value in _kept_by_modules(model).items()),
            )
            wave.run(starts)
            return wave.most_rows

    @property
    def room_for_waiting(self) -> int | None:
        """See `InferenceSession`; None where nothing streams."""
        return None if self._scan is None else self._scan.room_for_waiting

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


def _kept_by_modules(model: nn.Module) -> dict[tuple[int, str], Tensor]:
    """Return the tensors that modules hold beside parameters and buffers, by module and name."""
    held = ((id(module), name, value) for module in model.modules() for name, value in vars(module).items())
    return {(module, name): value for module, name, value in held if isinstance(value, Tensor)}
