"""The oracle for users: the same steps streamed and resident, compared bit for bit."""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint.begun_adapters import with_begun_adapters
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.runtime.device.allocator import begin_run
from outsize.runtime.device.heap import set_thresholds
from outsize.session.decide.decide import plan_run
from outsize.session.job.prepare import Job
from outsize.session.process_settings import borrowed_torch
from outsize.session.stream import StreamedTrainer
from outsize.storage.directory import needed_directory, temporary_directory
from outsize.streamed.spec import RunSpec
from outsize.training.defaults import settle
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
        settled = settle(config, directory, announce)
        config = settled.config
        run = replace(RunSpec.of(config, directory), may_unpack=settled.may_unpack)
        stack.enter_context(borrowed_torch(deterministic=config.train.deterministic, devices=run.devices))
        set_thresholds(heap=False)
        config, begun = with_begun_adapters(config, None, announce)
        prepared, _ = plan_run(replace(run, config=config), announce, adapters_from=begun)
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
