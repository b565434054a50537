"""What a microbatch of the caller's takes on the device, and the plan that fits it."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import ge
from typing import Any

import torch
from torch import Tensor

from outsize.accelerators import CPU, Devices
from outsize.codecs.transport import Transport
from outsize.compat import torch_private
from outsize.compat.torch_private import hooks_of, replace_forward_hooks
from outsize.compat.transformers_private import records_outputs
from outsize.config import MemoryConfig
from outsize.errors import ConfigError, InfeasiblePlanError, ModelError
from outsize.model.split import Split
from outsize.model.walk import Modes
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.search.microbatch_search import smaller_rounds
from outsize.planner.search.step_plan import Plan, PlanOptions
from outsize.runtime.forward.unit_facts import SideEffects
from outsize.runtime.trial.calibrate import calibrate
from outsize.runtime.trial.measured import Flops, Measured
from outsize.runtime.trial.trial_pass import UnitOrderError
from outsize.session.job.machine import RunMachine
from outsize.session.job.planning import plan_wrapped
from outsize.wrapped.batching import HIDDEN, IGNORED, inputs_that_train, rows_dim

# The caller holds the outputs until the backward, and a loss of the caller's own takes two more of their size: their
# softmax, and its gradient.
OWN_LOSS_COPIES = 3
# What models of transformers take a loss from.
LABELS = ("labels", "shift_labels")
# What stands for the tokens, in models of transformers.
TOKENS = {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "pixel_values"}
# What models of transformers are told by which tokens are padding: [B, S], zero where they are.
MASK = "attention_mask"
# The argument under which a pass finds what somebody has put in the place of the model's forward, and units run in.
IN_PLACE = "_outsize_forward"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest microbatch that a plan is made for, and how it is computed.

    Attributes:
        rows: of the microbatch.
        length: of a row; 1 where rows have no length.
        modes: what the caller has on, which decides what is saved.
        training: whether a backward may follow in training mode, where dropout saves its masks.
        padded: whether some tokens are padding: only then do the models of transformers make a mask, and save it.
        scored: whether the model is given labels, and takes the loss itself.
        in_place: whether another forward stands in the place of the model's, as TRL's, which takes the head's weight.
        hidden: whether the model is asked for what its units receive.
        given: names of the inputs that stand for tokens, images or sounds: which decides what units it calls.
        into_inputs: whether the caller wants gradients of inputs.
        loose: elements of the largest input without a dimension of rows, such as the pixels of all images.
    """

    rows: int
    length: int
    modes: Modes = field(default_factory=Modes)
    training: bool = True
    padded: bool = False
    scored: bool = False
    in_place: bool = False
    hidden: bool = False
    given: frozenset[str] = frozenset()
    into_inputs: bool = False
    loose: int = 0

    def covers(self, other: "BatchShape") -> bool:
        """Whether a plan made for this batch shape also has room for ``other``."""
        mine = self.rows, self.length, other.scored, self.training, self.padded, self.hidden, self.into_inputs
        its = (
            other.rows,
            other.length,
            self.scored,
            other.training,
            other.padded,
            other.hidden,
            other.into_inputs,
        )
        same = (self.modes, self.in_place, self.given) == (other.modes, other.in_place, other.given)
        return same and self.loose >= other.loose and all(map(ge, mine, its))

    @property
    def saving(self) -> "Saving":
        """What decides which tensors a unit saves."""
        return self.modes, self.padded


Saving = tuple[Modes, bool]


def shape_of(main: Tensor, rows: int, inputs: Mapping[str, Any], modes: Modes, training: bool) -> BatchShape:
    """The shape of a microbatch of ``rows`` whose main input is ``main``: token ids [B, S], or vectors [B, S, d]."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    loose = (t.numel() for name, t in tensors.items() if t.dim() and rows_dim(name, t, len(main)) is None)
    is_ids = main.dim() == 2 and not main.is_floating_point()
    length = main.shape[1] if is_ids or main.dim() == 3 else 1
    scored = any(isinstance(inputs.get(name), Tensor) for name in LABELS)
    padded, in_place, hidden = _is_padded(inputs.get(MASK)), IN_PLACE in inputs, bool(inputs.get(HIDDEN))
    given = frozenset(
        n for n, t in tensors.items() if n in TOKENS or (t.is_floating_point() and n not in LABELS)
    )
    into_inputs = torch.is_grad_enabled() and bool(inputs_that_train(inputs))
    return BatchShape(
        rows,
        length,
        modes,
        training,
        padded,
        scored,
        in_place,
        hidden,
        given,
        into_inputs,
        max(loose, default=0),
    )


def _is_padded(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())


def shorter(inputs: Mapping[str, Any], num_rows: int, seq_len: int) -> Callable[[int, int], dict[str, Any]]:
    """Return what makes smaller inputs of the same kind: ``(rows, length) → inputs``.

    Dimensions of ``seq_len`` behind the first are cut to the length; a cache of keys and values is left out.
    """

    def make(rows: int, length: int) -> dict[str, Any]:
        def take(name: str, tensor: Tensor) -> Tensor:
            across = rows_dim(name, tensor, num_rows)
            part = (
                tensor.detach() if across is None else tensor.detach().narrow(across, 0, min(rows, num_rows))
            )
            for dim in range(1, tensor.dim()):
                if length < seq_len and tensor.shape[dim] == seq_len and dim != across:
                    part = part.narrow(dim, 0, length)
            return part.cpu().requires_grad_(tensor.requires_grad)

        small: dict[str, Any] = {
            name: torch_private.map_only(Tensor, partial(take, name), value) for name, value in inputs.items()
        }
        if small.get("past_key_values") is not None:
            small["past_key_values"] = None
        if length > 1 and _is_padded(inputs.get(MASK)):  # perhaps not in these rows, nor at this length
            small[MASK] = small[MASK].clone()
            small[MASK][:, -1] = 0
        for name in LABELS:  # the first rows may have no target, which would tell nothing of the loss
            labels = small.get(name)
            if isinstance(labels, Tensor) and not labels.is_floating_point():
                small[name] = labels.masked_fill(labels == IGNORED, 0)
        return small

    return make


def measure(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    inputs: Mapping[str, Any],
    num_rows: int,
    shape: BatchShape,
    former: Measured | None,
    devices: Devices,
) -> Measured:
    """Measure what microbatches of ``shape`` need, on smaller ones of the kind of ``inputs``, or on rows as they are.

    Args:
        split: the model, its boundaries in place.
        forwards: the units' own forwards.
        inputs: of the model, ``num_rows`` rows.
        num_rows: of them.
        shape: of a microbatch of these inputs.
        former: what other microbatches need, which has to fit as well.
        devices: that will compute; the trial runs on the first one.

    Raises:
        ModelError: the model cannot be walked through, or raised.
    """

    def tried(length: int, rows: int) -> Measured:
        make = shorter(inputs, num_rows, length)
        return calibrate(
            split,
            forwards,
            make if rows > 1 or shape.rows == 1 else lambda _, length: make(shape.rows, length),
            num_sequences=rows,
            seq_len=length,
            chunk_tokens=None,
            ambient=shape.modes.on_trial(devices.torch_device.type).around,
            devices=devices if rows <= num_rows else CPU,
        )

    # A trial is not what the hooks on units are there to see, but those by which a model reads its layers' outputs.
    hooks = [replace_forward_hooks(module, OrderedDict()) for module in split.modules]
    for module, own in zip(split.modules, hooks, strict=True):
        replace_forward_hooks(module, OrderedDict((n, h) for n, h in own.items() if records_outputs(h)))
    behind = [(table, dict(table)) for module in split.model.modules() for table in hooks_of(module)[2:]]
    for table, _ in behind:
        table.clear()
    try:
        measured = _first_that_runs(tried, shape)
    finally:
        for table, content in behind:
            table.update(content)
        for module, own in zip(split.modules, hooks, strict=True):
            own.update(replace_forward_hooks(module, own))  # what transformers hangs there on the first call
    return measured if former is None else _both(measured, former)


def _first_that_runs(tried: Callable[[int, int], Measured], shape: BatchShape) -> Measured:
    """Try one row of a batch at short lengths, then one of its length, as of sounds, then all rows: several images."""
    first: ModelError | None = None
    for length, rows in dict.fromkeys([(shape.length, shape.rows), (1, shape.rows), (1, 1)]):
        try:
            return tried(length, rows)
        except UnitOrderError:
            raise
        except ModelError as error:
            first = first or error
    assert first is not None
    raise first


def _both(one: Measured, other: Measured) -> Measured:
    """The larger of each; what recomputes need is that of ``one``."""

    def larger(a: Any, b: Any) -> Any:
        if isinstance(a, Mapping | Flops):
            return a
        if isinstance(a, frozenset | SideEffects):
            return a | b
        return tuple(map(max, a, b)) if isinstance(a, tuple) else max(a, b)

    return Measured(
        **{f.name: larger(getattr(one, f.name), getattr(other, f.name)) for f in fields(Measured)}
    )


def make_plan(
    split: Split,
    machine: RunMachine,
    memory: MemoryConfig,
    measured: Measured,
    microbatches: int,
    transport: Transport,
    shapes: Sequence[BatchShape],
    state: StateLayout,
    resident: frozenset[int],
) -> Plan:
    """Plan a step that is cut, within the machine's budgets, in the largest rounds that fit.

    All rounds but the first go forward twice, and nothing here knows rates by which a smaller round that keeps more
    could be found to be faster.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    if machine.num_workers > 1 and memory.activations.startswith("keep"):
        raise ConfigError(
            f"activations={memory.activations}: of several workers one runs the backward of what another one ran "
            "forward; use auto, recompute, offload-attention or offload-products, or one device"
        )
    options = PlanOptions(
        home=machine.home,
        below=machine.below,
        clip=False,
        state=state,
        microbatches=microbatches,
        most_microbatches=microbatches if all(shape.rows == 1 for shape in shapes) else None,
        slots=memory.slots,
        prefetch=memory.prefetch,
        tile_elements=memory.tile_elements,
        offload=False if measured.inputs_shared else memory.offload,
        cut=True,
        into_inputs=any(shape.into_inputs for shape in shapes),
        commits=False,
        resident=resident,
        activations=memory.activations,
        transport=transport,
    )
    in_fp32 = split.spec.dtypes == {"fp32"} and not any(shape.modes.autocast for shape in shapes)
    scored = all(shape.scored for shape in shapes)

    def planned(size: int) -> Plan:
        copies = held_copies(microbatches, size, scored=scored, in_fp32=in_fp32)
        held = measured.held_bytes + -(-copies * measured.output_bytes // size)
        if size < microbatches:  # later rounds go forward while the first one waits
            held += measured.held_bytes + (max(measured.boundary_bytes) if machine.num_workers == 1 else 0)
        named = replace(options, round_microbatches=None if size == microbatches else size)
        return plan_wrapped(split, machine, measured, named, held)

    failures: list[InfeasiblePlanError] = []
    for size in (microbatches, *smaller_rounds(microbatches)):
        try:
            return planned(size)
        except InfeasiblePlanError as error:
            failures.append(error)
    raise min(failures, key=lambda error: sum(error.short_by.values()))


def held_copies(microbatches: int, in_a_round: int, *, scored: bool, in_fp32: bool) -> int:
    """Return how often the outputs of a microbatch are there between a forward and its backward, in its own size.

    Where the model takes the loss there are the outputs of all microbatches, joined, and what the loss keeps of those
    of the first round: a softmax in fp32, twice the size of halves. Those of one microbatch are in the workspace of the
    head already.
    """
    if not scored:
        return OWN_LOSS_COPIES * microbatches
    return microbatches - 1 + (1 if in_fp32 else 2) * (in_a_round - 1)
