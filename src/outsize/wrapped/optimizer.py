"""`outsize.AdamW`: the optimizer of a wrapped model, stepped unit by unit at home while the next forward begins."""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outsize.errors import ConfigError
from outsize.optim.adamw import PlaneAdamW as Settings
from outsize.optim.optimizer_spec import EXP_AVG, MASTER
from outsize.storage.home import HostHome
from outsize.wrapped.module import iterate_parameters, runner_of
from outsize.wrapped.moment_forms import as_kept
from outsize.wrapped.runner import Runner

_log = logging.getLogger(__name__)
_SHOWN = 3
_ALIKE = ("lr", "betas", "eps")


class AdamW(torch.optim.Optimizer):
    """AdamW on the home of a wrapped model: bit for bit ``torch.optim.AdamW(fused=True)`` on fp32 weights.

    So it is with moments in fp32. `outsize.wrap` with ``state="bf16"`` or ``"int8"`` keeps them in fewer bits.

    `step` returns at once. Each unit's next load waits for its own step; ``model.parameters()``, ``state_dict()`` and
    saving wait for all of them, and so does `settle`, for those who look at parameters that they have kept.

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
        self._names = {id(p): name for name, p in self._runner.parameters_now().named.items()}
        self.without_gradient: tuple[str, ...] = ()
        self._told: set[str] = set()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(list(iterate_parameters(model)) if groups is None else list(groups), defaults)
        self._tell()

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
        names = frozenset(self._names[id(p)] for group in self.param_groups for p in group["params"])
        self.without_gradient = self._runner.step(float(self.param_groups[0]["lr"]), names)
        fresh = [name for name in self.without_gradient if name not in self._told]
        if fresh:
            more = f" and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else ""
            _log.warning("no gradient in a whole step, left alone: %s%s", ", ".join(fresh[:_SHOWN]), more)
            self._told.update(fresh)
        return loss

    def settle(self) -> None:
        """Return when the step under way is done."""
        self._runner.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        at_rest = not isinstance(self._runner.session.home, HostHome)
        if not set_to_none and not at_rest:
            self._runner.settle()
        super().zero_grad(set_to_none=set_to_none or at_rest)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups in the form of ``torch.optim.AdamW``: ``step``, ``exp_avg``, ``exp_avg_sq``.

        Where weights are bf16 or fp16 there is a ``master`` as well, fp32, which no ``state_dict`` of the model has.
        Moments are as they are kept, see `outsize.wrap`: with ``state="int8"`` codes, and scales beside them. Over a
        disk home all of it is read into memory.
        """
        self._runner.settle()
        updates = self._runner.updates
        planes = self._planes() if any(updates.values()) else ()
        moments = {plane: dict(self._values(plane)) for plane in planes}
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                if updates.get(name):
                    self.state[parameter] = {
                        "step": torch.tensor(float(updates[name])),
                        **{plane: values[name] for plane, values in moments.items()},
                    }
        packed = super().state_dict()
        self.state.clear()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state and groups from what `state_dict`, or that of ``torch.optim.AdamW``, returned.

        Masters count where they round to the weights that the model has at the next step. Moments of another form than
        this model's are rounded to the nearest.

        Raises:
            ValueError: it is of other groups.
        """
        self._runner.settle()
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(saved) != len(parameters):
            raise ValueError(f"the state is of {len(saved)} parameters, this optimizer has {len(parameters)}")
        super().load_state_dict({**state_dict, "state": {}})
        state = {
            self._names[id(parameter)]: as_kept(state_dict["state"][number], self._runner.state.moments)
            for number, parameter in zip(saved, parameters, strict=True)
            if number in state_dict["state"]
        }
        self._runner.set_updates({name: int(values["step"]) for name, values in state.items()})
        for unit in self._runner.split.spec.units:
            for plane in self._planes():
                mine = {
                    t.name: state[t.name][plane]
                    for t in unit.tensors
                    if t.trainable and plane in state.get(t.name, {})
                }
                if mine:
                    self._runner.parameters.write(unit, mine, plane)
        self._tell()

    def _planes(self) -> tuple[str, ...]:
        """The planes of a unit that a state has."""
        planes = self._runner.state.planes
        moments = tuple(name for name in planes if name.startswith(EXP_AVG))
        return (*moments, MASTER) if MASTER in planes else moments

    def _values(self, plane: str) -> Iterable[tuple[str, Tensor]]:
        return self._runner.parameters.values(self._runner.split.spec.units, plane)

    def _tell(self) -> None:
        """Check the groups, and have the engine step with their settings."""
        first = self.param_groups[0]
        if any(group[key] != first[key] for group in self.param_groups for key in _ALIKE):
            raise ConfigError(
                "outsize.AdamW has one lr, betas and eps for all groups; only weight_decay may be 0 in some"
            )
        decays = {float(group["weight_decay"]) for group in self.param_groups} - {0.0}
        if len(decays) > 1:
            raise ConfigError(f"outsize.AdamW has one weight_decay besides 0, not {sorted(decays)}")
        strangers = [p for group in self.param_groups for p in group["params"] if id(p) not in self._names]
        if strangers:
            raise ConfigError("a parameter group holds parameters that are not those of this wrapped model")
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


def round_gradients_for_others(runner: Runner) -> None:
    """Give each optimizer but `AdamW`, when it steps, gradients in the dtype of the weights: most take no others.

    Rounded so, they are those of a plain backward where a step is one microbatch.
    """
    known = weakref.ref(runner)

    def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        still = known()
        if still is not None and not isinstance(optimizer, AdamW):
            still.parameters.round_gradients(p for group in optimizer.param_groups for p in group["params"])

    weakref.finalize(runner, register_optimizer_step_pre_hook(begin).remove)
