"""Train a few steps in several ways: streamed beside resident, bit by bit, or settings by turns for their speed.

Of a sweep the tokens per step differ. A step moves the same weights however many tokens it trains on, so it gets
cheaper per token as it grows, until compute hides what is moved. Where that is depends on model and machine. Tokens per
step belong to the training, though: the smallest step that is nearly as fast as the fastest is the one to take.

Of a trial a setting differs. A machine is slower in one minute than in the next, so both configurations take turns, and
a difference that is smaller than that between turns is none.
"""

import contextlib
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.begun_adapters import with_begun_adapters
from outsize.checkpoint.run_checkpoint import check_model_files
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.runtime.device.heap import begin_run, set_thresholds
from outsize.session.decide.decide import plan_run
from outsize.session.job.prepare import Job
from outsize.session.process_settings import borrowed_torch
from outsize.session.stream import StreamedTrainer
from outsize.storage.directory import needed_directory, removed_if_refused, temporary_directory
from outsize.streamed.spec import RunSpec
from outsize.training.defaults import settle
from outsize.training.loop import batches_ahead
from outsize.training.records import VerifyResult
from outsize.training.resident import ResidentTrainer, materialise
from outsize.training.run_data import notes_of, open_dataset


def verify(config: Config, *, announce: Callable[[str], None] = lambda _: None) -> VerifyResult:
    """Train ``config.train.steps`` steps streamed and as many resident from the same weights, and compare.

    Memory for the whole training state is needed, beside the budget of the streamed run.

    Raises:
        OutsizeError: as `outsize.training.run.train`.
    """
    with contextlib.ExitStack() as stack:
        run_dir = config.train.run_dir
        directory = Path(run_dir) if run_dir else stack.enter_context(temporary_directory())
        stack.enter_context(needed_directory(directory, "train.run_dir"))
        settling = stack.enter_context(contextlib.ExitStack())
        settling.enter_context(removed_if_refused(directory / "data"))
        settled = settle(config, directory, announce)
        config = settled.config
        run = replace(RunSpec.of(config, directory), may_unpack=settled.may_unpack)
        stack.enter_context(borrowed_torch(deterministic=config.train.deterministic, devices=run.devices))
        set_thresholds(heap=False)
        config, begun = with_begun_adapters(config, None, announce)
        check_model_files(config.model.path)
        if begun is not None:
            check_model_files(begun)
        prepared, _ = plan_run(replace(run, config=config), announce, adapters_from=begun)
        settling.close()
        for note in notes_of(config, prepared):
            announce(note)
        dataset = stack.enter_context(open_dataset(prepared.config, prepared, directory, announce))
        prepared = replace(prepared, run=prepared.run.over(dataset.num_sequences))
        config = prepared.config
        batches = [dataset.batch(step, config.sequences_per_step) for step in range(config.train.steps)]
        store = Path(config.memory.store_dir or directory / "store")
        streamed_losses: list[float] = []
        streamed: dict[str, Tensor] = {}
        moments = prepared.plan.state.moments
        if moments != "fp32":
            announce(
                f"note: moments in {moments} are rounded, and those of the resident run are not: expect differences"
            )
        announce("streamed run")
        begin_run(heap=prepared.heap)
        with StreamedTrainer(prepared, store) as trainer:
            trainer.fill()
            for outcome in trainer.steps(batches):
                streamed_losses.append(outcome.loss)
            trainer.settle()
            for unit in trainer.spec.units:
                streamed.update(
                    {n: t.clone() for n, t in trainer.read_unit(unit).items()} if unit.tensors else {}
                )
        announce("resident run")
        resident_losses, resident = run_resident(prepared, batches)
    compared = _compare(streamed_losses, resident_losses, streamed, resident)
    return replace(compared, plan_id=prepared.plan.plan_id)


def run_resident(prepared: Job, batches: list[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    """Train ``batches`` with everything in memory; returns losses and final weights by name."""
    with materialise(prepared) as masters:
        model = prepared.split.model.train()
        trainer = ResidentTrainer(
            prepared.config,
            prepared.split,
            masters,
            prepared.chunk_tokens,
            prepared.measured.shifted,
            prepared.plan.layout.round_size,
            num_workers=prepared.machine.num_workers,
        )
        losses = list(trainer.steps(batches))
        parameters = dict(model.named_parameters())
        return losses, {name: parameters[name].detach().cpu() for name in masters}


@dataclass(frozen=True, slots=True)
class _Difference:
    name: str
    largest: float


def _compare(
    streamed_losses: list[float],
    resident_losses: list[float],
    streamed: dict[str, Tensor],
    resident: dict[str, Tensor],
) -> VerifyResult:
    differences = [
        _Difference(name, float((streamed[name].double() - tensor.double()).abs().max()))
        for name, tensor in resident.items()
        if not _same(streamed[name], tensor)
    ]
    differences.sort(key=lambda difference: -difference.largest)
    return VerifyResult(
        equal=not differences
        and _same(
            torch.tensor(streamed_losses, dtype=torch.float64),
            torch.tensor(resident_losses, dtype=torch.float64),
        ),
        steps=len(resident_losses),
        loss_streamed=streamed_losses,
        loss_resident=resident_losses,
        max_weight_difference=differences[0].largest if differences else 0.0,
        num_weights=sum(tensor.numel() for tensor in resident.values()),
        differing=[difference.name for difference in differences],
        digest_streamed=_digest(streamed),
        digest_resident=_digest(resident),
    )


def _digest(weights: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the bytes of ``weights``, by name, as hexadecimal text."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(_bytes(weights[name]).numpy().data)
    return digest.hexdigest()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits: -0 is not 0."""
    return one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


# Steps whose tokens per second lie so near are as good as each other.
NEAR = 0.02
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """What steps of one configuration came to.

    Attributes:
        tokens_per_step: tokens of a step.
        microbatches: in how many slices they pass through a unit.
        step_s: median seconds of a step, the first one left out; 0 where nothing fits.
        tokens_per_s: tokens of a step over that; 0 where nothing fits.
        memory_bytes: that the plan takes, by tier.
        why_not: what does not fit; empty where steps were made.
    """

    tokens_per_step: int
    microbatches: int = 0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    memory_bytes: dict[str, int]
    why_not: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What steps came to without a setting and with it, turn by turn.

    Attributes:
        before: without it.
        after: with it.
    """

    before: tuple[ShortRun, ...]
    after: tuple[ShortRun, ...]

    @property
    def gain(self) -> float:
        """Share of the time per token that is saved, below 0 where it takes longer: of medians over turns."""
        before, after = (
            statistics.median(1 / run.tokens_per_s for run in runs) for runs in (self.before, self.after)
        )
        return 1 - after / before

    @property
    def is_clear(self) -> bool:
        """Whether all turns of one are faster than all turns of the other."""
        before, after = ([run.tokens_per_s for run in runs] for runs in (self.before, self.after))
        return len(before) > 1 and (min(after) > max(before) or min(before) > max(after))

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**asdict(self), "gain": self.gain, "is_clear": self.is_clear}


def settled(config: Config, announce: Announce) -> Config:
    """Return ``config`` with what its data decide, see `outsize.training.defaults`."""
    with temporary_directory() as directory:
        return settle(config, directory, announce).config


def sizes_around(config: Config) -> list[int]:
    """Return the tokens per step of ``config``, half of them where sequences allow, and two, four and eight times."""
    base, length = config.tokens_per_step, config.data.seq_len
    half = [base // 2] if base // 2 % length == 0 and base // 2 // length >= config.microbatches else []
    return [*half, base, 2 * base, 4 * base, 8 * base]


def with_size(config: Config, tokens_per_step: int) -> Config:
    """Return ``config`` with another size of a step.

    Raises:
        ConfigError: the size is no multiple of a sequence.
    """
    length = config.data.seq_len
    if tokens_per_step < length or tokens_per_step % length:
        raise ConfigError(
            f"--tokens-per-step {tokens_per_step}: not a multiple of data.seq_len ({length}); "
            f"try {max(1, tokens_per_step // length) * length}"
        )
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"tokens_per_step": tokens_per_step, "batch_size": None})
        }
    )


def sweep(
    config: Config, sizes: Sequence[int], steps: int, announce: Announce = lambda _: None
) -> list[ShortRun]:
    """Train ``steps`` steps of each size from the same weights, and return what they took, in the order of ``sizes``.

    Args:
        config: the run; its own steps and checkpoints count for nothing.
        sizes: tokens per step.
        steps: of each size, two at least; the first does not count.
        announce: called with lines for people.

    Raises:
        OutsizeError: as `outsize.training.run.train`; a size that does not fit is a row that says so.
    """
    rows = []
    for run in [with_size(config, size) for size in sizes]:
        announce(f"{run.tokens_per_step} tokens per step")
        rows.append(_short_run(run, steps))
    return rows


def by_turns(
    before: Config, after: Config, steps: int, turns: int, announce: Announce = lambda _: None
) -> Turns:
    """Train ``steps`` steps of both from the same weights, in ``turns`` turns, and return what they took.

    Args:
        before: the run as it is.
        after: the run with what is tried.
        steps: of each turn, two at least; the first does not count.
        turns: of each, one at least.
        announce: called with lines for people.

    Raises:
        ConfigError: one of them does not fit.
        OutsizeError: as `outsize.training.run.train`.
    """
    rows: dict[str, list[ShortRun]] = {"before": [], "after": []}
    for turn in range(turns):
        for name, config in (("before", before), ("after", after)):
            announce(f"turn {turn + 1} of {turns}: {name}")
            rows[name].append(_short_run(config, steps))
            if rows[name][-1].why_not:
                raise ConfigError(f"{name}: {rows[name][-1].why_not}")
    return Turns(before=tuple(rows["before"]), after=tuple(rows["after"]))


def best_of(rows: Sequence[ShortRun]) -> ShortRun | None:
    """Return the smallest step that comes within `NEAR` of the fastest; None where nothing fits."""
    fastest = max((row.tokens_per_s for row in rows), default=0.0)
    near = [row for row in rows if row.tokens_per_s and row.tokens_per_s >= (1 - NEAR) * fastest]
    return min(near, key=lambda row: row.tokens_per_step, default=None)


def _short_run(config: Config, steps: int) -> ShortRun:
    """Return what ``steps`` steps of ``config`` take, the first left out."""
    near = Path(config.memory.store_dir or Path.cwd())
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(temporary_directory(near))
        run = RunSpec.of(config, directory)
        stack.enter_context(borrowed_torch(deterministic=config.train.deterministic, devices=run.devices))
        return _timed(run, steps, stack)


def _timed(run: RunSpec, steps: int, stack: contextlib.ExitStack) -> ShortRun:
    """Return the same; the home lies in the directory of the run."""
    set_thresholds(heap=False)
    config, directory = run.config, run.run_dir
    try:
        config, begun = with_begun_adapters(config)
        prepared, _ = plan_run(replace(run, config=config), _nothing, adapters_from=begun)
    except InfeasiblePlanError as error:
        return ShortRun(tokens_per_step=config.tokens_per_step, memory_bytes={}, why_not=str(error))
    dataset = stack.enter_context(open_dataset(config, prepared, directory, _nothing))
    begin_run(heap=prepared.heap)
    with StreamedTrainer(prepared, directory / "store") as trainer:
        trainer.fill()
        with batches_ahead(dataset, prepared, run.group, 0, steps) as batches:
            ends_s = [time.perf_counter() for _ in trainer.steps(batches)]
        trainer.settle()
    step_s = statistics.median(later - end for end, later in itertools.pairwise(ends_s))
    return ShortRun(
        tokens_per_step=config.tokens_per_step,
        microbatches=prepared.plan.layout.num_microbatches,
        step_s=step_s,
        tokens_per_s=config.tokens_per_step / step_s,
        memory_bytes={tier: prepared.plan.total_bytes(tier) for tier in ("device", "host", "disk")},
    )


def _nothing(_: str) -> None:
    """Say nothing of a run that only lends its steps."""
