"""Compute in parts of the tokens: MLPs, and the cross-entropy of a head, whose whole logits never exist.

What a block makes inside its MLP is the most of what its backward needs: for Qwen3-32B 7 of 15 GiB at 31,744 tokens.
An MLP looks at each token by itself, so parts of them may go through one after the other. That is known as tiled MLP
(Arctic Long Sequence Training, arXiv:2506.13996). Here nothing is computed more often than by a recompute of the whole
block, which ends where its backward's needs end (`runtime.forward.short_recompute`): that is before such an MLP.

The story of one block and microbatch:

1. `_Keep` hands the MLP's input on, and is what autograd saves it for.
2. `_Parts` puts one part after the other through the MLP, without a graph, so nothing in there is saved. In a recompute
   these operations come after the last tensor that is saved, so they are left out; but where a norm follows them.
3. Backward, each part goes through the MLP again, now with a graph and under the autocast of its forward, and right
   back: its gradients of weights are added up part by part, as those of microbatches are.

Sums over parts round differently from one sum, so the number of parts is part of what a run computes, as the number of
microbatches is; streamed and resident runs of as many parts are equal bit for bit.

A mixture of experts goes whole: router and experts see a part of the tokens at a time. A router that chooses for each
token by itself chooses the same; what is recorded of it inside (router logits, of which losses are made) leaves
`_Parts` behind the outputs, joined in the order of the tokens and with its gradients.

For vocabulary V, width d and chunks of C tokens the working set is C × V logits and their gradient instead of
B × S × V. Each chunk's backward runs inside the forward and leaves gradients in the head's parameters. Written as a
loop over the model's own head module, so a bias or a quantised head is served alike, and torch 2.10 suffices;
`torch.nn.functional.linear_cross_entropy` (2.13) does the same for plain linear heads.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from outsize.compat import torch_private
from outsize.errors import ModelError
from outsize.model import walk
from outsize.model.split import Split

# What decoders of transformers call it.
_NAME = "mlp"


def take_in_parts(split: Split, num_parts: int) -> None:
    """Have the MLP of every block of ``split`` take its tokens in ``num_parts`` parts; 1 leaves all as it is.

    Raises:
        ModelError: a block has no MLP of its own, or one that takes more than tokens or draws random numbers.
    """
    if num_parts == 1:
        return
    mlps = list(_mlps(split))
    for mlp in mlps:
        mlp_class = type(mlp)
        mlp.__class__ = type(f"{mlp_class.__name__}InParts", (_InParts, mlp_class), {"num_parts": num_parts})


def take_whole(model: nn.Module) -> None:
    """Undo `take_in_parts`."""
    for module in model.modules():
        if isinstance(module, _InParts):
            module.__class__ = type(module).__bases__[1]


def can_take_in_parts(split: Split) -> bool:
    """Return whether `take_in_parts` takes the MLPs of ``split``."""
    try:
        list(_mlps(split))
    except ModelError:
        return False
    return True


def _mlps(split: Split) -> Iterator[nn.Module]:
    for module, unit in zip(split.modules, split.spec.units, strict=False):
        if unit.kind != "block":
            continue
        mlp = getattr(module, _NAME, None)
        reason = "has no module called mlp" if not isinstance(mlp, nn.Module) else _reason_against(mlp)
        if reason:
            raise ModelError(f"mlp_parts: {unit.name} {reason}; leave it at 1 for this model")
        yield cast(nn.Module, mlp)


def _reason_against(mlp: nn.Module) -> str | None:
    try:
        inspect.signature(mlp.forward).bind(None)
    except TypeError:
        return "has an MLP that takes more than the tokens"
    for child in mlp.modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            return "has dropout in its MLP, which would draw other numbers in each part"
        if any(value for name, value in vars(child).items() if "jitter" in name):
            return "has noise in its router (jitter), which would draw other numbers in each part"
    return None


class _InParts(nn.Module):
    """Stands before a module's own class, whose forward it calls."""

    num_parts: int
    # What calls return: a structure, and of its leaves the sizes before and behind that of tokens, and dtypes. Of the
    # class, which is one module's own and that of its replicas: one of them may run backward what another ran forward.
    made: tuple[Any, list[tuple[torch.Size, torch.Size, torch.dtype]]] = None, []

    def forward(self, hidden: Tensor) -> Any:
        """Return what the module makes of ``hidden`` [..., width], of one part of the tokens at a time."""
        call, rows = Call(self), hidden.reshape(-1, hidden.shape[-1])
        if torch.is_grad_enabled():
            # Weights may train where the input needs no gradient: something has to make autograd come here.
            anchor = torch.empty(0, device=hidden.device, requires_grad=True)
            anchored = _Keep.apply(rows, anchor)  # type: ignore[no-untyped-call]
            leaves = list(_Parts.apply(anchored, call))  # type: ignore[no-untyped-call]
        else:
            leaves = call.joined(rows)
        return call.returned(leaves, hidden.shape[:-1])

    def own(self, part: Tensor, keys: tuple[str, ...]) -> Any:
        """Run the module's own forward on ``part`` [1, tokens, width]; returns the outputs, and what it recorded."""
        forward = walk.recording(super().forward)
        return forward(part, **{walk.WANTED: keys}) if keys else (forward(part), {})


class Call:
    """One call of a module whose tokens go in parts."""

    def __init__(self, module: _InParts) -> None:
        self._module = module
        self._keys = walk.wanted()
        self._structure: Any = None

    def part(self, rows: Tensor) -> list[Tensor]:
        """Return what the module makes of some tokens, [tokens, width]: tensors of [1, tokens, …] or [tokens, …].

        Raises:
            ModelError: there is something else among them.
        """
        leaves, self._structure = torch_private.flatten(self._module.own(rows[None], self._keys))
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[_dim(leaf)] != len(rows):
                raise ModelError(
                    f"mlp_parts: {type(self._module).__name__} makes something that is not of each token; leave "
                    "it at 1 for this model"
                )
        return leaves

    def cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor of all tokens."""
        return tensor.chunk(self._module.num_parts, dim=_dim(tensor))

    def joined(self, rows: Tensor) -> list[Tensor]:
        """Return what the module makes of all tokens, without a graph of its own.

        A mode over torch's functions sees this one, too, and may make `unwritten` memory instead.
        """
        if has_torch_function((rows,)):
            return handle_torch_function(Call.joined, (rows,), self, rows)
        parts = [self.part(part) for part in self.cut(rows)]
        tensors = [torch.cat(pieces, dim=_dim(pieces[0])) for pieces in zip(*parts, strict=True)]
        dims = map(_dim, tensors)
        forms = [
            (leaf.shape[:dim], leaf.shape[dim + 1 :], leaf.dtype)
            for leaf, dim in zip(tensors, dims, strict=True)
        ]
        type(self._module).made = self._structure, forms
        return tensors

    def unwritten(self, rows: Tensor) -> list[Tensor]:
        """Return memory for what `joined` has returned for other tokens."""
        self._structure, forms = self._module.made
        return [
            torch.empty((*before, len(rows), *after), dtype=d, device=rows.device)
            for before, after, d in forms
        ]

    def returned(self, leaves: list[Tensor], places: torch.Size) -> Any:
        """Return ``leaves`` as the module would, to whom came tokens at ``places``; what it recorded is noted."""
        tensors = [leaf.view(*places, -1) if leaf.ndim == 3 else leaf for leaf in leaves]
        outputs, rest = torch_private.unflatten(tensors, self._structure)
        if rest:
            walk.note(rest)
        return outputs


def _dim(tensor: Tensor) -> int:
    """Return along which dimension tokens lie in what a module made of a part."""
    return int(tensor.ndim == 3)


class _Keep(Function):
    """Hands a tensor on, saved."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Parts(Function):
    """Runs a module part by part, and again, part by part, on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: Call) -> tuple[Tensor, ...]:
        ctx.call, kind = call, rows.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        ctx.set_materialize_grads(False)
        output = call.joined(rows)
        ctx.mark_non_differentiable(*(leaf for leaf in output if not leaf.is_floating_point()))
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (rows,) = ctx.next_functions[0][0].saved_tensors  # of `_Keep`, whose turn is next
        call: Call = ctx.call
        input_gradient = torch.empty_like(rows)
        given = {
            index: call.cut(gradient) for index, gradient in enumerate(gradients) if gradient is not None
        }
        for number, (part, into) in enumerate(zip(call.cut(rows), call.cut(input_gradient), strict=True)):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(rows.device.type, cache_enabled=False, **ctx.autocast):
                out = call.part(leaf)
            roots = [index for index in given if out[index].requires_grad]
            torch.autograd.backward(
                [out[index] for index in roots], [given[index][number] for index in roots]
            )
            into.copy_(cast(Tensor, leaf.grad))
        return input_gradient, None


IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Return for each position of ``labels`` [B, S] the token that a causal model predicts there, flat [B × S]."""
    targets = labels.new_full(labels.shape, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    return targets.reshape(-1)


def chunked_loss_alone(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, divisor: float, chunk_tokens: int
) -> Tensor:
    """Return the loss of `chunked_head_loss`, to the bit, without its backward."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        for start in range(0, rows.shape[0], chunk_tokens):
            logits = head(rows[start : start + chunk_tokens]).float()
            wanted = targets[start : start + chunk_tokens]
            loss += F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
    return loss


def chunked_head_loss(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, divisor: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over all targets and divided by ``divisor``, with its backward.

    For vocabulary V, width d and chunks of C tokens the working set is C × V logits and their gradient instead of B × S
    × V. Each chunk's backward runs inside the forward and leaves gradients in the head's parameters. Written as a loop
    over the model's own head module, so a bias or a quantised head is served alike, and torch 2.10 suffices;
    `torch.nn.functional.linear_cross_entropy` (2.13) does the same for plain linear heads.

    Args:
        head: maps [C, d] to logits [C, V]; gradients of its parameters accumulate.
        hidden: [B, S, d] or [B × S, d], without history.
        targets: [B × S], `IGNORE_INDEX` where nothing is predicted.
        divisor: the number of targets in the whole batch, so that microbatches add up to a token-weighted mean.
        chunk_tokens: C, tokens per chunk.

    Returns:
        The loss, an fp32 scalar, and the gradient of ``hidden``, of its shape and dtype.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    gradient = torch.empty_like(rows)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, rows.shape[0], chunk_tokens):
        piece = rows[start : start + chunk_tokens].detach().requires_grad_()
        wanted = targets[start : start + chunk_tokens]
        with torch.enable_grad():
            logits = head(piece).float()
            total = F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
        del logits  # the backward needs their softmax only, and makes two more of that size
        total.backward()  # type: ignore[no-untyped-call]
        loss += total.detach()
        assert piece.grad is not None
        gradient[start : start + chunk_tokens] = piece.grad
    return loss, gradient.reshape(hidden.shape)


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output: its ``loss``, or its first element.

    Raises:
        ModelError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError("the model returned no scalar loss; give it labels, or set train.loss=chunked")
    return loss
