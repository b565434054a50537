"""Optimizers by name, and what each keeps of a parameter. No torch.

An optimizer of our own is a row here and a file with its rule, of which ``rule`` says the class: a dataclass whose
fields are its settings, an `outsize.optim.planes.UpdateRule` or `WholeRule`. Any other name is a class of
``torch.optim`` (``SGD``; small letters do as well), or a path (``package.module.Class``), see
`outsize.optim.torch_class`.

Of second moments beside Muon, matrices of blocks have none, and what AdamW steps has the whole: the factor
``beside_muon``. What a class of torch keeps has a factor of two words, ``rows/none``: the shape for a parameter of two
or more dimensions, and for another. ``full`` is the parameter's shape; ``rows`` and ``columns`` have 1 in place of the
last dimension, or of the one before it, and ``row`` and ``column`` lack it; ``scalar`` and ``one`` are a number,
without a dimension and with one; ``none`` is nothing. So ``torch.optim.Adafactor`` has ``rows/none``, ``columns/none``
and ``none/full``. A unit has a plane for each, with what its tensors have of it one behind the other, so how many items
such a plane has follows from the shapes of the unit's tensors and not from the number of its elements.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, PLANE_ELEMENTS, TensorSpec, UnitSpec
from outsize.units import align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptimizer:
    """An optimizer of our own.

    Attributes:
        rule: path of the class of its rule.
        num_moments: how many moments it keeps, in planes whose form ``optimizer.state`` says.
        products: whether it makes momenta of matrices orthogonal, so that parameters step whole.
        kernel: whether a kernel in C steps exact state as the fused AdamW of torch does.
        keys: of section optimizer that are its settings, beside those that every optimizer has.
        args: settings besides, which are said in ``optimizer.args``.
        defaults: of keys where they are not those of the section.
    """

    rule: str
    num_moments: int
    products: bool = False
    kernel: bool = False
    keys: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


ADAMW = "adamw"
OWN: Mapping[str, OwnOptimizer] = MappingProxyType(
    {
        ADAMW: OwnOptimizer(
            rule="outsize.optim.adamw.PlaneAdamW", num_moments=2, kernel=True, keys=("betas", "eps")
        ),
        "muon": OwnOptimizer(
            rule="outsize.optim.muon.Muon",
            num_moments=2,
            products=True,
            kernel=True,
            keys=("betas", "eps", "momentum", "nesterov", "ns_steps", "ns_on", "adjust_lr_fn"),
            defaults={"weight_decay": 0.1},
        ),
    }
)
# What classes of torch have by default here where it is not what `OptimizerConfig` says.
_OF_TORCH: Mapping[str, Mapping[str, Any]] = {"sgd": {"args": {"momentum": 0.9}}, "adafactor": {"lr": 1e-2}}


def named(name: str) -> OwnOptimizer | None:
    """Return the optimizer of our own of that name; None where a class of torch's, or another's, is meant."""
    return OWN.get(name)


def users_of_keys() -> dict[str, tuple[str, ...]]:
    """Return, of keys that not every optimizer has, which of our own have them."""
    keys = dict.fromkeys(key for optimizer in OWN.values() for key in optimizer.keys)
    return {key: tuple(name for name, optimizer in OWN.items() if key in optimizer.keys) for key in keys}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user says of an optimizer with what the one that it names has by default."""
    name = given.get("name", ADAMW)
    if not isinstance(name, str):
        return dict(given)
    if (row := named(name)) is not None:
        return {**row.defaults, **given}
    short = name.removeprefix("torch.optim.").lower()
    settings = {"weight_decay": 0.0, **_OF_TORCH.get(short, {}), **given}
    arguments = given.get("args", {})
    if isinstance(arguments, Mapping):
        settings["args"] = {**_OF_TORCH.get(short, {}).get("args", {}), **arguments}
    return settings


Factor = str
BESIDE_MUON: Factor = "beside_muon"


def factor_shape(shape: tuple[int, ...], factor: Factor) -> tuple[int, ...] | None:
    """Return the shape of a factor of a tensor of ``shape``; None where the tensor has no such factor."""
    matrix, vector = factor.split("/")
    kind = matrix if len(shape) > 1 else vector
    if kind in ("full", "none"):
        return shape if kind == "full" else None
    if kind in ("scalar", "one"):
        return () if kind == "scalar" else (1,)
    if len(shape) < 2:
        return None
    rows, columns = shape[:-1], (*shape[:-2], shape[-1])
    return {"rows": (*rows, 1), "columns": (*shape[:-2], 1, shape[-1]), "row": rows, "column": columns}[kind]


def muon_matrices(unit: UnitSpec) -> Iterator[TensorSpec]:
    """Yield the parameters of a unit that Muon steps: matrices of blocks; embeddings, heads and vectors are AdamW's."""
    for tensor in unit.tensors:
        if unit.kind == "block" and tensor.trainable and tensor.muon and len(tensor.shape) == 2:
            yield tensor


def newton_schulz_flops(unit: UnitSpec, iterations: int) -> float:
    """Return the FLOPs of so many iterations for the matrices of a unit that Muon steps.

    Of k by n, k at most n, each multiplies k·n·k, k·k·k and k·k·n; a multiply-add counts two.
    """
    sides = (sorted(tensor.shape) for tensor in muon_matrices(unit))
    return float(sum(iterations * (4 * k * k * n + 2 * k**3) for k, n in sides))


def factored(unit: UnitSpec, factor: Factor) -> UnitSpec:
    """Return the unit as the plane of a factor sees it: its trained tensors that have the factor, in that shape.

    Its elements are those of the plane, a multiple of `PLANE_ELEMENTS`; there are some even where no tensor has the
    factor.
    """
    tensors: list[TensorSpec] = []
    end = 0
    for tensor, shape in _shapes(unit, factor):
        tensors.append(replace(tensor, shape=shape, offset=end))
        end = align_up(end + tensors[-1].numel, ALIGN_ELEMENTS)
    return replace(unit, tensors=tuple(tensors), numel=max(PLANE_ELEMENTS, align_up(end, PLANE_ELEMENTS)))


def _shapes(unit: UnitSpec, factor: Factor) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    if factor == BESIDE_MUON:
        matrices = {tensor.name for tensor in muon_matrices(unit)}
        yield from ((t, t.shape) for t in unit.tensors if t.trainable and t.name not in matrices)
        return
    for tensor in unit.tensors:
        shape = factor_shape(tensor.shape, factor) if tensor.trainable else None
        if shape is not None:
            yield tensor, shape
