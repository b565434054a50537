"""What a trainer of another library does our way: optimizer, schedule, clipping, checkpoints, and when it stops.

A trainer's class becomes one that has `ByConfig` before it. All else, the loss above all, is the library's own.
"""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from outsize import files
from outsize.checkpoint.checkpoint_state import make_durable, set_best, set_latest
from outsize.checkpoint.saver import DEFAULT_MINUTES, FIRST_MINUTES
from outsize.compat.transformers_private import TrainerSteps
from outsize.config import Config
from outsize.errors import NonFiniteError, StorageError, explain
from outsize.objectives.objective_models import streamed
from outsize.session.steps import schedule_of
from outsize.telemetry.writers import Writers
from outsize.training.evaluation import Interrupt
from outsize.training.loop import Progress
from outsize.training.records import StepRecord
from outsize.wrapped.inferring import generation_config_as_it_is
from outsize.wrapped.loop_records import LoopRecords
from outsize.wrapped.module import is_wrapped, runner_of
from outsize.wrapped.optimizer import AdamW, clip_grad_norm_


def checkpoint_name(step: int) -> str:
    """Name of the directory that a `Trainer` saves to after ``step`` steps."""
    return f"checkpoint-{step}"


class ByConfig(TrainerSteps):
    """Stands before the class of a trainer; `config` is set before it trains."""

    config: Config
    model: Any
    args: Any
    state: Any
    optimizer: Any = None
    lr_scheduler: Any = None
    last_loss: Tensor | None = None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make AdamW with the groups that the trainer would have made."""
        if self.optimizer is None:
            wrapped, settings = streamed(self.model), self.config.optimizer
            decaying = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
            trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {
                    "params": [p for name, p in trained if name in decaying],
                    "weight_decay": settings.weight_decay,
                },
                {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
            ]
            self.optimizer = AdamW(
                wrapped, settings.lr, settings.betas, settings.eps, settings.weight_decay, groups=groups
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of a run."""
        if self.lr_scheduler is None:
            train = self.config.train.model_copy(update={"steps": num_training_steps})
            schedule = schedule_of(self.config.model_copy(update={"train": train}))
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: schedule.learning_rate(step) / (schedule.lr or 1.0)
            )
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer.training_step`.

        Raises:
            NonFiniteError: the loss is not finite; no weight has changed.
        """
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._require_finite("loss", loss)
        self.last_loss = loss
        return loss

    def _require_finite(self, name: str, value: Tensor) -> None:
        if not bool(torch.isfinite(value)):
            raise NonFiniteError(
                f"step {self.state.global_step + 1}: {name} {float(value):g}; no weight was changed. Try a lower "
                "optimizer.lr, or fp32"
            )

    def clipped(self, most: float) -> Tensor:
        """See `TrainerSteps.clipped`."""
        model = streamed(self.model)
        if is_wrapped(model):
            norm = clip_grad_norm_(model, most)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        self._require_finite("gradient norm", norm)
        return norm

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Name what is saved the latest checkpoint once all of it is on the disk, and only then remove older ones."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        directory = Path(self.args.output_dir) / checkpoint_name(self.state.global_step)
        try:
            make_durable(directory.parent)
            yield
            adapters, base = getattr(self.model, "peft_config", {}).values(), cast(Any, streamed(self.model))
            if any(adapter.task_type == "SEQ_CLS" for adapter in adapters):
                self.model.config.save_pretrained(directory)  # names of classes, which adapters do not tell
            # Nor do adapters tell the marks that end a text.
            if adapters and getattr(base, "generation_config", None) is not None:
                with generation_config_as_it_is(base, directory):
                    base.generation_config.save_pretrained(directory)
            for path in (*directory.rglob("*"), directory, directory.parent):
                files.sync(path)
            set_latest(directory)
        except OSError as error:
            raise explain(error, f"write the checkpoint {directory}") from error
        except (
            RuntimeError,
            SafetensorError,
        ) as error:  # what writes in other languages names no error of the system
            if not isinstance(error, SafetensorError) and not _WRITERS.search(str(error)):
                raise
            raise StorageError(
                f"cannot write the checkpoint {directory}: {str(error).strip()}; look at the room on its disk, and "
                "at the kernel log (dmesg); the checkpoint before is whole"
            ) from error
        finally:
            self.args.save_total_limit = limit
        rotate_checkpoints(
            output_dir=self.args.output_dir,
            save_total_limit=limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
        )


# How errors of what writes `torch.save` begin, on a disk that is full or fails.
_WRITERS = re.compile("inline_container|PytorchStreamWriter")


class NoReference(nn.Module):
    """Stands for the model that ``model`` is compared with while TRL makes a trainer of adapters that are there.

    Without one TRL would add a copy of the adapters, to compare with those instead of with the model without any.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to compute."""
        raise AssertionError("a reference model that is not there was called")


def by_config(kind: type) -> type[Any]:
    """Return the class of a trainer that goes by the configuration of a run."""
    return type(kind.__name__, (ByConfig, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


@dataclass(eq=False)
class Following(TrainerCallback):  # type: ignore[misc]
    """Follows a trainer: says when it is to measure, save and stop, and tells of its steps.

    Attributes:
        config: of the run.
        interrupt: tells of Ctrl-C.
        announce: told what happens between steps.
        progress: called after each step; None where nobody looks.
        has_perplexity: whether losses are of tokens.
        trainer: that is followed; set once it is made.
        writers: trackers; set likewise.
        steps_per_epoch: of the data.
        last: the record of the last step.
        eval_loss: of the last evaluation.
        stopped_early: whether evaluations did not get better.
    """

    config: Config
    interrupt: Interrupt
    announce: Callable[[str], None]
    progress: Progress | None
    has_perplexity: bool
    trainer: Any = None
    writers: Writers | None = None
    steps_per_epoch: int = 1
    last: StepRecord | None = None
    eval_loss: float | None = None
    stopped_early: bool = False
    _saved_s: float = field(default_factory=time.monotonic)
    _has_saved: bool = False

    def complete(self, record: StepRecord) -> StepRecord:
        """Return the record of a step with what the trainer knows of it, and tell of it."""
        state, loss = self.trainer.state, self.trainer.last_loss
        record = replace(
            record,
            loss=float(loss),
            num_steps=state.max_steps,
            epoch=(state.global_step + 1) / self.steps_per_epoch,
        )
        self.last = record
        if self.progress is not None:
            self.progress(record)
        if self.writers is not None:
            self.writers.tell(record)
        return record

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have the first step begin now, and not where the models were opened."""
        self._has_saved = state.global_step > 0
        if self._records is not None:
            self._records.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say what becomes of a trainer after a step."""
        train, step = self.config.train, state.global_step
        ends = step >= state.max_steps
        if self.interrupt.requested and not ends:
            self.announce(f"interrupted after step {step}; saving")
            control.should_training_stop = True
        every, minutes = self.config.eval.every, train.save_minutes
        if minutes is None:
            minutes = DEFAULT_MINUTES if self._has_saved else FIRST_MINUTES
        due = minutes * 60
        control.should_evaluate = self.config.eval.on and (ends or (every > 0 and step % every == 0))
        control.should_save = (
            ends
            or self.interrupt.requested
            or (train.save_every > 0 and step % train.save_every == 0)
            or 0 < due <= time.monotonic() - self._saved_s
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Keep what is best, and stop where nothing has been better for long."""
        self.eval_loss, chosen = metrics["eval_loss"], self.config.eval
        perplexity = math.exp(min(self.eval_loss, 700.0)) if self.has_perplexity else None
        if self._records is not None:
            self._records.measured(self.eval_loss, perplexity)
        is_best = state.best_metric is None or self.eval_loss < state.best_metric
        if is_best:
            state.best_metric, state.best_global_step = self.eval_loss, state.global_step
        if is_best and chosen.keep_best:
            name = checkpoint_name(state.global_step)
            state.best_model_checkpoint = str(Path(args.output_dir) / name)
            set_best(Path(args.output_dir).parent, name)
            control.should_save = True
        best = ", the best so far" if is_best else ""
        self.announce(f"evaluation after step {state.global_step}: loss {self.eval_loss:.4f}{best}")
        measured = (entry["step"] for entry in state.log_history if "eval_loss" in entry)
        since = sum(step > (state.best_global_step or 0) for step in measured)
        if chosen.patience is not None and since >= chosen.patience:
            self.announce(
                f"stopped after step {state.global_step}: none of the last {since} evaluations was better"
            )
            self.stopped_early = control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look at the clock again."""
        self._saved_s, self._has_saved = time.monotonic(), True

    @property
    def _records(self) -> LoopRecords | None:
        model = streamed(self.trainer.model)
        return runner_of(model).records if is_wrapped(model) else None
