"""Steps of a `Trainer`, transformers' or TRL's, that have no public name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TrainerSteps:
    """Stands before the class of a trainer, and gives some of its private steps names of their own."""

    args: Any

    def clipped(self, most: float) -> Any:
        """Clip the gradients to a norm of ``most``, and return the norm that they had."""
        raise NotImplementedError

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which a checkpoint is written."""
        yield

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.clipped(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.clipped(float("inf")) if grad_norm is None else grad_norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.saving():
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _send_telemetry(self) -> None:
        """Tell nobody; TRL would tell its makers which trainer ran on which model."""


def on_device(trainer: Any, batch: Any) -> Any:
    """Return ``batch`` where ``trainer`` computes."""
    return trainer._prepare_inputs(batch)


def forget_metrics(trainer: Any) -> None:
    """Throw away what TRL's ``trainer`` has noted of steps for its next line of a log."""
    for kind in ("_metrics", "_stored_metrics"):
        for noted in getattr(trainer, kind, {}).values():
            noted.clear()


def use_one_device(arguments: Any) -> None:
    """Have a trainer of ``arguments`` compute on one GPU, whichever else there are."""
    if arguments.device is not None:  # asking sets the number
        arguments._n_gpu = min(arguments.n_gpu, 1)
