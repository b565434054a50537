"""What a run needs, measured before it is planned: its model in units, and what a microbatch takes of each of them.

Models that are tried or counted take inputs that are made up: random text, and images as a family's processor sizes
them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.choices import ComputeDtype
from outsize.compat.torch_private import fake_tensors, parameters_of
from outsize.compat.transformers_private import image_processor_of
from outsize.config import Config
from outsize.errors import ConfigError
from outsize.group.group import Group
from outsize.hardware.machine_spec import CUBLAS_BYTES, STREAM_BYTES
from outsize.model.adapters import Adapters
from outsize.model.split import Split
from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import Choice, Extent, KeptBytes
from outsize.planner.simulate.costs import UnitTimes
from outsize.runtime.device.heap import HEAP_WORKSPACES
from outsize.runtime.ops.link_codecs import decoding_bytes
from outsize.runtime.trial.measured import SHORT_LENGTHS, Measured
from outsize.session.job.machine import RunMachine
from outsize.storage.prealloc import DEFAULT_THREADS
from outsize.storage.scratch import DEFAULT_BOUNCE_BYTES
from outsize.streamed.spec import RunSpec

# What a processor multiplies and adds while it reads a byte and writes one: 10 to 20 on a core with AVX, 250 on an RTX
# 4090. It ranks what is kept of a unit; the exact number only decides between choices that are as good.
FLOPS_PER_BYTE = 20
# A backward takes about two forwards, besides what it recomputes.
GRADIENT_FORWARDS = 2.0
# What a scratch on disk needs to move tensors that are not aligned: a buffer for each thread of the pool.
BOUNCE_BYTES = DEFAULT_THREADS * DEFAULT_BOUNCE_BYTES
# What kernels on a CPU take inside themselves, as a share of the tensors of a computation: up to a tenth was seen, and
# up to a third where oneDNN multiplies bf16 or fp16.
KERNEL_SHARE, HALF_KERNEL_SHARE = 0.125, 0.375


class DemandTrial(NamedTuple):
    """What a microbatch needs, tried on the model.

    Attributes:
        measured: bytes on the device.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
    """

    measured: Measured
    chunk_tokens: int | None


Trials = Callable[[int], DemandTrial]
"""What each of a number of microbatches needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDemand:
    """A run before it is planned: its model, split and measured, on a machine of known budgets.

    Attributes:
        run: what it is; of its config, masters lie as in the home that it goes on from.
        machine: device and budgets.
        directory: of the model, local.
        hf_config: the model's own configuration.
        split: its units; parameters on meta.
        source: where its weights are read from.
        trials: what microbatches need, of any number of them.
        before_bytes: resident memory of the process, its imports included, before it did anything.
        adapters: that train beside a frozen model; None where the model itself trains.
        template: the chat template that it trains with; None for the tokenizer's.
        reply_end: what the replies that it trains on end with, by the template; empty for nothing.
    """

    run: RunSpec
    machine: RunMachine
    directory: Path
    hf_config: Any
    split: Split
    source: WeightSource
    trials: Trials
    before_bytes: int
    adapters: Adapters | None = None
    template: str | None = None
    reply_end: str = ""

    @property
    def config(self) -> Config:
        """Configuration that the run follows, with what has been decided of it so far."""
        return self.run.config

    @property
    def dtype(self) -> ComputeDtype:
        """In which the model computes; adapters are fp32 in any case."""
        return self.run.dtype

    @property
    def group(self) -> Group:
        """The ranks that share the steps; of one, where none do."""
        return self.run.group

    @property
    def run_dir(self) -> Path:
        """Directory of the run, or of this rank in it."""
        return self.run.run_dir

    @property
    def num_sequences(self) -> int:
        """Sequences of a step that this rank trains, at most."""
        return -(-self.config.sequences_per_step // self.group.size)

    def following(self, config: Config) -> Self:
        """Return the same with another configuration."""
        return replace(self, run=replace(self.run, config=config))


def forward_flops(parts: Split, measured: Measured, rows: int, length: int) -> tuple[float, ...]:
    """Return the operations of units' forwards: as a trial saw them, else two for each parameter and token."""
    counted = tuple(one.forward for one in measured.flops.of(rows, length))
    if any(counted):
        return counted
    sizes = [
        0 if unit.kind == "embedding" else sum(tensor.numel for tensor in unit.all_tensors)
        for unit in parts.spec.units[: parts.spec.num_streamed]
    ]
    return tuple(2.0 * rows * length * size for size in sizes)


def recompute_flops(parts: Split, measured: Measured, rows: int, length: int) -> tuple[float, ...]:
    """Return the same of recomputes, of which some end early."""
    forward = forward_flops(parts, measured, rows, length)
    needed = tuple(one.needed for one in measured.flops.of(rows, length)) or forward
    return tuple(needed[u] if u in measured.needed else all_of_it for u, all_of_it in enumerate(forward))


def recompute_shares(parts: Split, measured: Measured) -> tuple[float, ...]:
    """Return how much of each streamed unit's forward its recompute takes, 0 to 1."""
    size = measured.num_sequences, measured.seq_len
    pairs = zip(recompute_flops(parts, measured, *size), forward_flops(parts, measured, *size), strict=True)
    return tuple(recompute / forward if forward else 1.0 for recompute, forward in pairs)


def counted_times(parts: Split, measured: Measured, flops_per_s: float) -> UnitTimes:
    """Return the times of units for a microbatch as it was measured, by operations, where nobody has timed them."""
    rows, length = measured.num_sequences, measured.seq_len
    forward = forward_flops(parts, measured, rows, length)
    # The last unit runs forward before its backward, all of it.
    recompute = (*recompute_flops(parts, measured, rows, length)[:-1], forward[-1])
    backward = (again + GRADIENT_FORWARDS * once for again, once in zip(recompute, forward, strict=True))
    seconds = [tuple(flops / flops_per_s for flops in each) for each in (forward, backward, recompute)]
    spared_s = {e: tuple(flops / flops_per_s for flops in each) for e, each in spared_flops(measured).items()}
    return UnitTimes(forward_s=seconds[0], backward_s=seconds[1], recompute_s=seconds[2], spared_s=spared_s)


def kept_bytes(measured: Measured) -> KeptBytes:
    """Bytes of activations kept by a forward, by extent."""
    return {Extent.WHOLE: measured.saved_bytes, **selected_bytes(measured)}


def selected_bytes(measured: Measured) -> dict[Extent, tuple[int, ...]]:
    """What forwards keep where they keep what attention, or attention and products, returned."""
    if not measured.products:
        return {}
    return {
        Extent.ATTENTION: tuple(y.num_bytes for y in measured.attention),
        Extent.PRODUCTS: tuple(y.num_bytes for y in measured.products),
    }


def spared_flops(measured: Measured) -> dict[Extent, tuple[float, ...]]:
    """Return the operations that keeping these spares a recompute.

    Where products are kept, what lies between them is made again, each byte of it at the cost of `FLOPS_PER_BYTE`.
    """
    if not measured.products:
        return {}
    between = [
        FLOPS_PER_BYTE * max(0, saved - products.num_bytes)
        for saved, products in zip(measured.saved_bytes, measured.products, strict=True)
    ]
    spared = [max(0.0, y.flops - rest) for y, rest in zip(measured.products, between, strict=True)]
    return {
        Extent.ATTENTION: tuple(float(y.flops) for y in measured.attention),
        Extent.PRODUCTS: tuple(spared),
    }


def demand_of(
    parts: Split, machine: RunMachine, measured: Measured, activations: str, shared_bytes: int
) -> Demand:
    """Return what a microbatch takes besides weights, as it was measured."""
    fixed, spare = fixed_bytes(parts.model, machine) + decoding_bytes(parts.spec, machine.devices), 0
    if machine.devices.is_cpu:
        workspace = max(*measured.forward_bytes, *measured.backward_bytes)
        fixed += int(workspace * (KERNEL_SHARE if parts.spec.dtypes == {"fp32"} else HALF_KERNEL_SHARE))
        spare = int(workspace * HEAP_WORKSPACES)
    scratches = 1 + (activations != "auto" and Choice(activations).leaves)
    return Demand(
        boundary_bytes=measured.boundary_bytes,
        forward_workspace_bytes=by_kind(parts, measured.forward_bytes),
        backward_workspace_bytes=by_kind(parts, measured.backward_bytes),
        saved_bytes=measured.saved_bytes,
        selected_bytes=selected_bytes(measured),
        num_saved=measured.num_saved if measured.products else (),
        # What several units use stays on each worker that has used it, and so do its gradients.
        shared_bytes=shared_bytes + 2 * measured.side_bytes * (machine.num_workers > 1),
        fixed_bytes=fixed,
        stream_bytes=STREAM_BYTES * machine.devices.accelerated,
        bounce_bytes=scratches * BOUNCE_BYTES,
        spare_bytes=spare,
        rest_users=measured.rest_users,
    )


def fixed_bytes(model: nn.Module, machine: RunMachine) -> int:
    """What lies on the device throughout and is neither weights nor activations."""
    on_gpu = CUBLAS_BYTES + sum(buffer.nbytes for buffer in model.buffers())
    return on_gpu if machine.devices.accelerated else 0


def by_kind(parts: Split, num_bytes: tuple[int, ...]) -> dict[str, int]:
    """The most of any unit of each kind."""
    most: dict[str, int] = {}
    for unit, size in zip(parts.spec.units, num_bytes, strict=False):
        most[unit.kind] = max(most.get(unit.kind, 0), size)
    return most


def made_up_inputs(pack: str, hf_config: Any, num_sequences: int, seq_len: int) -> dict[str, Tensor]:
    """A microbatch of random tokens, such as training will see: ids and labels [num_sequences, seq_len], and a mask.

    Something is padded where anything may be, and there are two documents where there may be several: models of
    transformers make a mask only where they need one.
    """
    vocabulary = hf_config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_sequences, seq_len), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if pack == "none":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, max(seq_len - 1, 1) :] = 0
    elif pack == "documents":
        inputs["position_ids"] = (torch.arange(seq_len) % max(seq_len // 2, 1)).expand_as(ids)
    return inputs


class ImageInputs:
    """Batches of text with one image a sequence, for a vision-language model of transformers on the meta device.

    Attributes:
        tokens: of the text that one image takes the place of, as many as the model makes of it.

    Raises:
        ConfigError: how its family sizes images is not known, or Pillow is missing.
    """

    def __init__(self, model: Any, image: Mapping[str, Any]) -> None:
        self._model, self._config = model, model.config
        try:
            from PIL import Image

            self._image = Image.new("RGB", tuple(image["pixels"]))
            self._processor, self._defaults = image_processor_of(self._config, image["settings"])
            self.tokens = self._num_tokens()
        except ImportError as error:
            raise ConfigError("--image: sizing images takes Pillow; pip install pillow") from error
        except Exception as error:  # whatever a model does with images that are none of its
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ConfigError(
                f"--image: what a {self._config.model_type} makes of an image is not known here ({why}); leave it out, "
                "and count its tokens within --seq-len"
            ) from error

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the sequences that are tried: the image, and a short text."""
        return tuple(self.tokens + length for length in SHORT_LENGTHS)

    def __call__(self, num_sequences: int, seq_len: int) -> dict[str, Any]:
        """Return what the model's forward takes, with labels of the text."""
        names = [name for name in vars(self._config) if name.endswith(("token_id", "token_index"))]
        special = {value for name in names if isinstance(value := getattr(self._config, name), int)}
        token = min(set(range(len(special) + 1)) - special)
        is_image = torch.zeros(num_sequences, seq_len, dtype=torch.bool)
        is_image[:, 1 : 1 + self.tokens] = True
        ids = torch.full(is_image.shape, token).masked_fill(is_image, self._image_token)
        kinds = is_image.long()
        inputs = {"token_type_ids": kinds, "mm_token_type_ids": kinds, **self._images(num_sequences)}
        signature = inspect.signature(self._model.forward).parameters
        given = {name: value for name, value in inputs.items() if name in signature}
        return {"input_ids": ids, "labels": ids.masked_fill(is_image, -100), **given}

    @property
    def _image_token(self) -> int:
        value = getattr(self._config, "image_token_id", None)
        return int(self._config.image_token_index if value is None else value)

    def _images(self, number: int) -> dict[str, Any]:
        batch = self._processor(images=[[self._image]] * number, return_tensors="pt", **self._defaults)
        dtype = next(self._model.parameters()).dtype
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in batch.items()
            if isinstance(value, Tensor)
        }

    def _num_tokens(self) -> int:
        """Return in how many rows the model's own code puts an image among the embeddings of tokens."""
        encode = getattr(self._model, "model", self._model).get_image_features
        signature = inspect.signature(encode).parameters
        inputs = {name: value for name, value in self._images(1).items() if name in signature}
        each = [parameters_of(module) for module in self._model.modules()]
        parameters = [(names, name, parameter) for names in each for name, parameter in names.items()]
        try:
            with fake_tensors(allow_real=True), torch.no_grad():
                for names, name, parameter in parameters:
                    if parameter is not None:
                        names[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            with torch.no_grad():
                features = encode(**inputs)
        finally:
            for names, name, parameter in parameters:
                names[name] = parameter
        features = getattr(features, "pooler_output", features)
        parts = [features] if isinstance(features, Tensor) else features
        return sum(part.numel() // part.shape[-1] for part in parts)
