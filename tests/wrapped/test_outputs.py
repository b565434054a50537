from typing import Any

import pytest
import torch

from outsize.errors import ModelError
from outsize.wrapped.outputs import Joined


def join(outputs: list[Any], sizes: tuple[int, ...], divisors: tuple[float, ...]) -> Joined:
    joined = Joined(sizes, divisors)
    for microbatch, output in enumerate(outputs):
        joined.add(microbatch, output)
    joined.end(lambda value: None)
    return joined


def test_each_kind_of_leaf_is_joined_in_its_way():
    outputs = [
        {
            "loss": torch.tensor(2.0),
            "logits": torch.ones(2, 3),
            "routers": (torch.ones(4, 1),),
            "note": "same",
        },
        {
            "loss": torch.tensor(6.0),
            "logits": torch.zeros(1, 3),
            "routers": (torch.zeros(2, 1),),
            "note": "same",
        },
    ]
    joined = join(outputs, (2, 1), (2.0, 3.0)).build({})
    assert joined["loss"] == 2.0 / 2 + 6.0 / 3
    assert joined["logits"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    assert joined["routers"][0].flatten().tolist() == [1.0] * 4 + [0.0] * 2
    assert joined["note"] == "same"


def test_what_cannot_be_joined_is_kept_where_all_agree_and_none_otherwise():
    table = torch.arange(5.0)
    one, other = ({"table": table, "cache": object(), "shape": torch.zeros(n, n)} for n in (2, 3))
    joined = join([one, {**other, "table": table.clone()}], (2, 2), (1.0, 1.0)).build({})
    assert torch.equal(joined["table"], table)
    assert joined["cache"] is None
    assert joined["shape"] is None


def test_gradients_are_dealt_out_to_the_graphs_of_the_microbatches():
    leaves = [torch.full((rows, 2), 1.0, requires_grad=True) for rows in (2, 1)]
    outputs = [{"loss": (leaf * 2).sum(), "logits": leaf * 3} for leaf in leaves]
    joined = join(outputs, (2, 1), (1.5, 3.0))
    roots = joined.roots([torch.tensor(3.0), torch.arange(6.0).view(3, 2)])
    for edges, gradients in roots.waiting().values():
        torch.autograd.backward(edges, gradients)
    assert leaves[0].grad.tolist() == [[4.0, 7.0], [10.0, 13.0]]  # 2 × 3 / 1.5 + 3 × (0, 1, 2, 3)
    assert leaves[1].grad.tolist() == [[14.0, 17.0]]
    assert joined.roots([None, None]).waiting() == {}


def test_a_microbatch_that_weighs_nothing_gets_no_gradient():
    losses = [torch.tensor(1.0, requires_grad=True) * 1, torch.tensor(float("nan"), requires_grad=True) * 1]
    joined = join([{"loss": loss} for loss in losses], (1, 1), (1.0, float("inf")))
    assert joined.build({})["loss"] == 1.0
    assert set(joined.roots([torch.tensor(1.0)]).waiting()) == {0}


def test_a_microbatch_whose_forward_runs_again_brings_its_graph_then():
    leaves = [torch.ones(1, 2, requires_grad=True) for _ in range(2)]
    outputs = [{"logits": leaf * 3} for leaf in leaves]
    joined = Joined((1, 1), (1.0, 1.0))
    for again, output in enumerate(outputs):
        joined.add(again, output, again=bool(again))
    joined.end(lambda value: None)
    assert joined.differentiable == [0]
    roots = joined.roots([torch.arange(4.0).view(2, 2)])
    assert set(roots.waiting()) == {0}
    torch.autograd.backward(*roots.again(1, {"logits": leaves[1] * 5}))
    assert leaves[0].grad is None
    assert leaves[1].grad.tolist() == [[10.0, 15.0]]


def test_microbatches_of_several_workers_come_in_any_order():
    outputs = [{"loss": torch.tensor(0.1 * m), "logits": torch.full((m, 2), float(m))} for m in (3, 2, 2, 1)]
    sizes, divisors = (3, 2, 2, 1), (0.7, 1.3, 1.1, 3.0)
    want, joined = join(outputs, sizes, divisors).build({}), Joined(sizes, divisors)
    for microbatch in (2, 0, 3, 1):
        joined.add(microbatch, outputs[microbatch])
    joined.end(lambda value: None)
    assert all(torch.equal(value, want[name]) for name, value in joined.build({}).items())


def test_outputs_of_another_form_are_refused():
    with pytest.raises(ModelError, match="microbatches=1"):
        join([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], (1, 1), (1.0, 1.0))
