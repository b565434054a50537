"""Lanes and the caller's loop have streams of their own on a GPU; here both sides write down how they meet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from outsize.compat import torch_private
from outsize.inference.loader import Caller
from outsize.runtime.engine.engine import Engine
from outsize.wrapped.outputs import Joined
from wrapped.loops import wrapped


class Touched(TorchDispatchMode):
    """Notes the memory that operations of this thread have for an argument."""

    def __init__(self, note: Callable[[int], None]):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in torch_private.leaves_of((args, kwargs)):
            if isinstance(value, Tensor):
                self.note(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the caller's stream and the lanes did, in order."""
    events: list[str] = []
    submit = Engine.submit

    def noted(self: Engine, *args: Any) -> Any:
        events.append("lanes begin")
        return submit(self, *args)

    monkeypatch.setattr(Engine, "submit", noted)
    monkeypatch.setattr(Caller, "finish", lambda self: events.append("the caller's stream is done"))
    return events


@pytest.mark.parametrize("count", [1, 2])
def test_no_pass_begins_before_the_callers_stream_is_done(count: int, log: list[str]):
    """Inputs that were sent with non_blocking=True are there, and so are the gradients of outputs."""
    batch = zoo.batch("llama", num_sequences=4)
    with wrapped(zoo.build("llama"), microbatches=count) as model:
        loss = model(**batch).loss
        assert log == ["the caller's stream is done", "lanes begin"]
        loss.backward()
        with torch.no_grad():
            model(**batch)
    assert log == ["the caller's stream is done", "lanes begin"] * 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_lanes_made_is_kept_for_the_callers_stream_before_that_uses_it(
    count: int, monkeypatch: pytest.MonkeyPatch
):
    """Also what is gone as soon as the outputs of microbatches are joined: the losses of each."""
    made: set[int] = set()
    kept: set[int] = set()
    add = Joined.add

    def noted(self: Joined, microbatch: int, output: Any) -> None:
        add(self, microbatch, output)
        for column in self._columns:
            values = column._values.values()
            made.update(v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor))

    def use(place: int) -> None:
        assert place not in made or place in kept

    monkeypatch.setattr(Joined, "add", noted)
    monkeypatch.setattr(Caller, "take", lambda self, value: kept.add(value.untyped_storage().data_ptr()))
    batch = zoo.batch("llama", num_sequences=4)
    with wrapped(zoo.build("llama"), microbatches=count) as model:
        model(**batch).loss.backward()  # planned; what the trial does concerns nobody
        made.clear(), kept.clear()
        with Touched(use):
            model(**batch)
        assert made
        assert made <= kept


class OnDevice(Tensor):
    """A tensor that says it lies on a GPU, and notes the streams it is kept for."""

    device = torch.device("cuda", 1)

    def record_stream(self, stream: Any) -> None:
        self.kept_for = stream


def test_a_caller_keeps_tensors_for_its_stream_of_now(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    caller = Caller(torch.device("cuda", 1))
    tensor = torch.zeros(1).as_subclass(OnDevice)
    caller.take(tensor)
    assert tensor.kept_for == "stream of cuda:1"
    caller.take(torch.zeros(1))
    caller.take("no tensor")
