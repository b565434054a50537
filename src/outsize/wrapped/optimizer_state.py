"""The state of an optimizer of a wrapped model, the forms of its moments, and how torch carries it unrounded."""

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor

from outsize.checkpoint.checkpoint_state import plane_of
from outsize.choices import Moments
from outsize.errors import ConfigError, ModelError
from outsize.model.shared_memory import check_apart
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import (
    BLOCK_ELEMENTS,
    EXP_AVG,
    EXP_AVG_SCALES,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALES,
    MASTER,
)
from outsize.optim.split_masters import EXP_AVG_FORM, EXP_AVG_SQ_FORM, from_codes, to_codes
from outsize.wrapped.at_home.at_rest import AtRest, Place, is_same
from outsize.wrapped.runner import Runner

_log = logging.getLogger(__name__)
STEP = "step"
# Beside the numbers of the parameters in a ``state_dict``: what torch's ``load_state_dict`` leaves as it is.
EXACT = "outsize"


def pack(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` from which torch's ``load_state_dict`` loses nothing.

    It rounds the state of a parameter to the dtype of that, masters as well. What it would change stands under `EXACT`
    as well, by number and key; files hold a tensor once.
    """
    if EXACT in packed["state"]:  # loaded, and not stepped since
        return packed
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: dict(values) for number, values in packed["state"].items()}
    exact = {
        f"{number}.{key}": value
        for number, values in state.items()
        for key, value in values.items()
        if key != STEP and value.dtype != parameters[number].dtype
    }
    return {**packed, "state": {**state, EXACT: exact} if exact else state}


def before_rounding(
    state: Mapping[Any, Any], parameters: Iterable[Tensor]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of each parameter that has one, as `pack` packed it where it is that, rounded.

    Args:
        state: of an optimizer, perhaps as torch's ``load_state_dict`` left it.
        parameters: of the optimizer, in order.
    """
    exact, loaded = state.get(EXACT, {}), {}
    for number, parameter in enumerate(parameters):
        if parameter in state:
            loaded[parameter] = values = dict(state[parameter])
            for key, value in values.items():
                unrounded = exact.get(f"{number}.{key}")
                if unrounded is not None and torch.equal(unrounded.to(value), value):
                    values[key] = unrounded
    rounded = [v[MASTER].dtype for v in loaded.values() if MASTER in v and v[MASTER].dtype != torch.float32]
    if rounded:
        _log.warning(
            "masters and moments that were loaded are in %s, as torch.optim.AdamW.load_state_dict rounds them: this "
            "run goes on from those, and not bit for bit; go on from what outsize.AdamW saved with outsize.AdamW",
            str(rounded[0]).removeprefix("torch."),
        )
    return loaded


_KEPT = {EXP_AVG: (EXP_AVG_SCALES, EXP_AVG_FORM), EXP_AVG_SQ: (EXP_AVG_SQ_SCALES, EXP_AVG_SQ_FORM)}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
# Of the 16 bits of a chance, half: what is rounded by it goes to the nearest.
_HALF = 0x8000


def as_kept(values: Mapping[str, Tensor], moments: Moments) -> dict[str, Tensor]:
    """Return the state of a parameter with its moments in the form ``moments``.

    A ``state_dict`` has moments as they are kept: fp32, bf16, or codes of 8 bits beside the exponents of their blocks,
    so that what is loaded goes on bit for bit. One of another form, ``torch.optim.AdamW``'s say, is rounded to the
    nearest.

    Args:
        values: ``exp_avg`` and ``exp_avg_sq`` of the shape of the parameter, where they are codes with
            ``exp_avg_scales`` and ``exp_avg_sq_scales`` (one byte for 64 elements); and whatever else there is.
        moments: the form.
    """
    found = dict(values)
    for name, (scales, form) in _KEPT.items():
        if name not in found or found[name].dtype is _DTYPES[moments]:
            continue
        # A file may have been read onto a GPU; the home is in host memory or on disk.
        given, tops = found[name].cpu(), found.pop(scales, None)
        exact = given.float() if tops is None else from_codes(given.reshape(-1), tops.cpu(), form)
        exact = exact.reshape(given.shape)
        found[name] = exact.to(_DTYPES[moments])
        if moments == "int8":
            flat = exact.reshape(-1).contiguous()
            found[scales] = torch.empty(-(-flat.numel() // BLOCK_ELEMENTS), dtype=torch.uint8)
            codes = torch.empty(flat.numel(), dtype=torch.uint8)
            chance = torch.full((flat.numel(),), _HALF, dtype=torch.int32)
            to_codes(flat, chance, form, codes, found[scales])
            found[name] = codes.view(exact.shape)
    return found


# What `sys.getrefcount` counts of an element that nobody else has.
_UNHELD = 2


class StateAtHome(MutableMapping[Tensor, MutableMapping[str, Tensor]]):
    """The state of the parameters of an optimizer.

    It is ``optimizer.state`` of `outsize.AdamW`: what rests at home, under the keys that ``torch.optim.AdamW`` has.
    Moments are looked at and changed where they rest; ``step`` is a number of its own, and what somebody writes into it
    counts in the next step. A tensor that is put in is the state from then on: as long as the program holds it, what
    it changes there counts, and steps show there. To take the state of a parameter out lets it begin anew.

    Args:
        runner: of the wrapped model.
        parameters: returns those of the optimizer.
    """

    def __init__(self, runner: Runner, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._runner = runner
        self._parameters = parameters
        self._places: dict[str, tuple[UnitSpec, TensorSpec]] = {}
        self._split: object = None  # what the places are of
        # What was handed out and what it was, by id of parameter.
        self._steps: dict[int, tuple[Tensor, int]] = {}
        # What is handed out as state, or was put in, by name and plane: one object, as in torch.
        self._seen: dict[tuple[str, str], Tensor] = {}
        self._handed: weakref.WeakValueDictionary[tuple[str, str], Place] = weakref.WeakValueDictionary()

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes of a unit that a state has."""
        planes = self._runner.state.planes
        moments = tuple(name for name in planes if name.startswith(EXP_AVG))
        return (*moments, MASTER) if MASTER in planes else moments

    def begin_anew(self, names: frozenset[str]) -> None:
        """Let moments and counts of these begin at zero; masters stay, since they are the weights."""
        self._runner.settle()
        stepped = frozenset(name for name in names if self._runner.num_updates(name))
        if stepped:
            self._zero(stepped, [plane for plane in self.planes if plane != MASTER])
            self._set_steps(dict.fromkeys(stepped, 0))

    def follow(self) -> None:
        """Count on from what was written into ``step``, and take what moments were assigned by ``.data`` since.

        Raises:
            ModelError: the state of two parameters lies in one memory.
        """
        for key in list(self._steps):
            self._follow(self._runner.parameters.names[key])
        for name, _ in list(self._seen)[:1]:
            self._place(name)  # where units are others by now, what was seen is forgotten
        check_apart({f"{plane} of {name}": each for (name, plane), each in self._seen.items()}, "state")
        for seen in list(self._seen):
            if isinstance(self._seen[seen], AtRest):
                self._check_own(seen)
            else:
                self._replace(*seen, self._seen[seen], given=True)
            if sys.getrefcount(self._seen[seen]) <= _UNHELD:
                del self._seen[seen]

    def let_go(self) -> None:
        """Let go of what was put in and the program holds no longer; what it assigned by ``.data`` is for `follow`."""
        links = self._runner.parameters.links
        for each in links.keys() & self._seen.keys():
            if sys.getrefcount(self._seen[each]) <= _UNHELD and is_same(self._seen[each], links[each]):
                del self._seen[each]

    def show_steps(self) -> None:
        """Have what the program holds as ``step`` show the counts behind a step."""
        steps = self._steps
        self._steps = {key: steps[key] for key in steps if sys.getrefcount(steps[key][0]) > _UNHELD}
        if self._steps:
            self._runner.settle()
            names = self._runner.parameters.names
            self._set_steps({names[key]: self._runner.num_updates(names[key]) for key in self._steps})

    def put(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Replace the state of the parameter of that name; moments of another form are rounded to the nearest.

        Raises:
            ConfigError: it holds what this optimizer does not have.
        """
        kept = as_kept(values, self._runner.state.moments)
        if kept and (STEP not in kept or kept.keys() - {STEP, *self.planes}):
            raise ConfigError(
                f"the state of {name} holds {', '.join(sorted(values))}; that of outsize.AdamW is "
                f"{', '.join((STEP, *self.planes))}"
            )
        if not kept:
            self.begin_anew(frozenset({name}))
            return
        self._runner.settle()
        self._place(name)
        self._zero({name}, [plane for plane in self.planes if plane not in kept and plane != MASTER])
        self.write(name, values)

    def write(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Replace what is given of the state of the parameter of that name."""
        for plane, value in as_kept(values, self._runner.state.moments).items():
            if plane == STEP:
                self._set_steps({name: int(value)})
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._steps[self._key(name)] = value, int(value)
            else:
                self._replace(name, plane, value, given=values.get(plane) is value)

    def _replace(self, name: str, plane: str, value: Tensor, *, given: bool) -> None:
        """Replace a plane of the state; where the program has ``given`` the value, that is the state from then on."""
        present = self._at_home(name, plane)
        if is_same(value, present):
            return
        if value.shape != present.shape:
            raise ConfigError(
                f"{plane} of {name} has sizes {list(present.shape)}; what was put in has {list(value.shape)}"
            )
        del present
        self._part(name, plane)
        self._runner.parameters.write(self._place(name)[0], {name: value}, plane)
        if given:
            self._runner.parameters.link(name, value, plane)
            self._seen[name, plane] = value

    def _zero(self, names: Collection[str], planes: Collection[str]) -> None:
        """Have planes of the state of these names begin anew."""
        for name in names:
            for plane in planes:
                self._part(name, plane)
        self._runner.parameters.begin_state(names, planes)

    def _part(self, name: str, plane: str) -> None:
        """Leave what is at home, which is about to be replaced, to whoever holds it."""
        self._seen.pop((name, plane), None)
        self._runner.parameters.unlink(name, plane)
        place = self._handed.pop((name, plane), None)
        if place is not None:
            place.part()
        self._runner.parameters.handed_out.part_one(f"{plane} of {name}")

    def _at_home(self, name: str, plane: str) -> Tensor:
        """One tensor of the state as it can be looked at and changed."""
        unit, _ = self._place(name)
        tensor = next(t for t in plane_of(self._runner.state, unit, plane).tensors if t.name == name)
        return self._runner.parameters.at_rest(unit, tensor, plane)

    def _shown(self, name: str, plane: str) -> Tensor:
        """The one object that the program is handed of that."""
        key = name, plane
        if key not in self._seen or isinstance(self._seen[key], AtRest):
            made = self._at_home(name, plane)
            if key in self._seen and is_same(self._seen[key], made):
                return self._seen[key]
            if isinstance(made, AtRest):
                made.moved(self._handed.setdefault(key, made.place))
            self._seen[key] = made
        return self._seen[key]

    def _check_own(self, key: tuple[str, str]) -> None:
        """Check that what was put in as the state of one parameter is not that of another one."""
        seen = cast(AtRest, self._seen[key])
        for other, place in self._handed.items():
            if other != key and place.key == seen.place.key:
                raise ModelError(
                    f"{key[1]} of {key[0]} was given that of {other[0]}, and would lie in one memory with it: give "
                    "its clone()"
                )

    def of(self, name: str) -> dict[str, Tensor]:
        """The state of the parameter of that name: nothing before its first step."""
        self._runner.settle()
        self._follow(name)
        count = self._runner.num_updates(name)
        if not count:
            return {}
        key = self._key(name)
        if key not in self._steps:
            self._steps[key] = torch.tensor(float(count)), count
        return {STEP: self._steps[key][0]} | {plane: self._shown(name, plane) for plane in self.planes}

    def __getitem__(self, parameter: Tensor) -> MutableMapping[str, Tensor]:
        self.name_of(parameter)
        return _StateOfOne(self, parameter)

    def __setitem__(self, parameter: Tensor, values: Mapping[str, Tensor]) -> None:
        if not (isinstance(values, _StateOfOne) and values.owner is self):
            self.put(self.name_of(parameter), values)

    def __delitem__(self, parameter: Tensor) -> None:
        self.begin_anew(frozenset({self.name_of(parameter)}))

    def __contains__(self, parameter: object) -> bool:
        return any(own is parameter for own in self)

    def __iter__(self) -> Iterator[Tensor]:
        self._runner.settle()
        return iter([own for own in self._parameters() if self._runner.num_updates(self.name_of(own))])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def clear(self) -> None:
        """Let all of it begin anew."""
        self.begin_anew(frozenset(self.name_of(own) for own in self._parameters()))

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter as it is by now: those around adapters change."""
        names = self._runner.parameters.names
        if id(parameter) not in names:
            raise KeyError("this parameter is none of the wrapped model")
        return names[id(parameter)]

    def _key(self, name: str) -> int:
        return id(self._runner.parameters.named[name])

    def _place(self, name: str) -> tuple[UnitSpec, TensorSpec]:
        if self._split is not self._runner.split:
            self._split = self._runner.split
            self._seen.clear()
            units = self._runner.split.spec.units
            self._places = {tensor.name: (unit, tensor) for unit in units for tensor in unit.tensors}
        if name not in self._places or self._places[name][0].index not in self._runner.parameters.with_state:
            raise ConfigError(
                f"{name} is frozen, and has no state at home; requires_grad_(True) gives it room from the next call on"
            )
        return self._places[name]

    def _follow(self, name: str) -> None:
        held, then = self._steps.get(self._key(name), (None, 0))
        if held is not None and int(held) != then:
            self._set_steps({name: int(held)})

    def _set_steps(self, counts: Mapping[str, int]) -> None:
        self._runner.set_updates(counts)
        for name, count in counts.items():
            key = self._key(name)
            if key in self._steps:
                held, _ = self._steps[key]
                self._steps[key] = held.fill_(count), count


class _StateOfOne(MutableMapping[str, Any]):
    """The state of one parameter."""

    def __init__(self, owner: StateAtHome, parameter: Tensor) -> None:
        self.owner = owner
        self._parameter = parameter

    @property
    def _name(self) -> str:
        return self.owner.name_of(self._parameter)

    def __getitem__(self, key: str) -> Tensor:
        return self.owner.of(self._name)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        present = self.owner.of(self._name)
        if not present and key != STEP:
            raise ConfigError(f"{self._name} has no state before its first step; set all of it together")
        if key != STEP and key not in self.owner.planes:
            raise ConfigError(
                f"the state of {self._name} has {', '.join((STEP, *self.owner.planes))}, and no {key}"
            )
        if present.get(key) is not value:
            self.owner.write(self._name, {key: torch.as_tensor(value)})

    def __delitem__(self, key: str) -> None:
        raise ConfigError(f"{key} alone cannot be taken out of the state of {self._name}; take all of it out")

    def __iter__(self) -> Iterator[str]:
        return iter(self.owner.of(self._name))

    def __len__(self) -> int:
        return len(self.owner.of(self._name))

    def clear(self) -> None:
        """Let it begin anew."""
        self.owner.begin_anew(frozenset({self._name}))
