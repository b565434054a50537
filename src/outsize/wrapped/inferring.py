"""Forwards of a wrapped model that no backward follows: generation, and frozen models without a gradient.

They run in the caller's thread, as the model's own code, in a `Session` that keeps and streams weights and nothing
else: no room for gradients, no trial, no microbatches. Where weights rest in the memory that computes (a host home, on
a CPU) there is nothing to stream, and the model runs as if nobody had wrapped it. Session and engine share one budget:
what opens the one closes the other.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from outsize.hardware.machine_spec import CUBLAS_BYTES
from outsize.inference.forward_extent import ordinary
from outsize.inference.session import InferenceStatistics, Session
from outsize.inference.source import Source
from outsize.runtime.device.device import open_device
from outsize.runtime.ops.decoding import decoding_bytes
from outsize.storage.arena import CudaPinner
from outsize.storage.home import HostHome
from outsize.wrapped.planned import Planned


class Inferring(Planned):
    """A planned model that can infer; arguments as of `Planned`."""

    _session: Session | None = None
    _session_weights: tuple[int, int] = (0, 0)
    _depth = 0

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where its inputs are best made."""
        return self._device

    def infers(self, model: nn.Module) -> bool:
        """Whether a forward now is one that `inferring` is for."""
        if self._depth:
            return True
        if torch.is_grad_enabled() or self.microbatches > 1:
            return False
        return torch.is_inference_mode_enabled() or not any(p.requires_grad for p in model.parameters())

    @contextlib.contextmanager
    def inferring(self) -> Iterator[None]:
        """Have forwards of the model, in this thread, run without a backward to come.

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
                    stack.enter_context(self._open_session(model).active())
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def inference_statistics(self) -> InferenceStatistics | None:
        """What inference has moved so far; None where it has streamed nothing."""
        return None if self._session is None else self._session.statistics()

    def stop(self) -> None:
        """See `Planned.stop`."""
        self._close_session()
        super().stop()

    def close(self) -> None:
        """See `Planned.close`."""
        self._close_session()
        super().close()

    def _plan_anew(self) -> None:
        self._close_session()
        super()._plan_anew()

    def _rests_where_it_computes(self) -> bool:
        encoded = any(part.codec is not None for unit in self.split.spec.units for part in unit.frozen)
        return isinstance(self.tiers.home, HostHome) and self.tiers.machine.device == "cpu" and not encoded

    def _open_session(self, model: nn.Module) -> Session:
        versions = sum(parameter._version for parameter in self.parameters.named.values())
        weights = (self.parameters.num_writes, versions)
        if self._session is not None and weights != self._session_weights:
            self._close_session()
        if self._session is None:
            self._close_engine()
            machine, rate = self.tiers.machine, self._memory.link_gb_per_s
            open_room = partial(open_device, machine.device, self.tiers.ledger, rate * 1e9 if rate else None)
            pinner = CudaPinner() if self.tiers.on_cuda else None
            with ordinary():
                device = open_room()
                source = Source(self.split.spec, device, self.tiers.home, self.tiers.ledger, pinner)
            fixed = decoding_bytes(self.split.spec)
            if self.tiers.on_cuda:
                fixed += CUBLAS_BYTES + sum(buffer.nbytes for buffer in model.buffers())
            prefetch = self._memory.prefetch
            if prefetch is None and self._memory.slots is not None:
                prefetch = self._memory.slots - 1
            room = machine.device_bytes - fixed
            self._session = Session(self.split, self.boundaries, device, source, open_room, room, prefetch)
            self._session_weights = weights
        return self._session

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
