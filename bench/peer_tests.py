"""Runs the tests of other libraries over wrapped models: a plugin of pytest.

In a checkout of TRL, PEFT, accelerate, Lightning or transformers, at the version that is installed::

    PYTHONPATH=OUTSIZE/bench python -m pytest -p peer_tests --wrap trainer tests/test_sft_trainer.py

The last lines count the tests in which a model was wrapped, and name those that failed; one that fails without
``--wrap`` as well says nothing about a wrapped model. Tests fit models of one layer, in which there is nothing to
stream: ``--two-blocks MODULE:CLASS`` puts two blocks that add nothing before it, plain and wrapped.
"""

import functools
import importlib
import json
import types
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.wrapped.module import is_wrapped

ARGUMENTS = {"device": "cpu", "device_memory": "256MiB", "home": "host"}


class Count:
    """Outcomes of tests that wrap, and how deep in calls that make models: what they make on the way is not wrapped."""

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments
        self.depth = 0
        self.has_wrapped = False
        self.outcomes: dict[str, str] = {}

    def wrap(self, model: Any) -> Any:
        """Wrap ``model`` where it is a module that a test made, and return it."""
        if isinstance(model, nn.Module) and not is_wrapped(model) and not self.depth:
            self.has_wrapped = True  # a refusal counts as well
            self.within(outsize.wrap, model, **self.arguments)
        return model

    def within(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``make``, and wrap nothing meanwhile."""
        self.depth += 1
        try:
            return make(*args, **kwargs)
        finally:
            self.depth -= 1

    def then_wrap(self, make: Callable[..., Any], kind: type = nn.Module) -> Callable[..., Any]:
        """Return ``make`` so that what it returns, or the first of it, is wrapped where it is of ``kind``."""

        @functools.wraps(make)
        def make_wrapped(*args: Any, **kwargs: Any) -> Any:
            made = self.within(make, *args, **kwargs)
            model = made[0] if isinstance(made, tuple) else made
            if isinstance(model, kind):
                self.wrap(model)
            return made

        return make_wrapped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wrap",
        choices=sorted(WRAPS),
        help="what is wrapped: what Trainer is given, what PEFT returns, what accelerator.prepare or Lightning's "
        "trainer is given, a model of transformers as its test first calls train() or eval()",
    )
    parser.addoption(
        "--wrap-arguments", type=json.loads, default={}, help="more arguments of outsize.wrap, as JSON"
    )
    parser.addoption(
        "--two-blocks", action="append", default=[], help="MODULE:CLASS, as tests.test_accelerator:Linear"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNT] = count = Count(ARGUMENTS | config.getoption("--wrap-arguments"))
    for text in config.getoption("--two-blocks"):
        module, _, name = text.partition(":")
        give_blocks(importlib.import_module(module), name)
    kind = config.getoption("--wrap")
    if kind:
        WRAPS[kind](count)


COUNT = pytest.StashKey[Count]()


# --- where models are wrapped -----------------------------------------------------------------------------------------


def in_trainer(count: Count) -> None:
    """What `transformers.Trainer` is given: TRL's trainers have added their adapters by then."""
    from transformers import Trainer

    begin = Trainer.__init__

    @functools.wraps(begin)
    def begin_wrapped(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        begin(self, count.wrap(model), *args, **kwargs)

    Trainer.__init__ = begin_wrapped


def in_peft(count: Count) -> None:
    """What `get_peft_model` and `PeftModel.from_pretrained` return."""
    import peft

    peft.get_peft_model = peft.mapping_func.get_peft_model = count.then_wrap(peft.get_peft_model)
    peft.PeftModel.from_pretrained = classmethod(count.then_wrap(peft.PeftModel.from_pretrained.__func__))


def in_prepare(count: Count) -> None:
    """Modules that `accelerator.prepare` is given."""
    from accelerate import Accelerator

    prepare = Accelerator.prepare

    @functools.wraps(prepare)
    def prepare_wrapped(self: Any, *objects: Any, **kwargs: Any) -> Any:
        return prepare(self, *map(count.wrap, objects), **kwargs)

    Accelerator.prepare = prepare_wrapped


def in_lightning(count: Count) -> None:
    """Modules with two blocks, or sequences with one of them, in what Lightning's trainer is given."""
    import lightning.pytorch

    def verb_wrapped(verb: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(verb)
        def run_wrapped(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
            for child in model.children() if isinstance(model, nn.Module) else ():
                if any(isinstance(part, Still) for part in child.modules()):
                    count.wrap(child)
            return verb(self, model, *args, **kwargs)

        return run_wrapped

    for name in ("fit", "validate", "test", "predict"):
        setattr(lightning.pytorch.Trainer, name, verb_wrapped(getattr(lightning.pytorch.Trainer, name)))


def in_build(count: Count) -> None:
    """Models of transformers that a test builds or loads, as they are first put into a mode."""
    from transformers import PreTrainedModel

    nn.Module.train = count.then_wrap(nn.Module.train, PreTrainedModel)
    PreTrainedModel.from_pretrained = classmethod(count.then_wrap(PreTrainedModel.from_pretrained.__func__))


WRAPS = {
    "trainer": in_trainer,
    "peft": in_peft,
    "prepare": in_prepare,
    "lightning": in_lightning,
    "build": in_build,
}


# --- models of one layer ----------------------------------------------------------------------------------------------


class Still(nn.Module):
    """A block that returns its input, and has a weight that trains and stays at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden * self.w * 0.0


def with_blocks(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class like ``kind`` whose first tensor goes through two blocks before."""

    class Blocked(kind):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.layers = nn.ModuleList([Still(), Still()])

        def forward(self, first: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            name = next(iter(kwargs)) if first is None else ""
            hidden = kwargs.pop(name) if first is None else first
            for layer in self.layers:
                hidden = layer(hidden)
            return super().forward(hidden, *args, **kwargs)

    Blocked.__name__, Blocked.__qualname__, Blocked.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    return Blocked


def give_blocks(module: types.ModuleType, name: str) -> None:
    """Have ``module`` mean by ``name``, a class of its own or one of `torch.nn`, a class with two blocks."""
    if hasattr(module, name):
        setattr(module, name, with_blocks(getattr(module, name)))
        return
    layers = seen_through(nn, **{name: with_blocks(getattr(nn, name))})
    module.__dict__.update(torch=seen_through(torch, nn=layers), nn=layers)


def seen_through(module: types.ModuleType, **others: Any) -> types.ModuleType:
    """Return a module with the attributes of ``module``, but for ``others``."""
    view = types.ModuleType(module.__name__)
    view.__dict__.update(others, __getattr__=functools.partial(getattr, module))
    return view


# --- what became of the tests -----------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.config.stash[COUNT].has_wrapped = False
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    count = item.config.stash[COUNT]
    if count.has_wrapped and report.when == "call":
        count.outcomes[item.nodeid] = report.outcome
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes = config.stash[COUNT].outcomes
    num_passed = sum(outcome == "passed" for outcome in outcomes.values())
    terminalreporter.write_line(f"over wrapped models: {num_passed} of {len(outcomes)} tests passed")
    for name, outcome in outcomes.items():
        if outcome != "passed":
            terminalreporter.write_line(f"  {outcome}: {name}")
