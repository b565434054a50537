"""Plain data parallel: every rank holds the whole model and trains its rows of each batch; gradients are averaged.

The averaging is torch's `DistributedDataParallel`: gradients are put into buckets, and a bucket is sent while the
backward of earlier layers still runs; of several microbatches only the last one's backward sends, what the others left
is in the sum. A microbatch's loss is weighted so that the average over ranks is the gradient of the mean over all
targets of the batch, whoever has how many. Random numbers are seeded by the microbatch's number among those of all
ranks. So the losses are those of one process with the same batch and as many microbatches in all, up to the order in
which fp32 numbers are added.

With bf16, parameters are the fp32 masters and the forward computes under autocast.
"""

import contextlib
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from outsize.accelerators import is_accelerator, module_of, vendor_of
from outsize.checkpoint import run_checkpoint
from outsize.compat.torch_private import limited_backend, world_group
from outsize.config import Config, ParallelConfig
from outsize.data.batch import Batch
from outsize.errors import ConfigError, InfeasiblePlanError, NonFiniteError
from outsize.group.gloo import WAIT_S, GlooGroup, break_off
from outsize.group.group import Group
from outsize.model.tiled import loss_of
from outsize.optim.learning_rates import parameter_groups
from outsize.planner.program.program import Kind
from outsize.planner.simulate.timeline import Timeline
from outsize.runtime.device.driver import Moved
from outsize.session.job.model_setup import num_targets
from outsize.session.job.optimizer_layout import max_norm_of
from outsize.session.job.prepare import Job
from outsize.session.run_state import Position
from outsize.session.steps import StepOutcome, schedule_of
from outsize.storage.ledger import Ledger
from outsize.streamed.spec import check_shares
from outsize.training.replica import NET, Hook, Replica, ReplicaEngine, opened
from outsize.training.resident import seeding
from outsize.units import format_bytes

# fp32 parameters, gradients and two moments.
_STATE_BYTES = 16
# Buffers are the same on all ranks from the start, and nothing of a language model's changes them. The name of the
# argument is changing: torch 2.13 warns of the former one.
_takes = inspect.signature(DistributedDataParallel).parameters
_buffers_stay: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _takes else "broadcast_buffers": False
}
_BY_NCCL = ("bf16", "powersgd")
# PowerSGD begins after a tenth of the steps, and after 1000 at most, as torch's documentation advises.
_POWERSGD_STEPS, _POWERSGD_SHARE = 1000, 10


def one_share(config: Config, num_ranks: int) -> Config:
    """Return the run that one rank's share of each step would be, for measuring what it needs.

    A replica has its masters apart, however they lie in a home that a streamed run may have left.

    Raises:
        ConfigError: a step has too few sequences for all ranks.
    """
    check_shares(config, num_ranks)
    tokens = -(-config.sequences_per_step // num_ranks) * config.data.seq_len
    masters = "separate" if config.optimizer.masters == "auto" else config.optimizer.masters
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"tokens_per_step": tokens, "batch_size": None}),
            "optimizer": config.optimizer.model_copy(update={"masters": masters}),
        }
    )


def check_fits(prepared: Job) -> None:
    """Check that this rank's device takes a whole replica.

    Raises:
        InfeasiblePlanError: it does not; by how much.
        ConfigError: the run asks for what plain data parallel does not do.
    """
    config, measured = prepared.config, prepared.measured
    if config.train.method != "full":
        raise ConfigError(
            "train.method: plain data parallel (parallel.mode=ddp) trains whole models: use full"
        )
    if config.optimizer.name != "adamw":
        raise ConfigError(
            "optimizer.name: plain data parallel (parallel.mode=ddp) steps by AdamW; use adamw, or parallel.mode=stream"
        )
    if config.optimizer.clip == "unit" and config.optimizer.max_grad_norm:
        raise ConfigError(
            "optimizer.clip: plain data parallel (parallel.mode=ddp) clips by the norm of all gradients; use global, "
            "or none"
        )
    if config.optimizer.gradients != "fp32":
        raise ConfigError(
            "optimizer.gradients: plain data parallel (parallel.mode=ddp) keeps them in fp32; leave it fp32, and see "
            "parallel.ddp_compress for fewer bytes on the wire"
        )
    if not prepared.plan.state.plain:
        raise ConfigError(
            "optimizer.state, masters: plain data parallel (parallel.mode=ddp) keeps fp32 moments beside fp32 masters; "
            "leave them as they are by default"
        )
    if prepared.dtype == "fp16":
        raise ConfigError("model.dtype: plain data parallel (parallel.mode=ddp) takes bf16 or fp32")
    if config.train.mlp_parts > 1:
        raise ConfigError(
            "train.mlp_parts: plain data parallel (parallel.mode=ddp) takes MLPs whole, as torch sends a gradient once "
            "it is there; leave it at 1, or use parallel.mode=stream"
        )
    if config.train.loss == "chunked":
        raise ConfigError("train.loss: plain data parallel (parallel.mode=ddp) takes the model's own loss")
    if (
        config.parallel.ddp_compress in _BY_NCCL
        and vendor_of(prepared.machine.devices.kind).backend != "nccl"
    ):
        raise ConfigError(
            f"parallel.ddp_compress: {config.parallel.ddp_compress} is for GPUs, by NCCL: torch has no bf16 sums over "
            "gloo, and its PowerSGD calls gloo from several threads in no fixed order; use fp16 or none"
        )
    kept = sum(measured.boundary_bytes) + sum(measured.saved_bytes) + measured.held_bytes
    # Logits, their gradient, and what cross-entropy makes of them in fp32.
    activations = kept + 3 * measured.output_bytes + max(measured.backward_bytes)
    buckets = int(config.parallel.ddp_bucket_mib * 2**20)
    needed = _STATE_BYTES * prepared.split.spec.num_parameters + activations + buckets
    short = needed - prepared.machine.device_bytes
    if short > 0:
        raise InfeasiblePlanError(
            f"a replica of the model needs {format_bytes(needed)} on {prepared.machine.devices}: take more "
            "train.microbatches, raise memory.device_memory, or stream it in one process without torchrun",
            {"device": short},
        )


@contextlib.contextmanager
def process_group(
    group: GlooGroup, device: torch.device
) -> Iterator[tuple[c10d.ProcessGroup, Callable[[], None]]]:
    """Start torch's default process group among the ranks of ``group``: NCCL for a GPU, gloo for a CPU.

    Yields:
        The group, and what has every call on it fail that waits for another rank.
    """
    backend = vendor_of(device).backend
    if is_accelerator(device):
        module_of(device).set_device(device)
    try:
        dist.init_process_group(
            backend,
            store=c10d.PrefixStore("ddp", group.store),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=group.timeout_s),  # for all to come; later there is more time
        )
    except RuntimeError as error:
        raise group.blame(error) or error from error
    whole = world_group()
    messages = limited_backend(whole, device, WAIT_S)
    end_waits = messages.abort if is_accelerator(device) else partial(break_off, messages)
    group.on_loss(end_waits)
    try:
        yield whole, end_waits
    finally:
        dist.destroy_process_group()


def start_replica(
    stack: contextlib.ExitStack,
    prepared: Job,
    group: Group,
    resumed: Path | None,
    announce: Callable[[str], None],
) -> "DataParallelTrainer":
    """Open a trainer, entered in ``stack``, that goes on from ``resumed``; its `position` says where.

    Raises:
        OutsizeError: the checkpoint cannot be read, or a rank is lost.
    """
    device = prepared.machine.devices.torch_device
    assert isinstance(group, GlooGroup)
    if resumed is not None:
        run_checkpoint.check_files(resumed)
    replica = stack.enter_context(opened(prepared, device))
    position = Position(0, 0, 0)
    if resumed is not None:
        position = run_checkpoint.restore(replica, resumed, announce)
        replica.load()
    announce(f"resumed from {resumed.name}" if resumed else "starting with step 1")
    averaging, end_waits = stack.enter_context(process_group(group, device))
    return DataParallelTrainer(replica, group, averaging, device, end_waits, position)


class DataParallelTrainer:
    """Trains a replica together with those of the other ranks.

    Args:
        replica: of the model, the same on all ranks.
        group: the ranks.
        averaging: torch's group of the same ranks.
        device: of the replica.
        end_waits: has every call on ``averaging`` fail that waits for another rank.
        position: where the replica stands.

    Attributes:
        prepared: the run.
        position: as given; the beginning where none is.
        loss_scale: of the replica.
        engine: times what is done, and writes checkpoints.
        ledger: of no tiers.
    """

    def __init__(
        self,
        replica: Replica,
        group: GlooGroup,
        averaging: c10d.ProcessGroup,
        device: torch.device,
        end_waits: Callable[[], None] = lambda: None,
        position: Position | None = None,
    ) -> None:
        self.prepared = prepared = replica.prepared
        self.position = position or Position(0, 0, 0)
        self.loss_scale = replica.loss_scale
        self.engine = ReplicaEngine(replica, group, device, end_waits)
        self.ledger = Ledger({})
        self._replica = replica
        self._group = group
        self._device = device
        config, parallel = prepared.config, prepared.config.parallel
        model = prepared.split.model
        model.train()
        self._model = DistributedDataParallel(
            model,
            process_group=averaging,
            bucket_cap_mb=parallel.ddp_bucket_mib,
            gradient_as_bucket_view=True,
            static_graph=parallel.ddp_static_graph,
            find_unused_parameters=parallel.ddp_find_unused,
            **_buffers_stay,
        )
        # A static graph is learnt in the first step, and torch 2.13 fails if that has backwards that do not send.
        self._looks = parallel.ddp_static_graph
        self._model.register_comm_hook(*_hook_of(self.engine, parallel, averaging, config.train.steps))
        self._optimizer = torch.optim.AdamW(
            parameter_groups(replica.spec, replica.parameters, config.optimizer.weight_decay),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )
        replica.give_to(self._optimizer)

    def steps(
        self, batches: Iterable[Batch], first: int = 0, done: Callable[[], None] = lambda: None
    ) -> Iterator[StepOutcome]:
        """Train on this rank's share of each batch, numbered from ``first``; yields after each update.

        Args:
            batches: of all steps.
            first: number of the first one.
            done: called behind each step.

        Raises:
            LostRankError: a rank is gone.
            NonFiniteError: the gradient is not finite, and ``train.on_nonfinite`` is raise; no weight was changed.
        """
        schedule = schedule_of(self.prepared.config)
        began = asked = time.perf_counter()
        for number, batch in zip(itertools.count(first), batches):
            data_s = time.perf_counter() - asked
            rate, before = schedule.learning_rate(number), self.engine.reduced
            try:
                loss = self._forward_backward(number, batch)
                norm, finite = self._update(rate)
            except RuntimeError as error:
                ended_by = self.engine.error or self._group.blame(error)
                if ended_by is None:
                    raise
                raise ended_by from error
            ended = time.perf_counter()
            yield StepOutcome(
                number=number,
                loss=loss,
                gradient_norm=norm,
                learning_rate=rate,
                tokens=num_targets(batch.whole or batch, self.prepared.measured.shifted),
                seconds=ended - began,
                data_s=data_s,
                between_s=asked - began,
                ended_s=ended,
                skipped=not finite,
                moved=partial(self._moved_since, before),
            )
            done()
            began, asked = ended, time.perf_counter()

    def settle(self) -> None:
        """Nothing: a step is done when its outcome is there."""

    def take_timeline(self) -> Timeline:
        """What was done since the last call."""
        return self.engine.take_timeline()

    def fallbacks(self) -> dict[str, int]:
        """Nothing that could not be had as asked."""
        return {}

    def _moved_since(self, before: Moved) -> dict[str, Moved]:
        reduced = self.engine.reduced
        return {NET: Moved(reduced.wire - before.wire, reduced.logical - before.logical)}

    def _forward_backward(self, number: int, batch: Batch) -> float:
        """Leave the gradient of the mean loss over all ranks; returns that mean."""
        count = self.prepared.config.microbatches
        total = max(num_targets(batch.whole or batch, self.prepared.measured.shifted), 1)
        loss = torch.zeros(1, dtype=torch.float64)
        for index, part in enumerate(batch.split(count)):
            sends = index + 1 == count or self._looks
            quietly = contextlib.nullcontext() if sends else self._model.no_sync()
            with quietly, self._seeded(number, index):
                with self.engine.op(Kind.FORWARD, index):
                    weighted = self._loss(part, total)
                with self.engine.op(Kind.BACKWARD, index):
                    # Averaging divides by the number of ranks what is to be added up.
                    (weighted * self._group.size).backward()  # type: ignore[no-untyped-call]
            loss += float(weighted.detach())
        self._looks = False
        with self.engine.op(Kind.AGREE, lane=NET):
            self._group.all_reduce(loss)
        return float(loss)

    def _loss(self, part: Batch, total: int) -> Tensor:
        """Return the sum of the losses of a microbatch over ``total`` targets."""
        targets = num_targets(part, self.prepared.measured.shifted)
        given = {name: value.to(self._device, non_blocking=True) for name, value in part.inputs.items()}
        if not targets:  # a mean over nothing is NaN; all ranks have to send what is zero here
            given["labels"] = given["input_ids"]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.prepared.dtype == "bf16"):
            return loss_of(self._model(**given)).float() * (targets / total)

    def _seeded(self, number: int, index: int) -> contextlib.AbstractContextManager[None]:
        config = self.prepared.config
        among_all = self._group.rank * config.microbatches + index
        return seeding(self.prepared.split, config.train.seed, number, among_all)

    def _update(self, rate: float) -> tuple[float, bool]:
        """Clip and step, as all ranks do with the same bits; returns the norm before, and whether it was finite."""
        config, trained = self.prepared.config, self._replica.parameters
        names = [name for name, parameter in trained.items() if parameter.grad is not None]
        gradients = [trained[name].grad for name in names]
        with self.engine.op(Kind.CLIP):
            norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
            finite = bool(torch.isfinite(norm))
        if not finite and config.train.on_nonfinite == "raise":
            raise NonFiniteError(
                f"gradient norm {float(norm):g}; no weight was changed. Try a lower optimizer.lr, or "
                "train.on_nonfinite=skip to go on"
            )
        if finite:
            with self.engine.op(Kind.STEP):
                limit = max_norm_of(config.optimizer)
                if math.isfinite(limit):
                    nn.utils.clip_grads_with_norm_(trained.values(), limit, norm)
                for entry in self._optimizer.param_groups:
                    entry["lr"] = rate * entry["lr_scale"]
                self._optimizer.step()
            for name in names:
                self._replica.updates[name] += 1
        self._optimizer.zero_grad()
        return float(norm), finite


def _hook_of(
    engine: ReplicaEngine, parallel: ParallelConfig, averaging: c10d.ProcessGroup, num_steps: int
) -> tuple[Any, Hook]:
    """Return how gradients go between ranks, and the state of that: written as asked, and timed."""
    if parallel.ddp_compress != "powersgd":
        halved = parallel.ddp_compress in ("bf16", "fp16")
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        send = hooks.get(parallel.ddp_compress, default_hooks.allreduce_hook)
        return averaging, engine.timing(send, lambda bucket: bucket.nbytes // (2 if halved else 1))
    state = powerSGD_hook.PowerSGDState(
        averaging,
        matrix_approximation_rank=parallel.ddp_powersgd_rank,
        start_powerSGD_iter=max(min(_POWERSGD_STEPS, num_steps // _POWERSGD_SHARE), 2),
    )
    sent = 0

    def wire_bytes(bucket: Tensor) -> int:
        nonlocal sent
        former, sent = sent, state.total_numel_after_compression
        return (sent - former) * bucket.itemsize or bucket.nbytes  # whole in the first steps

    return state, engine.timing(powerSGD_hook.powerSGD_hook, wire_bytes)
