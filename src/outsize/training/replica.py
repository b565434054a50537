"""The whole training state of a model on one device, laid out as in a home.

Plain data parallel has no need of a home, but what is written to checkpoints and read from them lies in planes of
units. So the state of a replica is made of views into the planes of a `HostHome`: parameters are its masters (fp32
weights, or the masters of bf16 ones), AdamW's moments are its moments. On a GPU they are copies, brought there after
loading and back before saving.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import parameters_of
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENT,
    MASTER,
    WEIGHTS,
    StateLayout,
    planes_for,
)
from outsize.runtime.forward.binding import buffers_on
from outsize.runtime.ops.checkpoint_ops import StoreOps, UnitAtRest
from outsize.session.fill import fill
from outsize.session.job.prepare import Job
from outsize.session.steps import LossScale
from outsize.storage.arena import Arena
from outsize.storage.home import HostHome

_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


class Replica:
    """A model with real parameters, and where they rest. Made by `opened`.

    Attributes:
        prepared: the run.
        home: planes of all units but gradients.
        parameters: that train, by name, fp32.
        updates: how often each of them was stepped.
        loss_scale: 1, as none computes in fp16.
        state: how a trained unit lies in the home.
    """

    def __init__(self, prepared: Job, device: torch.device, arena: Arena) -> None:
        self.prepared = prepared
        self.loss_scale = LossScale(enabled=False)
        self.spec = prepared.split.spec
        self.state = StateLayout(dtype=self.spec.dtype)
        planes = planes_for(self.spec.dtype)
        del planes[GRADIENT]
        self.home = HostHome(self.spec, planes, arena)
        fill(self.home, self.spec, prepared.source)
        self.parameters: dict[str, nn.Parameter] = {}
        self.updates: dict[str, int] = {}
        self._device = device
        self._moments: dict[str, dict[str, Tensor]] = {}
        for unit, tensor in self._tensors():
            weights = self._view(unit, tensor, self._master(unit)).float().to(device)
            parameter = nn.Parameter(weights, requires_grad=tensor.trainable)
            for module, attribute in prepared.split.owners[tensor.name]:
                parameters_of(module)[attribute] = parameter
            if tensor.trainable:
                self.parameters[tensor.name] = parameter
                self._moments[tensor.name] = {
                    plane: self._view(unit, tensor, plane).to(device) for plane in _MOMENTS
                }
                self.updates[tensor.name] = 0

    def load(self) -> None:
        """Take everything over from the home, after that was written to."""
        for (unit, tensor), parameter in self._trained():
            parameter.data.copy_(self._view(unit, tensor, self._master(unit)))
            for plane, moment in self._moments[tensor.name].items():
                moment.copy_(self._view(unit, tensor, plane))

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Have ``optimizer`` go on with the moments and counts of this."""
        for name, parameter in self.parameters.items():
            step = torch.tensor(float(self.updates[name]), device=self._device)
            optimizer.state[parameter] = {"step": step, **self._moments[name]}

    def at_rest(self) -> Iterator[UnitAtRest]:
        """Yield every unit as it is written to a checkpoint, the home brought up to date; valid until the next."""
        ops = StoreOps(self.spec, self.home, self, None)
        trained = {unit.index for (unit, _), _ in self._trained()}
        for (unit, tensor), parameter in self._trained():
            self._view(unit, tensor, self._master(unit)).copy_(parameter.data)
            for plane, moment in self._moments[tensor.name].items():
                self._view(unit, tensor, plane).copy_(moment)
        for unit in self.spec.units:
            if unit.index in trained and self._master(unit) != WEIGHTS:
                self.home.view(unit.index, WEIGHTS).copy_(self.home.view(unit.index, self._master(unit)))
            counts = {t.name: self.updates[t.name] for t in unit.tensors if t.name in self.updates}
            yield UnitAtRest(unit, counts, ops)

    def _tensors(self) -> Iterator[tuple[UnitSpec, TensorSpec]]:
        return ((unit, tensor) for unit in self.spec.units for tensor in unit.tensors)

    def _trained(self) -> Iterator[tuple[tuple[UnitSpec, TensorSpec], nn.Parameter]]:
        for unit, tensor in self._tensors():
            if tensor.name in self.parameters:
                yield (unit, tensor), self.parameters[tensor.name]

    def _master(self, unit: UnitSpec) -> str:
        return MASTER if unit.trainable and MASTER in self.state.planes else WEIGHTS

    def _view(self, unit: UnitSpec, tensor: TensorSpec, plane: str) -> Tensor:
        flat = self.home.view(unit.index, plane)
        return flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)


@contextlib.contextmanager
def opened(prepared: Job, device: torch.device) -> Iterator[Replica]:
    """Give the model real parameters on ``device`` for as long as the context lasts.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    split = prepared.split
    former = {(id(m), a): (m, parameters_of(m)[a]) for places in split.owners.values() for m, a in places}
    with Arena() as arena, buffers_on(split.model, device):
        try:
            yield Replica(prepared, device, arena)
        finally:
            for (_, attribute), (module, meta) in former.items():
                parameters_of(module)[attribute] = meta
