import threading

import greenlet
import pytest
import torch
from torch import nn

from outsize.errors import ModelError
from outsize.model.walk import Boundaries, Finished, UnitCall, Walk


class Chain(nn.Module):
    """Two units with code of its own before, between and after them."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = nn.Linear(2, 2)
        self.unwound = False

    def forward(self, x, *, scale=1.0):
        try:
            x = self.one(x * scale)
            return self.two(x + 1) * 2
        except greenlet.GreenletExit:
            self.unwound = True
            raise


@pytest.fixture
def chain():
    model = Chain()
    with Boundaries((model.one, model.two)) as boundaries:
        yield model, boundaries


def test_a_walk_pauses_at_each_unit_and_goes_on_with_what_it_is_given(chain):
    model, _ = chain
    x = torch.ones(1, 2)
    walk = Walk(model, {"x": x, "scale": 3.0})
    first = walk.advance()
    assert isinstance(first, UnitCall)
    assert first.unit == 0
    assert torch.equal(first.args[0], 3 * x)
    second = walk.advance(torch.tensor([[5.0, 7.0]]))
    assert second.unit == 1
    assert torch.equal(second.args[0], torch.tensor([[6.0, 8.0]]))
    ending = walk.advance(torch.tensor([[1.0, 2.0]]))
    assert isinstance(ending, Finished)
    assert torch.equal(ending.output, torch.tensor([[2.0, 4.0]]))
    with pytest.raises(ModelError, match="already returned"):
        walk.advance()


def test_arguments_pass_as_the_model_made_them(chain):
    model, _ = chain
    marker = object()
    model.forward = lambda **_: model.one(marker, [1, None], flag=True, nested={"a": (marker,)})
    call = Walk(model, {}).advance()
    assert call == UnitCall(0, (marker, [1, None]), {"flag": True, "nested": {"a": (marker,)}})


def test_walks_of_several_microbatches_do_not_disturb_each_other(chain):
    model, boundaries = chain
    inputs = [torch.full((1, 2), float(m)) for m in range(3)]
    walks = [Walk(model, {"x": x}) for x in inputs]
    calls = [walk.advance() for walk in walks]
    for forward in boundaries.forwards:  # unit by unit, over all microbatches
        calls = [
            walk.advance(forward(*call.args, **call.kwargs)) for walk, call in zip(walks, calls, strict=True)
        ]
    boundaries.close()
    for x, ending in zip(inputs, calls, strict=True):
        assert torch.equal(ending.output, model(x))


def test_a_boundary_outside_a_walk_is_the_unit_itself(chain):
    model, boundaries = chain
    x = torch.ones(1, 2)
    inside = model(x)
    boundaries.close()
    assert torch.equal(model(x), inside)


def test_closing_gives_back_exactly_what_was_there():
    model = Chain()
    model.two.forward = own = lambda x: x
    boundaries = Boundaries((model.one, model.two))
    assert "forward" in vars(model.one)
    boundaries.close()
    boundaries.close()
    assert "forward" not in vars(model.one)
    assert model.two.forward is own


def test_what_the_model_raises_comes_out_and_ends_the_walk(chain):
    model, _ = chain
    walk = Walk(model, {"x": torch.ones(1, 2)})
    walk.advance()
    with pytest.raises(TypeError):
        walk.advance("not a tensor")
    with pytest.raises(ModelError, match="already returned"):
        walk.advance()


def test_closing_a_walk_unwinds_the_forward(chain):
    model, _ = chain
    walk = Walk(model, {"x": torch.ones(1, 2)})
    walk.advance()
    walk.close()
    walk.close()
    assert model.unwound


def test_a_walk_that_never_began_closes():
    model = Chain()
    Walk(model, {"x": torch.ones(1, 2)}).close()
    assert not model.unwound


def test_a_module_called_inside_a_unit_does_not_pause():
    """Units run outside the walk: what they call is their own business, even another unit's module."""
    model = Chain()
    model.one.inner = model.two
    with Boundaries((model.one, model.two)) as boundaries:
        walk = Walk(model, {"x": torch.ones(1, 2)})
        call = walk.advance()
        assert isinstance(boundaries.forwards[1](*call.args), torch.Tensor)
        assert isinstance(model.two(*call.args), torch.Tensor)
        walk.close()


def test_a_walk_belongs_to_the_thread_that_began_it(chain):
    model, _ = chain
    walk = Walk(model, {"x": torch.ones(1, 2)})
    walk.advance()
    raised = []

    def elsewhere():
        try:
            walk.advance(torch.ones(1, 2))
        except (greenlet.error, ValueError) as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert raised
    walk.close()
