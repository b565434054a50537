"""F (FA, FP, FK), FB, R, B of stages: units run by the compute thread of each worker, code between by the glue's."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

from outsize.errors import ModelError
from outsize.model.split import Split
from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.stages import Stages
from outsize.runtime.device.device import Device
from outsize.runtime.forward.binding import Binder
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.module_replicas import ModuleReplica
from outsize.runtime.forward.outer_forward import OuterForward
from outsize.runtime.forward.staged_run import StagedRun
from outsize.runtime.ops.compute_ops import ComputeOps, ComputeSettings
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.handlers import handles
from outsize.runtime.ops.load_ops import WeightOps


class StagedComputeOps(ComputeOps):
    """Runs the units of one worker's visits. All its methods are called by the thread of its compute lane.

    Args:
        split: the model itself.
        replica: its units for this worker.
        worker: which one.
        glue: runs the model's own code between units.
        binder: puts planes into the replica.
        device: of the worker.
        weights: owner of the worker's slots.
        settings: as of `ComputeOps`.
        stages: of the step.
        turns: held while this worker computes, where workers draw random numbers from one generator: it is seeded and
            drawn from in one go. None where this worker may compute beside the others.
    """

    def __init__(
        self,
        split: Split,
        replica: ModuleReplica,
        worker: int,
        glue: OuterForward,
        binder: Binder,
        device: Device,
        weights: WeightOps,
        settings: ComputeSettings,
        stages: Stages,
        turns: AbstractContextManager[Any] | None,
    ) -> None:
        super().__init__(replica.split, replica.forwards, binder, device, weights, settings)
        if settings.effects.state:
            name = split.spec.units[min(settings.effects.state)].name
            raise ModelError(
                f"unit {name} changes state of its own in a forward (buffers, attributes, or what a hook writes), of "
                "which each of several devices would have another: use one device"
            )
        self._model, self._originals = split.model, split.modules
        self._worker = worker
        self._glue = glue
        self._turns = turns
        # Where a stage ends, what the next unit receives is made before it leaves; the head's is made beside the loss.
        last = len(replica.forwards) - 1
        # Where another worker runs the head's backward, its input has to be what is below.
        self._ends = frozenset(end - 1 for _, end in stages.forward if end < last + self._cut)

    def forward(self, op: Op, context: StepContext) -> None:
        """See `ComputeOps.forward`; the input that has a copy below leaves the device."""
        with self._turn():
            super().forward(op, context)
            self._hand_on(op, context)

    def forward_keep(self, op: Op, context: StepContext) -> None:
        """See `ComputeOps.forward_keep`."""
        with self._turn():
            super().forward_keep(op, context)

    def forward_attention(self, op: Op, context: StepContext) -> None:
        """See `ComputeOps.forward_attention`, and `forward`."""
        with self._turn():
            super().forward_attention(op, context)
            self._hand_on(op, context)

    def forward_products(self, op: Op, context: StepContext) -> None:
        """See `ComputeOps.forward_products`, and `forward`."""
        with self._turn():
            super().forward_products(op, context)
            self._hand_on(op, context)

    def _hand_on(self, op: Op, context: StepContext) -> None:
        """Leave behind what a forward stage received, and make what it hands on."""
        unit, run = op.unit, self._run(op, context)
        assert unit is not None
        run.leave_below(unit)
        if unit in self._ends:
            with self._naming(op), self._device.computing():
                run.arrive(unit + 1)

    def forward_backward(self, op: Op, context: StepContext) -> None:
        """See `ComputeOps.forward_backward`."""
        with self._turn():
            super().forward_backward(op, context)

    @handles(Kind.RECOMPUTE)
    def recompute(self, op: Op, context: StepContext) -> None:
        """R: the unit's graph is made and kept for its backward."""
        with self._turn():
            unit, run = self._find(op, context)
            with self._naming(op), self._device.computing():
                cast("StagedRun", run).recompute(unit, self._forwards[unit])

    def backward(self, op: Op, context: StepContext) -> None:
        """See `ComputeOps.backward`."""
        with self._turn():
            super().backward(op, context)

    def close(self) -> None:
        """Nothing: the glue unwinds the forwards that are under way, when all lanes have ended."""

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._glue.worker = self._worker
        with self._turns or contextlib.nullcontext():
            yield

    def _run(self, op: Op, context: StepContext) -> StagedRun:
        assert op.microbatch is not None
        return cast("StagedRun", context.runs[op.microbatch])

    def _make_run(
        self, inputs: dict[str, Any], reseed: Callable[[int, bool], None], context: StepContext
    ) -> MicrobatchRun:
        run = StagedRun(
            self._model,
            inputs,
            self._tracked if context.keeps else (False,) * len(self._tracked),
            reseed,
            self._glue,
            context.keeps,
            context.ambient,
            self._shortcuts,
        )
        self._glue.keep(run)
        return run

    def _finish_if_cut(self, op: Op, context: StepContext, run: MicrobatchRun) -> None:
        super()._finish_if_cut(op, context, run)
        if self._cut and op.unit == len(self._forwards) - 1:
            self._glue.forget(cast("StagedRun", run))

    def follow(self) -> None:
        """Train or evaluate as the model's own units do; between programs only."""
        for own, copy in zip(self._originals, self._split.modules, strict=True):
            for module, replica in zip(own.modules(), copy.modules(), strict=True):
                replica.training = module.training

    def _end(self, microbatch: int, context: StepContext) -> None:
        run = cast("StagedRun", context.runs[microbatch])
        super()._end(microbatch, context)
        self._glue.forget(run)
