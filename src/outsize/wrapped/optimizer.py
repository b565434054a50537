"""The optimizer of a wrapped model, stepped unit by unit at home beside the next forward, and its clipping."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outsize.errors import ConfigError, NonFiniteError
from outsize.optim.adamw import PlaneAdamW as Settings
from outsize.optim.optimizer_spec import GRADIENT
from outsize.optim.step import clip_coefficient, gradient_norms
from outsize.storage.ledger import Arena
from outsize.wrapped.at_home.at_rest import AtRest
from outsize.wrapped.at_home.home_parameter import parameter_of_now, plainly
from outsize.wrapped.module import iterate_parameters, runner_of
from outsize.wrapped.optimizer_state import EXACT, StateAtHome, before_rounding, pack
from outsize.wrapped.runner import Runner

_log = logging.getLogger(__name__)
_SHOWN = 3
_ALIKE = ("lr", "betas", "eps")
# What groups of torch's may ask for, and the one way that this optimizer has.
_ONE_WAY = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}


class AdamW(torch.optim.Optimizer):
    """AdamW on the home of a wrapped model: bit for bit ``torch.optim.AdamW(fused=True)`` on fp32 weights.

    So it is with moments in fp32. `outsize.wrap` with ``state="bf16"`` or ``"int8"`` keeps them in fewer bits.

    `step` returns at once, unless the program holds tensors that it changes (``parameter.data``, those of a
    ``state_dict()``). Each unit's next load waits for its own step; whatever looks at a parameter, saving and `settle`
    wait for all of them.

    It is a `torch.optim.Optimizer`: learning-rate schedulers, ``Trainer`` and ``accelerate`` take it as one.

    Args:
        model: the wrapped model.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        groups: parameter groups as torch's, for weight decay of a part only: each group has the same ``lr``, ``betas``
            and ``eps``, and a ``weight_decay`` of 0 or of one common value. None is one group of all parameters.

    Attributes:
        without_gradient: names of trained parameters that had no gradient in the last step; torch's optimizers leave
            such parameters alone without a word, this one leaves them alone and logs them.

    Raises:
        ConfigError: the model is not wrapped, or groups differ in more than that.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        groups: Iterable[dict[str, Any]] | None = None,
    ) -> None:
        self._runner = runner_of(model)
        self._runner.parameters_now()
        self._state = StateAtHome(self._runner, lambda: self._named().values())
        self.without_gradient: tuple[str, ...] = ()
        self._told: set[str] = set()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(list(iterate_parameters(model)) if groups is None else list(groups), defaults)
        _follow_parameters(self)
        self._begin(frozenset(self._named()))
        self._tell()

    @property  # type: ignore[override]
    def state(self) -> StateAtHome:
        """Moments and counts by parameter, as they rest at home; what is changed there counts."""
        return self._state

    @state.setter
    def state(self, values: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        if values is self._state or not hasattr(self, "param_groups"):  # torch's constructor begins with none
            return
        # One after the other: they may be what rests at home, which beginning all of it anew would take from them.
        for parameter, state in values.items():
            self._state[parameter] = state
        for parameter in [each for each in self._state if each not in values]:
            del self._state[parameter]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        if hasattr(self, "_told"):
            _follow_parameters(self)
            self._begin(frozenset(self._names.get(id(p), "") for p in self.param_groups[-1]["params"]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Begin one step and return.

        Raises:
            OutsizeError: the step before failed, or there has been no forward yet.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._tell()
        names = frozenset(self._named())
        if any(self._runner.owners.get(name) is not self._state for name in names):
            raise ConfigError(
                "another outsize.AdamW was made for these parameters, and has begun their moments anew, which one home "
                "holds once: step that one, or make this one again"
            )
        self._state.follow()
        self.without_gradient = self._runner.step(float(self.param_groups[0]["lr"]), names)
        fresh = [name for name in self.without_gradient if name not in self._told]
        if fresh:
            more = f" and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else ""
            _log.warning("no gradient in a whole step, left alone: %s%s", ", ".join(fresh[:_SHOWN]), more)
            self._told.update(fresh)
        self._state.show_steps()
        return loss

    def take_over(self, other: torch.optim.Optimizer) -> None:
        """Step what another optimizer has by now: its groups, and a state that it was given since."""
        self.param_groups = other.param_groups
        if other.state is not self._state:
            parameters = [p for group in other.param_groups for p in group["params"]]
            self.state = before_rounding(other.state, parameters)
            other.state = self._state  # type: ignore[assignment]

    def settle(self) -> None:
        """Return when the step under way is done."""
        self._runner.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        if not set_to_none:
            self._runner.settle()
            self._runner.parameters.multiply_gradients(list(self._runner.parameters.factors))
        with plainly():
            super().zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups in the form of ``torch.optim.AdamW``: ``step``, ``exp_avg``, ``exp_avg_sq``.

        Where weights are bf16 or fp16 there is a ``master`` as well, fp32, which no ``state_dict`` of the model has.
        Moments are as they are kept, see `outsize.wrap`: with ``state="int8"`` codes, and scales beside them. Over a
        disk home tensors are read as they are used.
        """
        packed = super().state_dict()
        packed["state"] = {number: dict(values) for number, values in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state and groups from what `state_dict`, or that of ``torch.optim.AdamW``, returned.

        What it has no state of begins anew. Masters count where they round to the weights that the model has at the
        next step. Moments of another form than this model's are rounded to the nearest.

        Raises:
            ValueError: it is of other groups.
            ConfigError: it is of another optimizer.
        """
        self._runner.settle()
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(saved) != len(parameters):
            raise ValueError(f"the state is of {len(saved)} parameters, this optimizer has {len(parameters)}")
        states = state_dict["state"]
        numbered = {p: states[n] for n, p in zip(saved, parameters, strict=True) if n in states}
        values = before_rounding({**numbered, EXACT: states.get(EXACT, {})}, parameters)
        super().load_state_dict({**state_dict, "state": {}})
        self._begin(frozenset(self._named()))
        for parameter in parameters:
            self._state[parameter] = values.get(parameter, {})
        self._tell()

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            "outsize.AdamW cannot be copied or pickled, since its state lies at home: save its state_dict()"
        )

    @property
    def _names(self) -> Mapping[int, str]:
        """Names of all parameters of the model by their `id`, as they are by now: those around adapters change."""
        return self._runner.parameters.names

    def _named(self) -> dict[str, Tensor]:
        return {
            self._names[id(p)]: p
            for group in self.param_groups
            for p in group["params"]
            if id(p) in self._names
        }

    def _begin(self, names: frozenset[str]) -> None:
        """Take the state of these parameters over, and begin it anew where it was another optimizer's."""
        others = frozenset(name for name in names if self._runner.owners.get(name) is not self._state)
        self._state.begin_anew(others)
        self._runner.owners.update(dict.fromkeys(others, self._state))

    def _tell(self) -> None:
        """Check the groups, and have the engine step with their settings."""
        first = self.param_groups[0]
        for key, usual in _ONE_WAY.items():
            if any(group.get(key, usual) != usual for group in self.param_groups):
                raise ConfigError(
                    f"outsize.AdamW has no {key}={not usual}; leave it out, or use torch.optim.AdamW over a host home"
                )
        if any(group[key] != first[key] for group in self.param_groups for key in _ALIKE):
            raise ConfigError(
                "outsize.AdamW has one lr, betas and eps for all groups; only weight_decay may be 0 in some"
            )
        decays = {float(group["weight_decay"]) for group in self.param_groups} - {0.0}
        if len(decays) > 1:
            raise ConfigError(f"outsize.AdamW has one weight_decay besides 0, not {sorted(decays)}")
        strangers = [p for group in self.param_groups for p in group["params"] if id(p) not in self._names]
        if strangers:
            raise ConfigError(
                "a parameter group holds parameters that are not those of this wrapped model: make the groups of "
                "model.named_parameters() as they are now"
            )
        names = frozenset(
            self._names[id(p)]
            for group in self.param_groups
            if group["weight_decay"]
            for p in group["params"]
        )
        settings = Settings(
            betas=tuple(first["betas"]), eps=first["eps"], weight_decay=decays.pop() if decays else 0.0
        )
        self._runner.use(settings, names)


def make_way_for_others(runner: Runner) -> None:
    """Before each step of an optimizer but `AdamW`: see that it can step, and round gradients as most want them.

    Rounded to the dtype of the weights, gradients are those of a plain backward where a step is one microbatch. Over a
    disk home there is no room for moments in host memory: `AdamW` stands in for torch's, others are refused.
    """
    known = weakref.ref(runner)
    stand_ins: weakref.WeakKeyDictionary[torch.optim.Optimizer, AdamW] = weakref.WeakKeyDictionary()
    idle = torch.optim.AdamW([torch.zeros(0)])
    idle.param_groups = []

    def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        still = known()
        if still is None:
            return None
        _follow_parameters(optimizer)
        if isinstance(optimizer, AdamW):
            return None
        own = {id(parameter) for parameter in still.parameters.named.values()}
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        due = [p for p in groups if id(p) in own]
        if not due:  # another model's, of which this one, which may be closed by now, knows nothing
            return None
        if any(isinstance(parameter, AtRest) and parameter.requires_grad for parameter in due):
            _check_stand_in(optimizer, alone=len(due) == len(groups))
            if optimizer not in stand_ins:
                stand_ins[optimizer] = _standing_in(still, optimizer)
            stand_ins[optimizer].take_over(optimizer)
            return (idle,), {"closure": _closure(stand_ins[optimizer], optimizer, *args[1:], **kwargs)}
        still.settle()
        still.parameters.multiply_gradients(list(still.parameters.factors))
        still.parameters.round_gradients(due)
        return None

    weakref.finalize(runner, register_optimizer_step_pre_hook(begin).remove)


def _closure(
    stand_in: AdamW, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
) -> Callable[[], Any]:
    """Return a closure that steps behind the caller's own: before any hook that runs behind the step."""

    def step() -> Any:
        loss = None if closure is None else closure()
        # Set by a scaler, which leaves it to the optimizer to stay.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is None or not overflow.item():
            stand_in.step()
        return loss

    return step


def _follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Have the groups of an optimizer hold what stands in the model by now: adapters may have gone home since."""
    for group in optimizer.param_groups:
        for at, parameter in enumerate(group["params"]):
            now = group["params"][at] = parameter_of_now(parameter)
            if now is not parameter and parameter in optimizer.state:
                optimizer.state[now] = optimizer.state.pop(parameter)


def _check_stand_in(optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
    """Check that an optimizer of torch does what `AdamW` does where it steps what rests on disk."""
    if type(optimizer) is not torch.optim.AdamW or not alone:
        raise ConfigError(
            f"{type(optimizer).__name__}.step(): what trains rests on disk or on the device, or was encoded, where "
            "AdamW steps, and parameters of this model alone: use torch.optim.AdamW or outsize.AdamW(model) (of a "
            'Trainer: its default, or optimizers=(outsize.AdamW(model), None)), or wrap the model with home="host", no '
            "codec and nothing resident"
        )
    for name in ("capturable", "differentiable"):
        if any(group[name] for group in optimizer.param_groups):
            raise ConfigError(f"AdamW({name}=True): over a disk home its step is no graph; leave it out")
    if getattr(optimizer, "grad_scale", None) is not None:  # a scaler leaves unscaling to fused kernels
        raise ConfigError(
            "GradScaler.step() has torch.optim.AdamW unscale gradients in its kernel, which does not run over a disk "
            "home: use outsize.AdamW(model), or scaler.unscale_(optimizer) before the step"
        )


def _standing_in(runner: Runner, optimizer: torch.optim.Optimizer) -> AdamW:
    """Return what steps a disk home in the place of an AdamW of torch."""
    _log.info("torch.optim.AdamW steps what rests on disk as outsize.AdamW does: as with fused=True")
    optimizer.register_state_dict_post_hook(pack)
    return AdamW(runner.model, groups=optimizer.param_groups)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a wrapped model to a global norm: bit for bit `torch.nn.utils.clip_grad_norm_`.

    With `outsize.AdamW` gradients are multiplied in its step, unit by unit; else at once.

    Args:
        model: the wrapped model.
        max_norm: largest norm that is left alone, above 0; infinity only takes the norm.
        norm_type: of the norm; another than 2 is torch's own function, at once.
        error_if_nonfinite: whether a norm that is not finite raises.

    Returns:
        The norm before clipping, an fp32 scalar.

    Raises:
        ConfigError: the model is not wrapped.
        NonFiniteError: see ``error_if_nonfinite``; no gradient has changed.
    """
    runner = runner_of(model)
    if norm_type != 2:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite)
    held = runner.held()
    runner.parameters.multiply_gradients(list(runner.parameters.factors))
    norms = _norms(runner, held)
    order = {id(parameter): index for index, parameter in enumerate(iterate_parameters(model))}
    ordered = sorted(norms, key=lambda pair: order[id(runner.parameters.named[pair[0]])])
    total, coefficient = clip_coefficient([norm for _, norm in ordered], max_norm)
    if runner.records is not None:
        runner.records.clipped(total)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteError(f"the gradient norm is {total.item():g}; no gradient was changed")
    if math.isfinite(max_norm):
        runner.parameters.factors.update((name, coefficient) for name, _ in norms)
    if runner.optimizer is None or runner.parameters.links:
        runner.parameters.multiply_gradients(name for name, _ in norms)
    return total


def _norms(runner: Runner, held: dict[int, frozenset[int]]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    home = runner.session.home
    for index, positions in held.items():
        if not positions:
            continue
        unit = runner.split.spec.units[index]
        with Arena() as arena:
            plane = home.lend(index, GRADIENT)
            if plane is None:
                plane = arena.take(unit.numel * 4, GRADIENT).view(torch.float32)
                home.read(index, GRADIENT, 0, plane)
            norms = gradient_norms(unit, plane).cpu()
        found += [(unit.tensors[position].name, norms[position]) for position in sorted(positions)]
    return found
