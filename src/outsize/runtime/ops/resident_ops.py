"""UPDATE: the optimizer steps a unit on the device that its training state rests on.

The arithmetic is that of a STEP, over planes which a home lends out on the device. What a GRAD does beside its copy is
done here: the sums are closed, a step or a unit that is not finite goes no further, and observers see the gradient.
"""

from outsize.planner.program.program import Kind, Op
from outsize.runtime.ops.context import StepContext, handles
from outsize.runtime.ops.gradient_ops import GradientOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps


class ResidentOps:
    """Steps the resident units of a worker.

    Args:
        gradients: of the worker.
        optimizer: of all units.
    """

    def __init__(self, gradients: GradientOps, optimizer: OptimizerOps) -> None:
        self._gradients = gradients
        self._optimizer = optimizer

    @handles(Kind.UPDATE)
    def update(self, op: Op, context: StepContext) -> None:
        """UPDATE: step a unit by the gradient in its accumulator.

        Raises:
            NonFiniteError: no norm is waited for, and the loss or the gradient is not finite.
        """
        assert op.unit is not None
        gradient = self._gradients.take(op.unit, context)
        if not context.skipped:
            self._optimizer.update(op.unit, gradient, context)
