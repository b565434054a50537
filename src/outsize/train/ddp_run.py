"""A run of plain data parallel: the loop over steps, what it tells, and its checkpoints.

Checkpoints are those of a streamed run, written by rank 0 while the others wait for it in the next step: all replicas
are the same, and before one is written that is checked. So any number of ranks goes on from it, and so does a single
process that streams.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from outsize.checkpoint import run_checkpoint
from outsize.checkpoint.checkpoint_dir import latest
from outsize.checkpoint.checkpoint_state import describe, position_of, read_state
from outsize.checkpoint.saver import DEFAULT_MINUTES
from outsize.checkpoint.saving import Saving
from outsize.config import Config, dump_config
from outsize.data.batch import Batch
from outsize.data.packed_dataset import PackedDataset
from outsize.data.prefetch import Prefetcher
from outsize.data.shared import SharedData
from outsize.errors import ExecutionError
from outsize.group.gloo import GlooGroup
from outsize.runtime.device.allocator import resident_bytes
from outsize.runtime.device.device_group import device_names
from outsize.session.job.prepare import Prepared
from outsize.session.loss_scale import LossScale
from outsize.session.run_state import Position
from outsize.session.steps import StepOutcome
from outsize.train.ddp import DataParallelTrainer, check_fits, process_group
from outsize.train.interrupt import Interrupt
from outsize.train.metrics.flops import peak_of, step_flops
from outsize.train.metrics.heartbeat import Heartbeat, write_json, write_whole
from outsize.train.metrics.run_info import about
from outsize.train.metrics.run_records import StepRecord, TrainResult
from outsize.train.metrics.step_metrics import peak_rss_bytes
from outsize.train.ranks import Ranks
from outsize.train.replica import Replica, opened


def run_data_parallel(
    config: Config,
    prepared: Prepared,
    ranks: Ranks,
    dataset: PackedDataset,
    resumed: Path | None,
    interrupt: Interrupt,
    progress: Callable[[StepRecord], None] | None,
) -> TrainResult:
    """Train what ``prepared`` describes on all ranks, from ``resumed`` on.

    Args:
        config: as the user gave it.
        prepared: the run, on this rank's device.
        ranks: all of them.
        dataset: of whole batches.
        resumed: checkpoint to go on from.
        interrupt: asked between steps; one rank that is to end ends all, after the same step.
        progress: called after each step.

    Raises:
        OutsizeError: the run cannot start, a rank is lost, or a step failed. What was saved before stays.
    """
    group = ranks.group
    assert isinstance(group, GlooGroup)
    check_fits(prepared)
    begun = run_checkpoint.position_of(resumed) if resumed is not None else Position(0, 0, 0)
    name = device_names(prepared.machine.device)[0]
    device = torch.device(name if name.startswith("cuda") else "cpu")
    if resumed is not None:
        run_checkpoint.check_files(resumed)
    with contextlib.ExitStack() as stack:
        replica = stack.enter_context(opened(prepared, device))
        if resumed is not None:
            run_checkpoint.restore(_Restored(replica, prepared), resumed, ranks.announce)
            replica.load()
        ranks.announce(f"resumed from {resumed.name}" if resumed else "starting with step 1")
        averaging = stack.enter_context(process_group(group, device))
        trainer = DataParallelTrainer(prepared, replica, group, averaging, device)
        if ranks.is_first:
            write_whole(ranks.run_dir / "config.yaml", dump_config(config))
            peak, flops = peak_of(prepared.machine.device, prepared.dtype), step_flops(prepared)
            write_json(ranks.run_dir / "run.json", {**about(prepared, flops, peak), "num_ranks": group.size})
        heartbeat = stack.enter_context(Heartbeat(ranks.own_dir))
        run = _Run(
            config,
            prepared,
            ranks,
            group,
            replica,
            heartbeat,
            progress,
            begun,
            dataset.num_sequences,
            resumed,
        )
        source = SharedData(dataset, group.rank, group.size)
        prefetcher = stack.enter_context(Prefetcher(source, config.sequences_per_step, begun.step))
        batches = (prefetcher.next() for _ in range(begun.step, config.train.steps))
        return run.go(trainer, batches, interrupt)


@dataclass(slots=True)
class _Run:
    """The loop over steps, and what it keeps count of."""

    config: Config
    prepared: Prepared
    ranks: Ranks
    group: GlooGroup
    replica: Replica
    heartbeat: Heartbeat
    progress: Callable[[StepRecord], None] | None
    position: Position
    num_sequences: int
    resumed: Path | None
    num_failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    saved_step: int = -1
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    saved_s: float = field(default_factory=time.monotonic)

    def go(self, trainer: DataParallelTrainer, batches: Iterator[Batch], interrupt: Interrupt) -> TrainResult:
        """Train the steps that are left."""
        newest = latest(self.ranks.run_dir)
        if newest is not None:  # a run that goes on in its own directory stays the run that it was
            self.run_id, self.saved_step = read_state(newest)["run"], position_of(newest).step
        interrupt.can_finish = True
        cpu_s = time.process_time()
        for outcome in trainer.steps(batches, self.position.step):
            loss, stops, saves = self._agree(outcome, interrupt.requested)
            cpu_s, before_s = time.process_time(), cpu_s
            self._note(replace(outcome, loss=loss), cpu_s - before_s)
            if saves:
                self._save(must=False)
            if stops:
                self.ranks.announce(f"interrupted after step {self.position.step}; saving")
                break
        self._save(must=True)
        self.group.barrier()  # nobody has come to the end before what they came to is safe
        saved = latest(self.ranks.run_dir)
        return TrainResult(
            steps=self.position.step,
            loss=self.position.loss,
            tokens_per_s=self.tokens / self.seconds if self.seconds else 0.0,
            peak_rss_bytes=peak_rss_bytes(),
            budget_bytes=self.prepared.machine.device_bytes,
            stall_share=0.0,
            bytes_read=0,
            bytes_written=0,
            run_dir=str(self.ranks.run_dir),
            skipped_steps=self.position.skipped,
            export_dir=str(saved) if saved is not None else None,
            failed_saves=self.num_failed,
        )

    def _agree(self, outcome: StepOutcome, stop: bool) -> tuple[float, bool, bool]:
        """Return the loss over all ranks, and whether any of them is to stop, or the first one to save."""
        told = torch.tensor([outcome.loss, stop, self._is_due(outcome.number + 1)], dtype=torch.float64)
        self.group.all_reduce(told)
        loss, stops, saves = told.tolist()
        return loss, stops > 0, saves > 0

    def _is_due(self, step: int) -> bool:
        """Whether this rank has a checkpoint written after ``step``; the first one's clock decides."""
        if not self.ranks.is_first:
            return False
        train = self.config.train
        minutes = DEFAULT_MINUTES if train.save_minutes is None else train.save_minutes
        by_clock = minutes > 0 and time.monotonic() - self.saved_s >= minutes * 60
        return by_clock or (train.save_every > 0 and step % train.save_every == 0)

    def _note(self, outcome: StepOutcome, cpu_s: float) -> None:
        """Keep count of one step, and tell the heartbeat and whoever watches."""
        former = self.position
        self.position = Position(
            former.step + 1, former.tokens + outcome.tokens, former.skipped + outcome.skipped, outcome.loss
        )
        self.tokens += outcome.tokens
        self.seconds += outcome.seconds
        record = StepRecord(
            step=outcome.number + 1,
            loss=outcome.loss,
            lr=outcome.learning_rate,
            grad_norm=outcome.gradient_norm,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            skipped=outcome.skipped,
            skipped_steps=self.position.skipped,
            rss_bytes=resident_bytes(),
            peak_rss_bytes=peak_rss_bytes(),
            data_s=outcome.data_s,
            between_s=outcome.between_s,
            cpu_s=cpu_s,
            fallbacks={"failed_saves": self.num_failed} if self.num_failed else {},
        )
        self.heartbeat.beat(record)
        if self.progress is not None and self.ranks.is_first:
            self.progress(record)

    def _save(self, *, must: bool) -> None:
        """Write a checkpoint after the last step, if there is none; with ``must``, failing to is an error."""
        if self.saved_step == self.position.step:
            return
        self._check_same()
        self.saved_step, self.saved_s = self.position.step, time.monotonic()
        if not self.ranks.is_first:
            return
        state, limit = self._state(), self.config.train.save_total_limit
        saving = Saving(self.prepared, self.ranks.run_dir, state, self.position.step, limit)
        for resting in self.replica.at_rest():
            saving(resting)
        if saving.error is None:
            self.ranks.announce(f"saved {saving.path}")
        elif must:
            raise saving.error
        else:
            self.num_failed += 1
            self.ranks.announce(f"warning: {saving.error}; the run goes on")

    def _check_same(self) -> None:
        """Compare the weights of all replicas, bit for bit.

        Raises:
            ExecutionError: they have come apart.
        """
        digest = xxhash.xxh3_64()
        for parameter in self.replica.parameters.values():
            digest.update(parameter.detach().cpu().view(-1).numpy().data)
        told = self.group.gather_objects(digest.hexdigest())
        wrong = [rank for rank, found in enumerate(told) if found != told[0]]
        if wrong:
            raise ExecutionError(
                f"after step {self.position.step} the weights of rank {wrong[0]} are not those of rank 0; nothing is "
                "saved. Go on from the last checkpoint, and look at that machine's memory and libraries"
            )

    def _state(self) -> dict[str, Any]:
        scale = LossScale(enabled=False)
        return describe(
            self.position, self.config, self.prepared.dtype, scale, self.num_sequences, self.run_id
        )


class _Restored:
    """A replica as `checkpoint.restore` wants to see it."""

    def __init__(self, replica: Replica, prepared: Prepared) -> None:
        self.spec, self.home, self.updates = replica.spec, replica.home, replica.updates
        self.prepared = prepared
        self.loss_scale = LossScale(enabled=False)
