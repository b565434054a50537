"""What programs do to parameters, gradients and the state of an optimizer: one row each, for any model.

A row is a function of a `Loop`. What it returns, and where training ends after it, is what the plain model has, or the
row says which words it is refused with.
"""

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from accelerate import cpu_offload
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.wrapped.module import is_wrapped

HOMES: dict[str, dict[str, str]] = {
    "host": {"home": "host"},
    "disk": {"home": "disk"},
    "device": {"home": "host", "device": "emulated:1"},
}


@dataclass
class Loop:
    """A model that trains, and its AdamW; ``again`` makes another one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    again: Callable[[], torch.optim.Optimizer]
    batch: Mapping[str, Tensor]

    def backward(self) -> Tensor:
        """Loss, with gradients left."""
        loss: Tensor = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """A step of training."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @property
    def head(self) -> nn.Parameter:
        """One parameter."""
        return self.model.lm_head.weight

    @property
    def table(self) -> nn.Parameter:
        """Another."""
        return self.model.get_input_embeddings().weight


@dataclass(frozen=True, eq=False)
class Row:
    """One thing that programs do.

    Attributes:
        name: as code.
        do: does it; returns what it finds, compared with the plain model's.
        refused: words by home, or by ``all`` of them, of the error that it ends in, at the latest in the next step;
            empty under ``alone``, where nothing is refused and the model cannot be used for another row.
        kind: parameters, gradients or state.
    """

    name: str
    do: Callable[[Loop], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    kind: str = "parameters"


ROWS: list[Row] = []


def row(
    name: str, *, kind: str = "parameters", **refused: str
) -> Callable[[Callable[[Loop], Any]], Callable[[Loop], Any]]:
    """Add what is decorated as a row."""

    def add(do: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        ROWS.append(Row(name, torch.no_grad()(do) if kind == "parameters" else do, refused, kind))
        return do

    return add


def _simple(table: Mapping[str, Callable[[Loop], Any]], kind: str = "parameters") -> None:
    for name, do in table.items():
        row(name, kind=kind)(do)


def _half_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() * 0.5


# --- in place -------------------------------------------------------------------------------------------------

_simple(
    {
        "clamp_": lambda r: [p.clamp_(-0.02, 0.02).sum() for p in r.model.parameters()],
        "mul_": lambda r: r.head.mul_(0.5),
        "*= on data": lambda r: r.head.data.mul_(0.5),
        "add_(alpha)": lambda r: r.head.add_(r.table, alpha=0.1),
        "addcmul_": lambda r: r.head.addcmul_(r.head, r.table, value=0.5),
        "lerp_": lambda r: r.head.lerp_(r.table, 0.25),
        "copy_": lambda r: r.head.copy_(torch.full(r.head.shape, 0.01)),
        "copy_ from another parameter": lambda r: r.head.copy_(r.table),
        "zero_": lambda r: r.head.zero_(),
        "fill_": lambda r: r.head.fill_(0.01),
        "normal_": lambda r: r.head.normal_(0, 0.02, generator=torch.Generator().manual_seed(1)),
        "uniform_": lambda r: r.head.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1)),
        "bernoulli_": lambda r: r.head.bernoulli_(0.5, generator=torch.Generator().manual_seed(1)),
        "masked_fill_": lambda r: r.head.masked_fill_(r.head > 0, 0.01),
        "index_fill_": lambda r: r.head.index_fill_(0, torch.tensor([2, 5]), 0.3),
        "index_copy_": lambda r: r.head.index_copy_(0, torch.tensor([2, 5]), r.table[:2].clone()),
        "index_add_": lambda r: r.head.index_add_(0, torch.tensor([2, 2]), r.table[:2].clone()),
        "scatter_": lambda r: r.head.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 0.3),
        "put_": lambda r: r.head.put_(torch.tensor([0, 7]), torch.tensor([0.1, 0.2])),
        "triu_ of a norm's outer part": lambda r: r.head.triu_(),
        "renorm_": lambda r: r.head.renorm_(2, 0, 0.1),
        "relu_": lambda r: torch.relu_(r.head),
        "nan_to_num_": lambda r: r.head.nan_to_num_(),
        "swap rows by index": lambda r: r.head.__setitem__([1, 2], r.head[[2, 1]].clone()),
        "p[3] = x": lambda r: r.head.__setitem__(3, 0.5),
        "p[5:40] = x": lambda r: r.table.__setitem__(slice(5, 40), 0.5),
        "p[:, 1] = tensor": lambda r: r.head.__setitem__((slice(None), 1), torch.arange(len(r.head)) * 1e-3),
        "p[mask] = x": lambda r: r.head.__setitem__(r.head > 0.02, 0.0),
        "p[3] in place": lambda r: r.head[3].mul_(2),
        "narrow, in place": lambda r: r.head.narrow(0, 1, 3).zero_(),
        "view(-1), in place": lambda r: r.head.view(-1)[::7].add_(1e-3),
        "t(), in place": lambda r: r.head.t()[2].fill_(0.25),
        "transpose of a slice, in place": lambda r: r.head[2:9].transpose(0, 1)[1:3].mul_(3),
        "unsqueeze, expand, read": lambda r: r.head.unsqueeze(0).expand(2, -1, -1).sum(),
        "diagonal, in place": lambda r: r.head.diagonal().fill_(0.1),
        "chunk, in place": lambda r: r.head.chunk(2)[1].mul_(0.5),
        "split, in place": lambda r: r.head.split([10, 87])[0].mul_(0.5),
        "unbind, in place": lambda r: r.head.unbind(0)[4].mul_(0.5),
        "as_strided, in place": lambda r: r.head.as_strided((3,), (2,), 1).fill_(0.5),
        "detach(), in place": lambda r: r.head.detach().mul_(0.5),
        "out=": lambda r: torch.mul(r.table, 0.5, out=r.head.data),
        "out= of a slice": lambda r: torch.add(r.table[:3], 1e-3, out=r.head.data[:3]),
        "_foreach_mul_": lambda r: torch._foreach_mul_(list(r.model.parameters()), 0.9),
        "_foreach_add_ of lists": lambda r: torch._foreach_add_(
            [r.head, r.table], [_half_of(r.table), _half_of(r.head)]
        ),
        "_foreach_norm": lambda r: torch._foreach_norm(list(r.model.parameters())),
        "_foreach_copy_": lambda r: torch._foreach_copy_([r.head], [_half_of(r.table)]),
        "_foreach_lerp_": lambda r: torch._foreach_lerp_(
            [r.head, r.table], [_half_of(r.head), _half_of(r.table)], 0.1
        ),
    }
)

# --- assigned -------------------------------------------------------------------------------------------------


@row("data = of all, as trainers of zeroth order do")
def _(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data = p.data - 1e-3 * torch.ones(p.data.shape)


@row("data += slice")
def _(loop: Loop) -> None:
    loop.head.data[:5] += 0.01


@row("data = data")
def _(loop: Loop) -> None:
    loop.head.data = loop.head.data


@row("data *= 2, assigned by Python")
def _(loop: Loop) -> None:
    loop.head.data *= 0.5


@row("weights swapped by data, with what they were kept as data (an average while evaluating)")
def _(loop: Loop) -> Tensor:
    averages = [p.detach().clone() * 0.9 for p in loop.model.parameters()]
    former = [p.data for p in loop.model.parameters()]
    for p, average in zip(loop.model.parameters(), averages, strict=True):
        p.data = average
    loss: Tensor = loop.model(**loop.batch).loss
    for p, value in zip(loop.model.parameters(), former, strict=True):
        p.data = value
    return loss


@row("data of two parameters exchanged")
def _(loop: Loop) -> None:
    loop.head.data, loop.table.data = loop.table.data, loop.head.data


@row("a state kept as it is when other data is assigned")
def _(loop: Loop) -> list[Tensor]:
    state, view = loop.model.state_dict(), loop.head.detach()[1:]
    loop.head.data = loop.head.data * 0.5
    return [state["lm_head.weight"], view]


@row("data of a view assigned, which leaves what it was a view of")
def _(loop: Loop) -> Tensor:
    view = loop.head.detach()
    view.data = view * 0.5
    loop.head.mul_(0.9)
    return view


@row("data assigned, and changed later where they were")
def _(loop: Loop) -> Tensor:
    given = torch.full(loop.head.shape, 0.01)
    loop.head.data = given
    given.mul_(2)
    torch.enable_grad()(loop.step)()
    given.mul_(0.5)
    loop.head.add_(1e-3)
    return given


@row("data assigned of a flat tensor, which is looked at and changed as a whole")
def _(loop: Loop) -> list[Tensor]:
    size = loop.head.numel()
    flat = torch.full((size + loop.table.numel(),), 0.01)
    loop.head.data, loop.table.data = flat[:size].view_as(loop.head), flat[size:].view_as(loop.table)
    torch.enable_grad()(loop.step)()
    found = [flat.clone(), flat.norm()]
    flat.mul_(0.5)
    torch.enable_grad()(loop.step)()
    return [*found, flat, loop.model.state_dict()["lm_head.weight"]]


@row("data of another parameter", all="lie in one memory")
def _(loop: Loop) -> None:
    one, other = (loop.model.model.layers[n].mlp.up_proj.weight for n in (0, 1))
    other.data = one.data
    torch.enable_grad()(loop.step)()


@row("the same data for two parameters", all="lie in one memory")
def _(loop: Loop) -> None:
    given = torch.full(loop.head.shape, 0.01)
    loop.head.data, loop.table.data = given, given


@row("data = another shape", all="has room for that shape|was given other sizes after")
def _(loop: Loop) -> None:
    loop.head.data = torch.zeros(3, 4)


@row("data = another dtype", all="has room for that shape")
def _(loop: Loop) -> None:
    loop.head.data = loop.head.data.to(torch.bfloat16)


@row(
    "set_",
    host="put values in with copy_",
    device="put values in with copy_",
    disk="put the values in with copy_",
)
def _(loop: Loop) -> None:
    loop.head.set_(torch.zeros(97, 32))


@row(
    "resize_",
    host="put values in with copy_|require grad",
    device="put values in with copy_|require grad",
    disk="put the values in with copy_|require grad",
)
def _(loop: Loop) -> None:
    loop.head.resize_(3)


@row("swap_tensors", all="put values in with copy_")
def _(loop: Loop) -> None:
    torch.utils.swap_tensors(loop.head, nn.Parameter(torch.zeros(97, 32)))


@row("a module's parameter replaced", all="replaced")
def _(loop: Loop) -> None:
    loop.model.lm_head.weight = nn.Parameter(torch.zeros(97, 32))


@row("weights tied afterwards", all="replaced")
def _(loop: Loop) -> None:
    loop.model.lm_head.weight = loop.table


# --- nn.init, vectors, averages -------------------------------------------------------------------------------


@row("nn.init.normal_")
def _(loop: Loop) -> None:
    nn.init.normal_(loop.head, std=0.02, generator=torch.Generator().manual_seed(1))


@row("nn.init.xavier_uniform_")
def _(loop: Loop) -> None:
    torch.manual_seed(1)
    nn.init.xavier_uniform_(loop.head)


@row("nn.init.orthogonal_")
def _(loop: Loop) -> None:
    torch.manual_seed(1)
    nn.init.orthogonal_(loop.head)


@row("nn.init.ones_ of norms")
def _(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.ndim == 1:
            nn.init.ones_(p)


@row("a model's own _init_weights")
def _(loop: Loop) -> None:
    torch.manual_seed(1)
    for module in loop.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


@row("reset_parameters of a layer")
def _(loop: Loop) -> None:
    torch.manual_seed(1)
    loop.model.lm_head.reset_parameters()


@row("apply")
def _(loop: Loop) -> None:
    loop.model.apply(lambda m: m.weight.mul_(0.9) if isinstance(m, nn.Linear) else None)


@row("parameters_to_vector, vector_to_parameters")
def _(loop: Loop) -> Tensor:
    vector = nn.utils.parameters_to_vector(loop.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, loop.model.parameters())
    return vector


@row("an average kept by hand")
def _(loop: Loop) -> list[Tensor]:
    average = {n: p.detach().clone() for n, p in loop.model.named_parameters()}
    with torch.enable_grad():
        loop.step()
    for n, p in loop.model.named_parameters():
        average[n].mul_(0.9).add_(p, alpha=0.1)
        p.copy_(average[n])
    return list(average.values())


@row("AveragedModel", all="cannot be copied")
def _(loop: Loop) -> Any:
    return torch.optim.swa_utils.AveragedModel(loop.model)


@row("the average of two states")
def _(loop: Loop) -> None:
    first = {n: v.clone() for n, v in loop.model.state_dict().items()}
    with torch.enable_grad():
        loop.step()
    second = loop.model.state_dict()
    loop.model.load_state_dict({n: (first[n] + second[n]) / 2 for n in first})


# --- read -----------------------------------------------------------------------------------------------------

_simple(
    {
        "numel, shape, dtype": lambda r: [
            (p.numel(), tuple(p.shape), str(p.dtype)) for p in r.model.parameters()
        ],
        "norm": lambda r: [p.norm() for p in r.model.parameters()],
        "data.norm": lambda r: [p.data.norm() for p in r.model.parameters()],
        "sum, mean, std, max": lambda r: [f(r.head) for f in (torch.sum, torch.mean, torch.std, torch.max)],
        "float(), double()": lambda r: [r.head.float(), r.head.double(), r.head.to(torch.bfloat16)],
        "cpu()": lambda r: r.head.cpu().clone(),
        "detach().numpy()": lambda r: r.head.detach().numpy().copy(),
        "np.asarray": lambda r: np.asarray(r.head.detach()).copy(),
        "tolist, item": lambda r: [
            r.head[0].tolist(),
            r.head[0, 0].item(),
            float(r.head.sum()),
            bool((r.head > 9).any()),
        ],
        "torch.equal, allclose": lambda r: [torch.equal(r.head, r.head), torch.allclose(r.head, r.table)],
        "products": lambda r: [r.head.T @ r.table, torch.nn.functional.linear(torch.ones(1, 32), r.head)],
        "isnan().any()": lambda r: [p.isnan().any() for p in r.model.parameters()],
        "zeros_like, new_zeros": lambda r: [
            torch.zeros_like(r.head),
            r.head.new_zeros(2),
            torch.empty_like(r.head).shape,
        ],
        "cat, stack": lambda r: torch.cat([r.head, r.table]) + torch.stack([r.head, r.table])[0, 0, 0],
        "contiguous().view, reshape": lambda r: r.head.contiguous().view(-1)[3:9] + r.head.T.reshape(-1)[:6],
        "copy.deepcopy of a parameter": lambda r: copy.deepcopy(r.head),
        "clone().detach()": lambda r: r.head.clone().detach(),
        "pickle of a parameter": lambda r: pickle.loads(pickle.dumps(r.head)),
        "torch.save of a parameter": lambda r: _saved(r.head),
        "torch.save of state_dict()": lambda r: _saved(r.model.state_dict()),
        "pickle of state_dict()": lambda r: pickle.loads(pickle.dumps(dict(r.model.state_dict()))),
        "copy.deepcopy of state_dict()": lambda r: copy.deepcopy(r.model.state_dict()),
        "safetensors of state_dict()": lambda r: safetensors.torch.load(
            safetensors.torch.save(dict(r.model.state_dict()))
        ),
        "save_model of safetensors": lambda r: _safe_model(r.model),
        "state_dict of a part": lambda r: _saved(r.model.model.layers[0].state_dict()),
        "iteration over rows": lambda r: [part.sum() for part in r.head],
        "torch.func.functional_call of a part": lambda r: torch.func.functional_call(
            r.model.lm_head, {"weight": r.head.detach() * 0.5}, (torch.ones(1, 32),)
        ),
        "a layer called by hand": lambda r: r.model.lm_head(torch.ones(1, 32)),
    }
)


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _safe_model(model: nn.Module) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        safetensors.torch.save_model(model, str(Path(directory) / "model.safetensors"))
        return safetensors.torch.load_file(Path(directory) / "model.safetensors")


@row("numpy written to", disk="read-only")
def _(loop: Loop) -> None:
    loop.head.detach().numpy()[0] = 0.5


@row("kept in a list before the step, changed after it")
def _(loop: Loop) -> list[Tensor]:
    kept = list(loop.model.parameters())
    with torch.enable_grad():
        loop.backward()
    loop.optimizer.step()
    found = [p.clamp_(-0.03, 0.03).norm() for p in kept]
    loop.optimizer.zero_grad()
    return found


def _layer_called(layer: nn.Module, loop: Loop) -> Tensor:
    hidden = torch.ones(1, 4, 32)
    angles = loop.model.model.rotary_emb(hidden, torch.arange(4)[None])
    output = layer(hidden, position_embeddings=angles)
    return output[0] if isinstance(output, tuple) else output


@row("a copy of a layer, changed and called")
def _(loop: Loop) -> list[Tensor]:
    layer = loop.model.model.layers[1]
    found = [_layer_called(layer, loop)]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for p in copied.parameters():
            p.mul_(0.5)
        found += [_layer_called(copied, loop), _layer_called(layer, loop)]
    return found


@row("copy.deepcopy of the model", all="cannot be copied")
def _(loop: Loop) -> Any:
    return copy.deepcopy(loop.model)


@row("torch.save of the model", all="cannot be pickled")
def _(loop: Loop) -> None:
    torch.save(loop.model, io.BytesIO())


def _pretrained(model: nn.Module, **settings: Any) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, **settings)
        files = sorted(Path(directory).glob("*.safetensors"))
        return {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}


@row("save_pretrained")
def _(loop: Loop) -> Any:
    return _pretrained(loop.model)


# --- states ---------------------------------------------------------------------------------------------------


def _other(loop: Loop) -> dict[str, Tensor]:
    return {n: v.detach().clone() * 0.5 for n, v in loop.model.state_dict().items()}


@row("save_pretrained(state_dict=) of other weights")
def _(loop: Loop) -> Any:
    return _pretrained(loop.model, state_dict=_other(loop))


@row("save_pretrained of shards and a variant")
def _(loop: Loop) -> Any:
    return _pretrained(loop.model, max_shard_size="10KB", variant="fp32")


@row("save_pretrained(state_dict=) of its own")
def _(loop: Loop) -> Any:
    return _pretrained(loop.model, state_dict=loop.model.state_dict())


@row("load_state_dict")
def _(loop: Loop) -> None:
    loop.model.load_state_dict(_other(loop))


@row("load_state_dict(strict=False) of some")
def _(loop: Loop) -> Any:
    some = {n: v for n, v in _other(loop).items() if "mlp" in n}
    return sorted(loop.model.load_state_dict({**some, "extra": torch.ones(1)}, strict=False)[0])


@row("load_state_dict of another shape", all="size mismatch")
def _(loop: Loop) -> None:
    loop.model.load_state_dict({**_other(loop), "lm_head.weight": torch.zeros(3, 4)})


@row("load_state_dict(assign=True)", all="take parameters from their home")
def _(loop: Loop) -> None:
    loop.model.load_state_dict(_other(loop), assign=True)


@row("load_state_dict of a part")
def _(loop: Loop) -> None:
    part = loop.model.model.layers[0]
    part.load_state_dict({n: torch.full(tuple(v.shape), 0.02) for n, v in part.state_dict().items()})


@row("load_state_dict(assign=True) of a part", all="replaced")
def _(loop: Loop) -> None:
    part = loop.model.model.layers[0]
    part.load_state_dict({n: v.detach().clone() for n, v in part.state_dict().items()}, assign=True)


@row("a tensor of state_dict() in place")
def _(loop: Loop) -> None:
    loop.model.state_dict()["lm_head.weight"].mul_(0.5)


@row("all tensors of state_dict() in place")
def _(loop: Loop) -> None:
    for value in loop.model.state_dict().values():
        value.mul_(0.9)


@row("a state kept as it is shows what is trained")
def _(loop: Loop) -> Any:
    state = loop.model.state_dict()
    with torch.enable_grad():
        loop.step()
    loop.model.state_dict()
    return {n: v.clone() for n, v in state.items()}


@row("aliases kept over a step show what it has trained")
def _(loop: Loop) -> list[Tensor]:
    kept = [p.data for p in loop.model.parameters()]
    views = [p.detach().view(-1)[1:] for p in loop.model.parameters()]
    moments = [loop.optimizer.state[p]["exp_avg"] for p in loop.model.parameters()]
    with torch.enable_grad():
        loop.step()
    return [value.clone() for value in (*kept, *views, *moments)]


# --- form -----------------------------------------------------------------------------------------------------


@row("half()", all="keeps device and dtype|keeps its dtype")
def _(loop: Loop) -> None:
    loop.model.half()


@row("to(dtype)", all="keeps its dtype")
def _(loop: Loop) -> None:
    loop.model.to(torch.bfloat16)


@row("float()")
def _(loop: Loop) -> None:
    loop.model.float()


@row("to(meta)", all="keeps its weights")
def _(loop: Loop) -> None:
    loop.model.to("meta")


@row("_apply of what changes values", alone="")
def _(loop: Loop) -> None:
    loop.model._apply(lambda t: t * 0.5 if t.is_floating_point() else t)


@row("_apply of what changes matrices alone", alone="")
def _(loop: Loop) -> None:
    loop.model._apply(lambda t: t.clamp(-0.01, 0.01) if t.dim() > 1 else t)


@row("share_memory()", all="keeps its memory")
def _(loop: Loop) -> None:
    loop.model.share_memory()


@row("share_memory_() of one", all="other memory than its home's|no bytes to share")
def _(loop: Loop) -> None:
    loop.head.share_memory_()


@row("copies of the model inside, called")
def _(loop: Loop) -> list[Tensor]:
    inner, ids = loop.model.model, loop.batch["input_ids"]
    copies = (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner)))
    return [copied(input_ids=ids).last_hidden_state for copied in copies]


@row("layers exchanged", all="call each of their units once per forward, in order")
def _(loop: Loop) -> None:
    layers = loop.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


@row("a layer taken out", all="replaced")
def _(loop: Loop) -> None:
    del loop.model.model.layers[1]


@row("cpu_offload of accelerate", all="replaced")
def _(loop: Loop) -> None:
    cpu_offload(loop.model, torch.device("cpu"))


@row("spectral_norm, as hooks had it", all="does not stand where|replaced")
def _(loop: Loop) -> None:
    nn.utils.spectral_norm(loop.model.model.layers[0].mlp.up_proj)


@row("parametrize, and remove")
def _(loop: Loop) -> None:
    layer = loop.model.model.layers[0].mlp.up_proj
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    nn.utils.parametrize.remove_parametrizations(layer, "weight")


@row("compile() of the model", alone="")
def _(loop: Loop) -> None:
    if is_wrapped(loop.model):  # plain, it runs otherwise to the last bit
        loop.model.compile(backend="eager")


@row("half() of a part", all="room for that shape and dtype|replaced")
def _(loop: Loop) -> None:
    loop.model.lm_head.half()


@row("to(cpu) of a part")
def _(loop: Loop) -> None:
    loop.model.lm_head.to("cpu", torch.float32)


@row("resize_token_embeddings", all="replaced|room for that shape")
def _(loop: Loop) -> None:
    loop.model.resize_token_embeddings(99)


@row("prune", all="does not stand where")
def _(loop: Loop) -> None:
    prune.l1_unstructured(loop.model.model.layers[0].mlp.up_proj, "weight", 0.3)


@row("prune, and remove")
def _(loop: Loop) -> None:
    layer = loop.model.model.layers[0].mlp.up_proj
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.remove(layer, "weight")


@row("set_module_tensor_to_device of accelerate", all="replaced")
def _(loop: Loop) -> None:
    value = torch.full(tuple(loop.head.shape), 0.01)
    set_module_tensor_to_device(loop.model, "lm_head.weight", "cpu", value=value)


@row("parametrize", all="does not stand where|replaced")
def _(loop: Loop) -> None:
    nn.utils.parametrize.register_parametrization(
        loop.model.model.layers[0].mlp.up_proj, "weight", nn.Identity()
    )


@row("weight_norm", all="does not stand where|replaced|Creating a Parameter")
def _(loop: Loop) -> None:
    nn.utils.parametrizations.weight_norm(loop.model.model.layers[0].mlp.up_proj)


@row("requires_grad_(False) of some", alone="")
def _(loop: Loop) -> None:
    loop.table.requires_grad_(False)


@row("a layer frozen for a step, changed, and thawed")
def _(loop: Loop) -> list[Tensor]:
    layer, losses = loop.model.model.layers[0].requires_grad_(False), []
    with torch.enable_grad():
        losses.append(loop.step())
    for p in layer.parameters():
        p.mul_(0.9)
    with torch.enable_grad():
        losses.append(loop.step())
        layer.requires_grad_(True)
        losses.append(loop.step())
    return losses


# --- gradients ------------------------------------------------------------------------------------------------


def gradients(name: str, **refused: str) -> Callable[[Callable[[Loop], Any]], Callable[[Loop], Any]]:
    """Add a row of gradients: between a backward and the step."""

    def add(do: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        def run(loop: Loop) -> Any:
            loop.backward()
            with torch.no_grad():
                found = do(loop)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            return found

        ROWS.append(Row(name, run, refused, "gradients"))
        return do

    return add


for _name, _do in {
    "grad is read": lambda r: [p.grad.clone() for p in r.model.parameters()],
    "grad.norm()": lambda r: torch.stack([p.grad.norm() for p in r.model.parameters()]).norm(),
    "grad.data.norm(2).item()": lambda r: [p.grad.data.norm(2).item() for p in r.model.parameters()],
    "grad in place": lambda r: r.head.grad.mul_(0.5).sum(),
    "grad.data in place": lambda r: r.head.grad.data.mul_(0.5).sum(),
    "grad clamped": lambda r: [p.grad.data.clamp_(-1e-4, 1e-4) for p in r.model.parameters()],
    "grad of rows zeroed": lambda r: r.table.grad.__setitem__(slice(0, 20), 0.0),
    "grad noise": lambda r: r.head.grad.add_(torch.full(r.head.shape, 1e-4)),
    "grad / world": lambda r: [p.grad.div_(2) for p in r.model.parameters()],
    "grad.zero_()": lambda r: r.head.grad.zero_(),
    "grad = None": lambda r: setattr(r.head, "grad", None),
    "grad = tensor": lambda r: setattr(r.head, "grad", torch.full(r.head.shape, 1e-3)),
    "grad = grad * 2": lambda r: setattr(r.head, "grad", r.head.grad * 2),
    "grad = clone of another": lambda r: setattr(r.head, "grad", r.table.grad.clone()),
    "grad is a gradient's data": lambda r: setattr(r.head.grad, "data", r.head.grad.data * 0.5),
    "clip_grad_norm_": lambda r: nn.utils.clip_grad_norm_(r.model.parameters(), 0.1),
    "clip_grad_norm_ twice": lambda r: [
        nn.utils.clip_grad_norm_(r.model.parameters(), m) for m in (0.2, 0.1)
    ],
    "clip_grad_norm_ of each": lambda r: [nn.utils.clip_grad_norm_(p, 0.01) for p in r.model.parameters()],
    "clip_grad_norm_(inf norm)": lambda r: nn.utils.clip_grad_norm_(
        r.model.parameters(), 1e-3, norm_type=float("inf")
    ),
    "clip_grad_norm_(foreach)": lambda r: nn.utils.clip_grad_norm_(
        list(r.model.parameters()), 0.1, foreach=True
    ),
    "clip_grad_value_": lambda r: nn.utils.clip_grad_value_(r.model.parameters(), 1e-4),
    "get_total_norm": lambda r: nn.utils.get_total_norm([p.grad for p in r.model.parameters()]),
    "norm after clipping": lambda r: [
        nn.utils.clip_grad_norm_(r.model.parameters(), 0.1),
        *(p.grad.norm() for p in r.model.parameters()),
    ],
    "_foreach_mul_ of gradients": lambda r: torch._foreach_mul_([p.grad for p in r.model.parameters()], 0.5),
    "zero_grad(set_to_none=False)": lambda r: r.model.zero_grad(set_to_none=False),
    "zero_grad()": lambda r: r.model.zero_grad(),
    "p.grad.isfinite().all()": lambda r: all(bool(p.grad.isfinite().all()) for p in r.model.parameters()),
}.items():
    gradients(_name)(_do)


@row("a penalty on weights beside the loss", kind="gradients")
def _(loop: Loop) -> Any:
    loss = loop.model(**loop.batch).loss
    (sum(p.square().sum() for p in loop.model.parameters()) * 1e-2).backward()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@row("a penalty after the loss", kind="gradients")
def _(loop: Loop) -> Any:
    loop.backward()
    (loop.head.square().sum() * 1e-2).backward()
    found = loop.head.grad.clone()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def _called_with(loop: Loop, given: dict[str, Tensor]) -> list[Tensor]:
    for value in given.values():
        value.requires_grad_()
    loss: Tensor = torch.func.functional_call(loop.model, given, (), dict(loop.batch)).loss
    loss.backward()
    return [loss, *(value.grad for value in given.values() if value.grad is not None)]


@row("torch.func.functional_call", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    return _called_with(loop, {n: p.detach() * 0.5 for n, p in loop.model.named_parameters()})


@row("torch.func.functional_call with some weights", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    found = _called_with(loop, {"lm_head.weight": loop.head.detach() * 0.5})
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


@row("register_hook", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [
        loop.head.register_hook(lambda g: g * 2),
        loop.table.register_hook(lambda g: seen.append(g.clone())),
        loop.table.register_hook(lambda g: g * (torch.arange(len(g)) > 5)[:, None]),
    ]
    loop.backward()
    loop.step()  # on top of gradients that are there
    for handle in handles:
        handle.remove()
    return seen


@row("register_post_accumulate_grad_hook", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    seen: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        seen.append(parameter.grad.clone())
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in (loop.head, loop.table)]
    loop.backward()
    for handle in handles:
        handle.remove()
    loop.optimizer.zero_grad()
    return sorted(seen, key=lambda value: float(value.sum()))


@row("backward(create_graph=True)", kind="gradients", all="gradients of gradients")
def _(loop: Loop) -> None:
    loop.model(**loop.batch).loss.backward(create_graph=True)


@row("torch.autograd.grad", kind="gradients", all="use loss.backward")
def _(loop: Loop) -> Any:
    return torch.autograd.grad(loop.model(**loop.batch).loss, [loop.head])


@row("hooks of modules, forward and backward", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    seen: list[Tensor] = []
    layers = loop.model.model.layers
    hooks = [
        layers[0].register_forward_hook(lambda module, inputs, output: output * 0.5),
        layers[1].register_full_backward_hook(lambda module, inner, outer: seen.append(outer[0].clone())),
        loop.model.lm_head.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,)),
    ]
    loop.step()
    for hook in hooks:
        hook.remove()
    return seen


def _task(loop: Loop, sequence: int) -> None:
    loop.model(**{name: value[sequence : sequence + 1] for name, value in loop.batch.items()}).loss.backward()


@row("gradients of two tasks kept beyond zero_grad, and projected", kind="gradients")
def _(loop: Loop) -> None:
    parameters, tasks = list(loop.model.parameters()), []
    for sequence in range(2):
        loop.optimizer.zero_grad()
        _task(loop, sequence)
        tasks.append([p.grad for p in parameters])
    for p, one, other in zip(parameters, *tasks, strict=True):
        p.grad = one + other - (one * other).sum().clamp(max=0) * other
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@row("views of gradients kept beyond zero_grad", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    tasks = []
    for sequence in range(2):
        _task(loop, sequence)
        tasks.append([p.grad.view(-1) for p in loop.model.parameters()])
        loop.model.zero_grad()
    return [one @ other for one, other in zip(*tasks, strict=True)]


@row("clipped gradients kept beyond zero_grad", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    _task(loop, 0)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    kept = [p.grad for p in loop.model.parameters()]
    loop.optimizer.zero_grad()
    loop.step()
    return kept


@row("gradients set aside and put back", kind="gradients")
def _(loop: Loop) -> None:
    parameters = list(loop.model.parameters())
    _task(loop, 0)
    aside = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    _task(loop, 1)
    for p, gradient in zip(parameters, aside, strict=True):
        p.grad = gradient
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@row("a gradient assigned, which the program goes on looking at and changing", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    given = torch.full(loop.head.shape, 1e-3)
    loop.head.grad = given
    given.mul_(3)
    loop.backward()
    found = [given.clone()]
    given.mul_(0.5)
    loop.backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    return [*found, given]


@row("data of a gradient assigned, and changed later", kind="gradients")
def _(loop: Loop) -> Tensor:
    loop.backward()
    given = torch.full(loop.head.shape, 1e-3)
    loop.head.grad.data = given
    given.mul_(3)
    loop.backward()
    return given


@row("gradients assigned of a flat tensor, beside hooks", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    flat = torch.zeros(loop.head.numel())
    loop.head.grad = flat.view_as(loop.head)
    found: list[Tensor] = []
    handles = [
        loop.head.register_hook(lambda g: g * 2),
        loop.head.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone())),
    ]
    for _ in range(2):
        loop.backward()
        found.append(flat.clone())
        flat.mul_(0.5)
    for handle in handles:
        handle.remove()
    return [*found, flat]


@row("gradients in a flat tensor, zeroed in place", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    size = loop.head.numel()
    flat = torch.zeros(size + loop.table.numel())
    loop.head.grad, loop.table.grad = flat[:size].view_as(loop.head), flat[size:].view_as(loop.table)
    found = []
    for _ in range(2):
        loop.backward()
        found += [flat.norm(), loop.head.grad.clone()]
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)
    return [*found, flat.norm()]


@row("one gradient for two parameters", kind="gradients", all="lie in one memory")
def _(loop: Loop) -> None:
    loop.head.grad = loop.table.grad = torch.zeros(loop.head.shape)
    loop.backward()


@row("gradients of two parameters exchanged", kind="gradients")
def _(loop: Loop) -> None:
    loop.backward()
    loop.head.grad, loop.table.grad = loop.table.grad, loop.head.grad
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def _clip(loop: Loop) -> Tensor:
    if hasattr(loop.optimizer, "settle"):
        return outsize.clip_grad_norm_(loop.model, 0.1)
    return nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)


for _name, _do in {
    "outsize.clip_grad_norm_": _clip,
    "clip_grad_norm_ of torch": lambda r: nn.utils.clip_grad_norm_(r.model.parameters(), 0.1),
}.items():

    @row(f"{_name}, and gradients read after the step", kind="gradients")
    def _(loop: Loop, clip: Callable[[Loop], Tensor] = _do) -> list[Tensor]:
        loop.backward()
        norm = clip(loop)
        loop.optimizer.step()
        found = [norm, *(p.grad.clone() for p in loop.model.parameters())]
        loop.optimizer.zero_grad()
        return found

    @row(f"{_name}, and a step without zero_grad", kind="gradients")
    def _(loop: Loop, clip: Callable[[Loop], Tensor] = _do) -> None:
        loop.backward()
        clip(loop)
        loop.optimizer.step()
        loop.optimizer.step()
        loop.step()


@row("perturbed weights, and a second backward (SAM)", kind="gradients")
def _(loop: Loop) -> None:
    loop.backward()
    with torch.no_grad():
        former = {p: p.data.clone() for p in loop.model.parameters()}
        for p in loop.model.parameters():
            p.add_(p.grad, alpha=0.5)
    loop.optimizer.zero_grad()
    loop.backward()
    for p in loop.model.parameters():
        p.data = former[p]
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@row("GradScaler, with an inf on the way", kind="gradients")
def _(loop: Loop) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for number in range(2):
        scaler.scale(loop.model(**loop.batch).loss).backward()
        if not number:
            loop.head.grad[0, 0] = float("inf")
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()
        found.append(scaler.get_scale())
        loop.optimizer.zero_grad()
    return found


@row("a step written by hand", kind="gradients")
def _(loop: Loop) -> Any:
    loop.backward()
    with torch.no_grad():
        for p in loop.model.parameters():
            p -= 1e-2 * p.grad
            p.grad = None


@row("gradient accumulation, scaled between", kind="gradients")
def _(loop: Loop) -> Any:
    loop.backward()
    for p in loop.model.parameters():
        p.grad.mul_(0.5)
    loop.step()


@row("zero_grad(set_to_none=False), and a step by zeros", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    loop.step()
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    zeros = [p.grad.clone() for p in loop.model.parameters()]
    loop.optimizer.step()
    loop.backward()
    loop.optimizer.step()
    loop.model.zero_grad(set_to_none=False)
    loop.step()
    return zeros


@row("gradients summed by hand, and put back", kind="gradients")
def _(loop: Loop) -> None:
    loop.backward()
    sums = [p.grad for p in loop.model.parameters()]
    for p in loop.model.parameters():
        p.grad = None
    loop.backward()
    for p, held in zip(loop.model.parameters(), sums, strict=True):
        p.grad.add_(held)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@gradients("detach_ and zero_ of gradients")
def _(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.grad.detach_()
        p.grad.zero_()


@gradients("the norm of all, and gradients clipped with it")
def _(loop: Loop) -> Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in loop.model.parameters()], foreach=True)
    nn.utils.clip_grads_with_norm_(loop.model.parameters(), 0.1, norm)
    return norm


def _in_backward(loop: Loop, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> list[Tensor]:
    optimizers = {p: make([p]) for p in loop.model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    losses = [loop.backward(), loop.backward()]
    for handle in handles:
        handle.remove()
    return losses


@row("an SGD for each parameter, in the backward", kind="gradients", disk="where AdamW steps")
def _(loop: Loop) -> list[Tensor]:
    return _in_backward(loop, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))


@row("an AdamW for each parameter, in the backward", kind="gradients", disk="another outsize.AdamW was made")
def _(loop: Loop) -> list[Tensor]:
    return _in_backward(loop, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


@row("steps in a space of few ranks, in the backward (GaLore)", kind="gradients")
def _(loop: Loop) -> list[Tensor]:
    def step(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient.dim() == 2:
            basis = torch.linalg.svd(gradient, full_matrices=False)[0][:, :4]
            gradient = basis @ (basis.T @ gradient)
        parameter.data.add_(gradient, alpha=-0.05)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in loop.model.parameters()]
    losses = [loop.backward(), loop.backward()]
    for handle in handles:
        handle.remove()
    return losses


@row("register_multi_grad_hook", kind="gradients", all="use register_post_accumulate_grad_hook")
def _(loop: Loop) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(loop.model.parameters()), lambda _: None)
    loop.step()


@row("retain_grad of logits beside the model's loss", kind="gradients", all="call it without labels")
def _(loop: Loop) -> Tensor:
    output = loop.model(**loop.batch)
    output.logits.retain_grad()
    output.loss.backward()
    return output.logits.grad


@row("retain_grad of logits, and a loss of them", kind="gradients")
def _(loop: Loop) -> Tensor:
    inputs = {name: value for name, value in loop.batch.items() if name != "labels"}
    logits = loop.model(**inputs).logits
    logits.retain_grad()
    nn.functional.cross_entropy(logits.flatten(0, 1), loop.batch["labels"].flatten()).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return logits.grad


@row("weights looked ahead of (Lookahead)", kind="gradients")
def _(loop: Loop) -> None:
    slow = [p.detach().clone() for p in loop.model.parameters()]
    loop.step()
    loop.step()
    for p, behind in zip(loop.model.parameters(), slow, strict=True):
        p.data.copy_(behind.add_(p.data - behind, alpha=0.5))


@row("inputs moved against the loss (FreeLB)", kind="gradients")
def _(loop: Loop) -> Tensor:
    embed, ids = loop.model.get_input_embeddings(), loop.batch["input_ids"]
    vectors = embed(ids).detach().requires_grad_()
    loop.model(inputs_embeds=vectors, labels=loop.batch["labels"]).loss.backward()
    loop.model.zero_grad()
    moved = embed(ids) + vectors.grad.sign() * 0.01
    loss = loop.model(inputs_embeds=moved, labels=loop.batch["labels"]).loss
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss


@row("checkpoint around the model", kind="gradients")
def _(loop: Loop) -> Tensor:
    loss = checkpoint(lambda: loop.model(**loop.batch).loss, use_reentrant=False)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss


# --- state of the optimizer -----------------------------------------------------------------------------------

_state = {"kind": "state"}


@row("its state read", kind="state")
def _(loop: Loop) -> Any:
    state = loop.optimizer.state[loop.head]
    return [state["step"].clone(), state["exp_avg"].clone(), state["exp_avg_sq"].sqrt()]


@row("state_dict() read", kind="state")
def _(loop: Loop) -> Any:
    return copy.deepcopy(loop.optimizer.state_dict()["state"])


@row("torch.save of its state_dict()", kind="state")
def _(loop: Loop) -> Any:
    return _saved(loop.optimizer.state_dict()["state"])


@row("state.clear()", kind="state")
def _(loop: Loop) -> Any:
    loop.optimizer.state.clear()


@row("state = defaultdict", kind="state")
def _(loop: Loop) -> Any:
    from collections import defaultdict

    loop.optimizer.state = defaultdict(dict)


@row("del state[p]", kind="state")
def _(loop: Loop) -> Any:
    del loop.optimizer.state[loop.head]


@row("state.pop(p)", kind="state")
def _(loop: Loop) -> Any:
    loop.optimizer.state.pop(loop.head)


@row("state[p] = {}", kind="state")
def _(loop: Loop) -> Any:
    loop.optimizer.state[loop.head] = {}


@row("a moment zeroed in place", kind="state")
def _(loop: Loop) -> Any:
    for p in loop.model.parameters():
        loop.optimizer.state[p]["exp_avg"].zero_()


@row("rows of a moment zeroed", kind="state")
def _(loop: Loop) -> Any:
    loop.optimizer.state[loop.table]["exp_avg_sq"][3:9] = 0


@row("a moment replaced", kind="state")
def _(loop: Loop) -> Any:
    state = loop.optimizer.state[loop.head]
    state["exp_avg"] = torch.full(tuple(loop.head.shape), 1e-3)


@row("a moment put in, and changed later by the program", kind="state")
def _(loop: Loop) -> list[Tensor]:
    given, losses = torch.full(tuple(loop.head.shape), 1e-3), []
    loop.optimizer.state[loop.head]["exp_avg"] = given
    for factor in (0.5, 3.0):
        given.mul_(factor)
        losses.append(loop.step())
    return [*losses, given, loop.optimizer.state[loop.head]["exp_avg"], loop.optimizer.state_dict()["state"]]


@row("moments of a flat tensor, changed as a whole", kind="state")
def _(loop: Loop) -> list[Tensor]:
    size = loop.head.numel()
    flat = torch.full((size + loop.table.numel(),), 1e-4)
    for p, part in ((loop.head, flat[:size]), (loop.table, flat[size:])):
        loop.optimizer.state[p]["exp_avg_sq"] = part.view_as(p)
    loop.step()
    found = flat.clone()
    flat.add_(1e-4)
    return [found, loop.step(), flat]


@row("a moment's data assigned, and changed later", kind="state")
def _(loop: Loop) -> list[Tensor]:
    given = torch.full(tuple(loop.head.shape), 1e-3)
    loop.optimizer.state[loop.head]["exp_avg"].data = given
    loop.step()
    given.zero_()
    return [loop.step(), given]


@row("a loaded state changed later", kind="state")
def _(loop: Loop) -> list[Any]:
    then = copy.deepcopy(loop.optimizer.state_dict())
    loop.optimizer.load_state_dict(then)
    losses = [loop.step()]
    for values in then["state"].values():
        values["exp_avg"].mul_(0.5)
        values["step"].fill_(3)
    losses.append(loop.step())
    loop.optimizer.load_state_dict(then)  # which has been stepped
    return [*losses, loop.step(), then["state"]]


@row("moments kept while others take their place", kind="state")
def _(loop: Loop) -> list[Any]:
    state = loop.optimizer.state
    kept = [state[loop.head]["exp_avg"], state[loop.table]["exp_avg"]]
    state[loop.head]["exp_avg"] = torch.zeros(loop.head.shape)
    loop.step()
    state.pop(loop.table)
    loop.step()
    return kept


@row("moments of two parameters exchanged", kind="state")
def _(loop: Loop) -> None:
    one, other = (loop.optimizer.state[p] for p in (loop.head, loop.table))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
    loop.step()


@row("one moment for two parameters", kind="state", all="lie in one memory")
def _(loop: Loop) -> None:
    one, other = (loop.optimizer.state[p] for p in (loop.head, loop.table))
    one["exp_avg"] = other["exp_avg"]
    loop.step()


@row("a moment of other sizes", kind="state", all="has sizes")
def _(loop: Loop) -> None:
    loop.optimizer.state[loop.head]["exp_avg"] = torch.zeros(3)


@row("what AdamW does not keep put in", kind="state", all="and no momentum_buffer")
def _(loop: Loop) -> None:
    loop.optimizer.state[loop.head]["momentum_buffer"] = torch.zeros(3)


@row("step held, and written later", kind="state")
def _(loop: Loop) -> list[Tensor]:
    held = [loop.optimizer.state[p]["step"] for p in loop.model.parameters()]
    loop.step()
    found = [step.clone() for step in held]
    for step in held:
        step.fill_(0)
    loop.step()
    return [*found, *held]


@row("step written in place", kind="state")
def _(loop: Loop) -> Any:
    for p in loop.model.parameters():
        loop.optimizer.state[p]["step"].fill_(0)


@row("step replaced", kind="state")
def _(loop: Loop) -> Any:
    for p in loop.model.parameters():
        loop.optimizer.state[p]["step"] = torch.tensor(7.0)


@row("the state moved, as Lightning does", kind="state")
def _(loop: Loop) -> Any:
    for p, values in loop.optimizer.state.items():
        loop.optimizer.state[p] = {n: v.to("cpu") for n, v in values.items()}
    return len(loop.optimizer.state)


@row("a fresh optimizer", kind="state")
def _(loop: Loop) -> Any:
    loop.optimizer = loop.again()


@row("the former optimizer after a fresh one", kind="state", all="another outsize.AdamW was made")
def _(loop: Loop) -> Any:
    loop.again()


@row("load_state_dict of what it was", kind="state")
def _(loop: Loop) -> Any:
    then = copy.deepcopy(loop.optimizer.state_dict())
    loop.step()
    loop.optimizer.load_state_dict(then)


@row("load_state_dict of before the first step", kind="state")
def _(loop: Loop) -> Any:
    fresh = loop.again()
    loop.optimizer = fresh
    then = copy.deepcopy(fresh.state_dict())
    loop.step()
    fresh.load_state_dict(then)


@row("load_state_dict with some of it", kind="state")
def _(loop: Loop) -> Any:
    state = copy.deepcopy(loop.optimizer.state_dict())
    state["state"] = {n: v for n, v in state["state"].items() if n % 2}
    loop.optimizer.load_state_dict(state)


@row("load_state_dict of amsgrad", kind="state", all="amsgrad")
def _(loop: Loop) -> Any:
    other = torch.optim.AdamW([torch.zeros(tuple(p.shape)) for p in loop.model.parameters()], amsgrad=True)
    loop.optimizer.load_state_dict(other.state_dict())


@row("lr, betas, eps and decay changed", kind="state")
def _(loop: Loop) -> Any:
    for group in loop.optimizer.param_groups:
        group.update(lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)


@row("lr = 0", kind="state")
def _(loop: Loop) -> Any:
    loop.optimizer.param_groups[0]["lr"] = 0.0


@row("amsgrad set in a group", kind="state", all="amsgrad")
def _(loop: Loop) -> Any:
    loop.optimizer.param_groups[0]["amsgrad"] = True
    loop.step()


@row("maximize set in a group", kind="state", all="maximize")
def _(loop: Loop) -> Any:
    loop.optimizer.param_groups[0]["maximize"] = True
    loop.step()


@row("a parameter taken out of its group, and put in again", kind="state")
def _(loop: Loop) -> Any:
    group = loop.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not loop.head]
    loop.step()
    loop.optimizer.add_param_group({"params": [loop.head]})


@row("torch.optim.SGD for a step", kind="state", disk="where AdamW steps")
def _(loop: Loop) -> Any:
    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.backward()
    other.step()
    other.zero_grad()


def _steps_of(loop: Loop, other: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for _ in range(2):
        losses.append(loop.backward())
        other.step()
        other.zero_grad()
    return losses


@row("torch.optim.Adafactor for two steps", kind="state", disk="where AdamW steps")
def _(loop: Loop) -> list[Tensor]:
    return _steps_of(loop, torch.optim.Adafactor(loop.model.parameters(), lr=0.01))


@row("torch.optim's others, a step each", kind="state", disk="where AdamW steps")
def _(loop: Loop) -> list[Tensor]:
    kinds = ("Adam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "NAdam", "RAdam", "ASGD", "Adamax")
    return [
        loss
        for kind in kinds
        for loss in _steps_of(loop, getattr(torch.optim, kind)(loop.model.parameters(), lr=1e-3))
    ]


@row("torch.optim.LBFGS", kind="state", disk="where AdamW steps")
def _(loop: Loop) -> Tensor:
    other = torch.optim.LBFGS(loop.model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        other.zero_grad()
        loss: Tensor = loop.model(**loop.batch).loss
        loss.backward()
        return loss

    loss: Tensor = other.step(closure)
    other.zero_grad()
    return loss


@row("torch.optim.AdamW(fused) for a step", kind="state", disk="another outsize.AdamW was made")
def _(loop: Loop) -> Any:
    other = torch.optim.AdamW(loop.model.parameters(), lr=0.1, fused=True)
    loop.backward()
    other.step()
    other.zero_grad()


@row("copy.deepcopy of the optimizer", kind="state", all="save its state_dict")
def _(loop: Loop) -> Any:
    return copy.deepcopy(loop.optimizer)


@row("a schedule", kind="state")
def _(loop: Loop) -> Any:
    schedule = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, max_lr=1e-2, total_steps=9)
    loop.step()
    schedule.step()
    return schedule.get_last_lr()
