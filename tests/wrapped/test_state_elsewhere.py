"""Units that count their calls where no module holds the count: each forward counts once, and a recompute never."""

import types
from collections import Counter
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outsize.errors import ModelError
from wrapped.loops import wrapped
from wrapped.test_side_effects import EVERY_WAY, SETTINGS, Block, Net, X, compare, square, step

# What is there before, and how a call is counted.
PLACES = {
    "number": ("n = 0", "global n; n += 1"),
    "dict": ("seen = {'n': 0}", "seen['n'] += 1; n = seen['n']"),
    "list": ("seen = []", "seen.append(0); n = len(seen)"),
    "Counter": ("seen = Counter()", "seen['n'] += 1; n = seen['n']"),
    "tensor": ("seen = torch.zeros(())", "seen.add_(1); n = float(seen)"),
    "array": ("seen = np.zeros(1)", "seen[0] += 1; n = float(seen[0])"),
    "object": ("class Seen: pass\nseen = Seen(); seen.n = 0", "seen.n += 1; n = seen.n"),
    "namespace": ("seen = types.SimpleNamespace(n=0)", "seen.n += 1; n = seen.n"),
    "helper": ("n = 0\ndef count():\n    global n\n    n += 1\n    return n", "n = count()"),
    "helper of a helper": (
        "seen = []\ndef add(): seen.append(0)\ndef count():\n    add()\n    return len(seen)",
        "n = count()",
    ),
    "attribute of a function": (
        "def count():\n    count.n += 1\n    return count.n\ncount.n = 0",
        "n = count()",
    ),
    "default": ("def count(seen=[]):\n    seen.append(0)\n    return len(seen)", "n = count()"),
    "class": ("", "type(self).n = getattr(type(self), 'n', 0) + 1; n = self.n"),
    "another class": ("class Seen: n = 0", "Seen.n += 1; n = Seen.n"),
    "list of a class": ("class Seen: all = []", "Seen.all.append(0); n = len(Seen.all)"),
    "class that another comes from": (
        "class Seen: n = 0\nclass Below(Seen): pass",
        "Below.__base__.n += 1; n = Below.n",
    ),
    "class within a class": ("class Seen:\n    class Inner: n = 0", "Seen.Inner.n += 1; n = Seen.Inner.n"),
    "kind of dict": ("class Seen(dict): pass\nseen = Seen(n=0)", "seen['n'] += 1; n = seen['n']"),
    "kind of list": ("class Seen(list): pass\nseen = Seen()", "seen.append(0); n = len(seen)"),
    "kind of set": ("class Seen(set): pass\nseen = Seen()", "seen.add(len(seen)); n = len(seen)"),
    "kind of ordered dict": (
        "from collections import OrderedDict\nclass Seen(OrderedDict): pass\nseen = Seen(n=0)",
        "seen['n'] += 1; seen[len(seen)] = 0; seen.move_to_end('n'); n = seen['n'] + len(list(seen))",
    ),
    "static method": (
        "class Seen:\n    n = 0\n    @classmethod\n    def count(cls):\n        cls.n += 1\n        return cls.n",
        "n = Seen.count()",
    ),
    "module": ("other = types.ModuleType('other'); other.n = 0", "other.n += 1; n = other.n"),
    "closure": (
        "def make():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n        return n\n"
        "    return count\ncount = make()",
        "n = count()",
    ),
}


def counting(place: str) -> type[Block]:
    """Return a kind of block that scales what it adds by how often blocks were called; nobody has called it yet."""
    setup, count = PLACES[place]
    module = types.ModuleType("own")
    vars(module).update(Block=Block, Counter=Counter, np=np, torch=torch, types=types)
    text = (
        f"{setup}\nclass Counting(Block):\n    def forward(self, x):\n        {count}\n"
        "        return x + self.change(x) * (1 + n / 8)\n"
    )
    exec(text, vars(module))
    made: type[Block] = module.Counting
    return made


@pytest.mark.parametrize("place", PLACES)
def test_calls_that_are_counted_elsewhere_are_counted_once(place: str):
    kinds = [counting(place), counting(place)]  # of the plain model, of the wrapped one
    compare(lambda: Net(kinds.pop()), SETTINGS[1], batches=3)


@pytest.mark.parametrize("place", ["number", "closure", "class", "array"])
def test_a_batch_goes_whole_where_calls_are_counted(place: str):
    plain, model = Net(counting(place)), Net(counting(place))
    model.load_state_dict(plain.state_dict())
    want = step(plain, square, batches=2)
    with wrapped(model, **SETTINGS[1], microbatches=2):
        assert step(model, square, batches=2) == want


SCALE = ContextVar("scale", default=1.0)


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x) * SCALE.get()


class Setting(Block):
    def forward(self, x: Tensor) -> Tensor:
        SCALE.set(SCALE.get() + 1)
        return x + self.change(x) * SCALE.get()


@EVERY_WAY
def test_context_variables_of_the_caller_are_read_and_a_layer_that_sets_one_is_refused(
    settings: dict[str, Any],
):
    token = SCALE.set(3.0)
    try:
        compare(lambda: Net(Scaled), settings)
        with (
            wrapped(Net(Setting), **settings) as model,
            pytest.raises(ModelError, match="context variable 'scale'"),
        ):
            model(X)
    finally:
        SCALE.reset(token)


class Around(Net):
    """Sets a variable around its layers, which read it; ``leaves`` it set, or sets it to a tensor with a gradient."""

    def __init__(self, leaves: str = ""):
        super().__init__(Scaled)
        self.leaves = leaves

    def forward(self, x: Tensor) -> Any:
        token = SCALE.set(self.head.weight.sum() if self.leaves == "gradient" else 3.0)  # type: ignore[arg-type]
        output = super().forward(x)
        if not self.leaves:
            SCALE.reset(token)
        return output


@EVERY_WAY
def test_context_variables_of_outer_code_are_read_by_layers(settings: dict[str, Any]):
    compare(Around, settings)


@pytest.mark.parametrize("leaves", ["set", "gradient"])
def test_context_variables_that_would_not_arrive_are_refused(leaves: str):
    token = SCALE.set(1.0)
    try:
        with (
            wrapped(Around(leaves), **SETTINGS[1]) as model,
            pytest.raises(ModelError, match="context variable"),
        ):
            step(model, square)
    finally:
        SCALE.reset(token)
