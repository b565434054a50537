"""The reference: plain PyTorch training of a model that is really built and wholly in memory.

Nothing here comes from outsize. A step is what any training script does: a loop over microbatches, each with its share
of the token-weighted mean loss, `clip_grad_norm_`, `torch.optim.AdamW` with the weight-decay groups and the
learning-rate schedule of the Hugging Face ``Trainer``. For bf16 and fp16 the model computes in that dtype, gradients
are summed in fp32, and the optimizer steps fp32 masters.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, get_scheduler

IGNORED = -100
Inputs = Mapping[str, Tensor]
Reseed = Callable[[int, int, int, bool], None]
"""Called as ``reseed(step, microbatch, unit, is_glue)`` before each piece of code that may draw random numbers."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Attributes:
        steps: optimizer steps that the schedule is made for.
        max_grad_norm: global norm to clip to; 0 does not clip.
        freeze: patterns of parameter names that are not trained.
        causal: whether the model predicts the next token; an encoder predicts the token in its place.
        chunk_tokens: tokens per chunk of head and cross-entropy; None takes the model's own loss.
        head: name of the module that makes logits, for a chunked loss.
        loss_scale: what fp16 losses are multiplied by at first; halved and the step left out when that overflows.
        units: names of the modules around which ``reseed`` is called, in the order of the forward.
        reseed: seeds random numbers.
    """

    steps: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 0.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    freeze: tuple[str, ...] = ()
    causal: bool = True
    chunk_tokens: int | None = None
    head: str = ""
    loss_scale: float = 1.0
    units: tuple[str, ...] = ()
    reseed: Reseed | None = None


@dataclass(kw_only=True)
class Trace:
    """What training came to.

    Attributes:
        losses: token-weighted mean loss of each step.
        norms: global gradient norm of each step, before clipping.
        gradients: of each step by parameter name, summed over microbatches, before clipping; a parameter without one
            has no entry.
        weights: after the last step, in the compute dtype.
        masters: the same in fp32.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    batches: Sequence[Sequence[Inputs]],
    recipe: Recipe,
    masters: Mapping[str, Tensor] | None = None,
) -> Trace:
    """Train ``model`` in place on ``batches``: for each step its microbatches, with ``input_ids`` and ``labels``.

    Args:
        model: in its compute dtype.
        batches: ``batches[step][microbatch]`` are keyword arguments of the model.
        recipe: how.
        masters: fp32 weights by name where the model computes in another dtype, or on another device than the
            optimizer.
    """
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if any(fnmatch(name, pattern) for pattern in recipe.freeze):
            parameter.requires_grad_(False)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    stepped = trained if masters is None else {name: masters[name].clone() for name in trained}
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in stepped.items() if n in decaying], "weight_decay": recipe.weight_decay},
            {"params": [p for n, p in stepped.items() if n not in decaying], "weight_decay": 0.0},
        ],
        lr=recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        fused=True,
    )
    kind = "constant_with_warmup" if recipe.schedule == "constant" else recipe.schedule
    (factor,) = get_scheduler(kind, optimizer, recipe.warmup_steps, recipe.steps).lr_lambdas[:1]
    trace, scale = Trace(), recipe.loss_scale
    for number, microbatches in enumerate(batches):
        total = sum(num_targets(inputs, recipe.causal) for inputs in microbatches)
        loss, sums = 0.0, dict[str, Tensor]()

        def collect(sums: dict[str, Tensor] = sums) -> None:
            """Add fresh gradients to the fp32 sums of this step."""
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.float()
                    parameter.grad = None

        for index, inputs in enumerate(microbatches):
            with _seeded(model, recipe, number, index):
                if recipe.chunk_tokens is None:
                    loss += _forward_backward(model, inputs, total, recipe.causal, scale)
                    collect()
                else:
                    loss += _forward_backward_in_chunks(model, inputs, total, recipe, scale, collect)
        gradients = {name: gradient / scale for name, gradient in sums.items()}
        trace.losses.append(loss)
        trace.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        for name, parameter in stepped.items():
            parameter.grad = gradients[name].to(parameter.device) if name in gradients else None
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * factor(number)
        norm = nn.utils.clip_grad_norm_(stepped.values(), recipe.max_grad_norm or float("inf"))
        trace.norms.append(float(norm))
        if torch.isfinite(norm):
            optimizer.step()
        else:
            scale /= 2
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(stepped[name])
    trace.weights = {name: parameter.detach() for name, parameter in named.items()}
    trace.masters = {name: parameter.detach() for name, parameter in stepped.items()}
    return trace


def num_targets(inputs: Inputs, causal: bool = True) -> int:
    """Tokens that the loss of ``inputs`` is a mean over."""
    labels = inputs["labels"][:, 1:] if causal else inputs["labels"]
    return int((labels != IGNORED).sum())


def _forward_backward(model: nn.Module, inputs: Inputs, total: int, causal: bool, scale: float) -> float:
    """Leave the gradients of one microbatch's share of the mean over ``total`` targets; return that share."""
    targets = num_targets(inputs, causal)
    if targets == 0:  # a mean over nothing is NaN, and weighs nothing
        return 0.0
    loss = model(**inputs).loss / (total / targets / scale)
    loss.backward()
    return float(loss.detach()) / scale


class _ReachedTheHead(Exception):  # noqa: N818 - how a forward ends early
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _forward_backward_in_chunks(
    model: nn.Module,
    inputs: Inputs,
    total: int,
    recipe: Recipe,
    scale: float,
    collect: Callable[[], None],
) -> float:
    """The same for a model whose loss is the cross-entropy of the next token: head and loss, a few tokens at a time."""
    if num_targets(inputs) == 0:
        return 0.0
    head = model.get_submodule(recipe.head)

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _ReachedTheHead(args[0])

    handle = head.register_forward_pre_hook(stop)
    try:
        model(**{name: value for name, value in inputs.items() if name != "labels"})
    except _ReachedTheHead as reached:
        hidden = reached.hidden
    finally:
        handle.remove()
    following = F.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()
    leaf = hidden.detach().flatten(0, 1).requires_grad_()
    loss = torch.zeros(())
    for start in range(0, len(leaf), recipe.chunk_tokens):
        piece = slice(start, start + recipe.chunk_tokens)
        logits = head(leaf[piece]).float()
        part = F.cross_entropy(logits, following[piece], ignore_index=IGNORED, reduction="sum")
        part = part / (total / scale)
        part.backward()
        collect()
        loss += part.detach()
    if hidden.requires_grad:
        hidden.backward(leaf.grad.view_as(hidden))
    collect()
    return float(loss) / scale


def _seeded(model: nn.Module, recipe: Recipe, step: int, microbatch: int) -> ExitStack:
    """While entered, seed before the model, before each unit and after each unit."""
    stack = ExitStack()
    reseed = recipe.reseed
    if reseed is None:
        return stack
    for index, name in enumerate(recipe.units):

        def before(*_: Any, unit: int = index) -> None:
            reseed(step, microbatch, unit, False)

        def after(*_: Any, unit: int = index) -> None:
            reseed(step, microbatch, unit + 1, True)

        module = model.get_submodule(name)
        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after).remove)
    reseed(step, microbatch, 0, True)
    return stack
