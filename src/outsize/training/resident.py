"""The reference: plain PyTorch training of the same model on the same batches, everything in memory.

Short on purpose, so that a reader sees that it is ordinary: a model, an optimizer (a class of `torch.optim`, or `Muon`
beside `AdamW`), `clip_grad_norm_`, and a loop over microbatches. It shares no code with the engine but the chunked
loss, which `train.loss=model` turns off, and the rounding of masters of 24 bits. For bf16 and fp16 the model computes
in that dtype, and the optimizer steps fp32 masters with gradients summed in fp32, over the chunks of a loss as over
microbatches. On a GPU the masters of units that are not resident stay in host memory, and the optimizer steps there,
but that Muon multiplies where the streamed run does. The gradient of a weight that several modules share (tied
embeddings) is summed module by module, each over all of a round, in the order in which a backward reaches them: plain
PyTorch sums microbatch by microbatch, which rounds differently.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outsize.accelerators import as_current
from outsize.compat.torch_private import muon_products, parameters_of
from outsize.config import Config
from outsize.config.model_section import OptimizerConfig
from outsize.data.batch import Batch
from outsize.model.sizes.model_spec import ModelSpec
from outsize.model.split import Split
from outsize.model.tiled import chunked_head_loss, loss_of, shift_labels
from outsize.optim.muon import Muon
from outsize.optim.optimizer_names import muon_matrices
from outsize.optim.planes import chance_key
from outsize.optim.rate_groups import parameter_groups
from outsize.optim.split_masters import join_master, split_master
from outsize.runtime.forward.binding import TORCH_DTYPE, buffers_on
from outsize.runtime.forward.unit_state import seed_generators
from outsize.runtime.ops.compute_ops import seed_of
from outsize.session.fill import Decoded
from outsize.session.job.job_options import clip_of, may_skip
from outsize.session.job.optimizer_layout import layout_for, max_norm_of, rule_of
from outsize.session.job.prepare import Job
from outsize.session.steps import LossScale, schedule_of


class ResidentTrainer:
    """Trains ``split.model``, whose parameters hold real weights, in the ordinary way.

    Args:
        config: of the run.
        split: the model and its units; decides weight-decay groups, and where random numbers are seeded anew.
        masters: fp32 masters by parameter name; changed in place. With fp32 compute they are the parameters.
        chunk_tokens: tokens per chunk of the loss; None for the model's own.
        shifted: whether the model's loss is of the next token.
        round_size: microbatches of a round; None for all of a step.
        num_workers: devices of the streamed run that this one is compared with.
    """

    def __init__(
        self,
        config: Config,
        split: Split,
        masters: dict[str, Tensor],
        chunk_tokens: int | None,
        shifted: bool = True,
        round_size: int | None = None,
        *,
        num_workers: int = 1,
    ) -> None:
        self._config = config
        self._round_size = round_size or config.microbatches
        self._split = split
        self._chunk_tokens = chunk_tokens
        self._shifted = shifted
        self._model = split.model
        self._parameters = {n: p for n, p in self._model.named_parameters() if n in masters}
        self._device = next(self._model.parameters()).device
        self.masters = masters
        trained = {t.name for unit in split.spec.units for t in unit.tensors if t.trainable}
        for name, places in split.owners.items():
            for module, attribute in places:
                parameter = parameters_of(module)[attribute]
                assert parameter is not None
                parameter.requires_grad_(name in trained)
                if name in trained:
                    parameter.register_post_accumulate_grad_hook(self._adder(name))  # type: ignore[no-untyped-call]
        self._sums: dict[str, Tensor] = {}
        self._late: dict[str, dict[int, list[Tensor]]] = {}
        self._optimizers = _optimizers_of(config.optimizer, split.spec, masters)
        layout = layout_for(config, split.spec, num_workers=num_workers)
        self._split24, self._rounds = layout.masters == "split24", layout.gradients == "bf16"
        self._places = {
            t.name: (unit, t) for unit in split.spec.units if unit.trainable for t in unit.tensors
        }
        self._updates = Counter[str]()
        if self._split24:
            for name in self._places:
                self._put_back(name)
        self._scale = LossScale(enabled="fp16" in split.spec.dtypes)

    def steps(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Train on ``batches``; yields the loss of each step after its update."""
        schedule = schedule_of(self._config)
        for number, batch in enumerate(batches):
            loss = 0.0
            targets = batch.num_targets(self._shifted)
            for index, part in enumerate(batch.split(self._config.microbatches)):
                loss += self._forward_backward(number, index, part, targets)
                if (index + 1) % self._round_size == 0:
                    self._add_late()
            self._update(schedule.learning_rate(number))
            yield loss

    def _forward_backward(self, number: int, index: int, part: Batch, targets: int) -> float:
        scale = self._scale.value
        own_targets = part.num_targets(self._shifted)
        if not own_targets:  # a mean over nothing is NaN, and weighs nothing
            return 0.0
        given = {name: value.to(self._device) for name, value in part.inputs.items()}
        with seeding(self._split, self._config.train.seed, number, index):
            if self._chunk_tokens is None:
                loss = loss_of(self._model(**given)) / (targets / own_targets / scale)
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                labels = given.pop("labels")
                head = self._split.modules[-1]
                hidden = _head_input(self._model, head, given)
                loss, gradient = chunked_head_loss(
                    head, hidden.detach(), shift_labels(labels), max(targets, 1) / scale, self._chunk_tokens
                )
                if hidden.requires_grad:
                    hidden.backward(gradient)  # type: ignore[no-untyped-call]
        return float(loss.detach() / scale)

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        """The hook that adds each fresh gradient of a parameter to its fp32 sum.

        Of the modules that share a weight the first that a backward reaches is added at once, the others wait.
        """

        def add(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            users = self._late.setdefault(name, {id(parameter): []})
            if next(iter(users)) == id(parameter):
                self._add(name, gradient)
            else:
                users.setdefault(id(parameter), []).append(gradient)

        return add

    def _add(self, name: str, gradient: Tensor) -> None:
        held = self._sums.get(name)
        self._sums[name] = gradient.float() if held is None else held.add_(gradient)

    def _add_late(self) -> None:
        """Add what the other users of shared weights have brought in a round."""
        for name, users in self._late.items():
            for gradient in (gradient for waiting in users.values() for gradient in waiting):
                self._add(name, gradient)
        self._late.clear()

    def _update(self, lr: float) -> None:
        self._add_late()
        names = [name for name in self._parameters if name in self._sums]
        gradients = [self._sums.pop(name).div_(self._scale.value) for name in names]
        limit = max_norm_of(self._config.optimizer)
        finite = True
        for group in self._clipped_together(names):
            of_group = [gradients[names.index(name)] for name in group]
            # As in torch.nn.utils.clip_grad_norm_, which wants the gradients in parameters of their device.
            norm = nn.utils.get_total_norm(of_group)
            coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)
            for name, gradient in zip(group, of_group, strict=True):
                rounded = gradient.bfloat16().float() if self._rounds else gradient
                self.masters[name].grad = rounded.mul_(coefficient).to(self.masters[name].device)
            finite &= bool(torch.isfinite(norm))
        if finite:
            for optimizer in self._optimizers:
                for settings in optimizer.param_groups:
                    settings["lr"] = lr * settings["lr_scale"]
                with self._multiplying():
                    optimizer.step()
            self._updates.update(names)
            for name in names:
                self._put_back(name)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._scale.update(not finite)

    @contextlib.contextmanager
    def _multiplying(self) -> Iterator[None]:
        """Have ``torch.optim.Muon`` multiply where the streamed run does: its masters are in host memory."""
        if self._config.optimizer.ns_on != "device":
            yield
            return

        def there(update: Tensor, *settings: Any) -> Tensor:
            return products(update.to(self._device), *settings).to(update.device)

        with muon_products(there) as products:
            yield

    @torch.no_grad()
    def _put_back(self, name: str) -> None:
        """Make the weights of a master; it keeps 24 of its bits itself where those of a run do."""
        master, weights = self.masters[name], self._parameters[name]
        if self._split24:
            unit, tensor = self._places[name]
            seed, count = self._config.train.seed, self._updates[name]
            upper, lower = master.view(-1).bfloat16(), torch.empty(master.numel(), dtype=torch.int8)
            key = chance_key(seed, unit.index, count) if count else None
            split_master(master.view(-1), upper, lower, None, tensor.offset, key)
            join_master(upper, lower, None, master.view(-1))
            weights.copy_(upper.view(master.shape))
        elif master is not weights:
            weights.copy_(master)

    def _clipped_together(self, names: list[str]) -> list[list[str]]:
        """The parameters of which one norm is taken: all, or those of each unit."""
        skips = may_skip(self._config.train, self._split.spec)
        if clip_of(self._config.optimizer, may_skip=skips) != "unit":
            return [names]
        units = [{tensor.name for tensor in unit.tensors} for unit in self._split.spec.units]
        groups = [[name for name in names if name in unit] for unit in units]
        return [group for group in groups if group]


def _optimizers_of(
    optimizer: OptimizerConfig, spec: ModelSpec, masters: dict[str, Tensor]
) -> list[torch.optim.Optimizer]:
    rule = rule_of(optimizer)
    decay, lr = optimizer.weight_decay, optimizer.lr
    if not isinstance(rule, Muon):
        return [rule.resident(parameter_groups(spec, masters, decay), lr)]
    names = {tensor.name for unit in spec.units for tensor in muon_matrices(unit)}
    matrices = {name: master for name, master in masters.items() if name in names}
    others = {name: master for name, master in masters.items() if name not in names}
    muon = rule.resident(parameter_groups(spec, matrices, decay), lr)
    rest = parameter_groups(spec, others, decay)
    return [muon, rule.adamw.resident(rest, lr)] if rest else [muon]


@contextlib.contextmanager
def materialise(prepared: Job) -> Iterator[dict[str, Tensor]]:
    """Give the model real parameters, read from its checkpoint, for as long as the context lasts.

    Modules that share a weight have a parameter each, in the same memory, so that their gradients come apart.

    Yields:
        The fp32 masters by name, where the streamed run steps them: the parameters themselves where they are fp32
        there. What lies in frozen parts has none.
    """
    split = prepared.split
    device = prepared.machine.devices.torch_device
    spec = split.spec
    dtypes = {t.name: part.dtype for unit in spec.units for part in unit.frozen for t in part.tensors}
    on_device = {t.name for unit in prepared.plan.layout.resident for t in spec.units[unit].tensors}
    weights_of = Decoded(prepared.source, spec)
    masters: dict[str, Tensor] = {}
    meta_parameters = {
        (id(m), a): (m, parameters_of(m)[a]) for places in split.owners.values() for m, a in places
    }
    try:
        for tensor in (tensor for unit in spec.units for tensor in unit.all_tensors):
            master = torch.empty(tensor.shape, dtype=torch.float32)
            weights_of.read(tensor.name, 0, tensor.numel, master.view(-1))
            if tensor.name in on_device:
                master = master.to(device)
            weights = master.to(device, TORCH_DTYPE[dtypes.get(tensor.name, spec.dtype)])
            parameters = [nn.Parameter(weights) for _ in split.owners[tensor.name]]
            for (module, attribute), parameter in zip(split.owners[tensor.name], parameters, strict=True):
                parameters_of(module)[attribute] = parameter
            if tensor.name not in dtypes:
                masters[tensor.name] = parameters[0] if weights is master else master
        with as_current(device), buffers_on(split.model, device):
            yield masters
    finally:
        for (_, attribute), (module, meta) in meta_parameters.items():
            parameters_of(module)[attribute] = meta


class _Reached(Exception):  # noqa: N818 - not an error: it ends a forward at the head
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _head_input(model: nn.Module, head: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Run the model up to its head and return what the head is called with, with its history."""

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _Reached(args[0])

    handle = head.register_forward_pre_hook(stop)
    try:
        model(**inputs)
    except _Reached as reached:
        return reached.hidden
    finally:
        handle.remove()
    raise AssertionError("the model never called its head")


@contextlib.contextmanager
def seeding(split: Split, seed: int, step: int, microbatch: int) -> Iterator[None]:
    """Seed random numbers before the model, before each unit, and after each unit, as the engine does."""

    def reseed(unit: int, glue: bool) -> None:
        seed_generators(device, seed_of(seed, step, unit, microbatch, glue))

    device = next(split.model.parameters()).device
    handles = []
    for index, module in enumerate(split.modules):
        handles.append(module.register_forward_pre_hook(lambda *_, unit=index: reseed(unit, False)))
        handles.append(module.register_forward_hook(lambda *_, unit=index: reseed(unit + 1, True)))
    try:
        reseed(0, True)
        yield
    finally:
        for handle in handles:
            handle.remove()
