"""Optimizers by name: those of our own, each with what it keeps of a parameter, and all of torch's by their class.

An optimizer of our own is a row here and a file with its rule, of which ``rule`` says the class: a dataclass whose
fields are its settings, an `outsize.optim.planes.UpdateRule` or `WholeRule`. Any other name is a class of
``torch.optim`` (``SGD``; small letters do as well), or a path (``package.module.Class``), see
`outsize.optim.torch_class`. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


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
# How configurations of former versions say settings of these.
_FORMER: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adafactor": ("beta2_decay", "eps1", "eps2", "d"),
}
# What no longer steps in code of ours, and whose state of a former run is another's.
FORMER_NAMES = ("sgd", "lion", "adafactor")


def named(name: str) -> OwnOptimizer | None:
    """Return the optimizer of our own of that name; None where a class of torch's, or another's, is meant."""
    return OWN.get(name)


def users_of_keys() -> dict[str, tuple[str, ...]]:
    """Return, of keys that not every optimizer has, which of our own have them."""
    keys = dict.fromkeys(key for own in OWN.values() for key in own.keys)
    return {key: tuple(name for name, own in OWN.items() if key in own.keys) for key in keys}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user says of an optimizer with what the one that it names has by default.

    Settings that former versions had as keys of the section are taken to ``args``.
    """
    name = given.get("name", ADAMW)
    if not isinstance(name, str):
        return dict(given)
    if (own := named(name)) is not None:
        return {**own.defaults, **given}
    short = name.removeprefix("torch.optim.").lower()
    keys = () if "args" in given else _FORMER.get(short, ())
    former = {key: given[key] for key in keys if key in given}
    rest = {key: value for key, value in given.items() if key not in former}
    if {"eps1", "eps2"} & former.keys():
        former["eps"] = [former.pop("eps1", None), former.pop("eps2", 1e-3)]
    found = {"weight_decay": 0.0, **_OF_TORCH.get(short, {}), **rest}
    arguments = given.get("args", {})
    if isinstance(arguments, Mapping):
        found["args"] = {**_OF_TORCH.get(short, {}).get("args", {}), **former, **arguments}
    return found
