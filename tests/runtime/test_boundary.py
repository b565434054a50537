import pytest
import torch

from outsize.runtime.forward.unit_visit import Gradients, cut, hand_out, is_differentiable


def test_what_is_handed_out_is_the_same_values_in_the_same_nesting():
    outputs = (torch.ones(2), {"a": [torch.arange(3), None, "text"], "b": 4})
    box = Gradients(outputs)
    handed = hand_out(outputs, box)
    assert torch.equal(handed[0], outputs[0])
    assert handed[1]["a"][0] is outputs[1]["a"][0]
    assert handed[1]["a"][1:] == [None, "text"]
    assert handed[1]["b"] == 4
    assert box.values == [None] * 5


def test_gradients_end_in_the_box_and_go_no_further():
    weight = torch.ones(3, requires_grad=True)
    box = Gradients((0, 0))
    handed = hand_out((weight * 2, weight * 3), box)
    (handed[0] * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(box.values[0], torch.tensor([1.0, 2.0, 3.0]))
    assert box.values[1] is None
    assert weight.grad is None


def test_several_backwards_add_up():
    box = Gradients(0)
    handed = hand_out(torch.ones(2), box)
    for _ in range(3):
        handed.sum().backward(retain_graph=True)
    assert torch.equal(box.values[0], torch.full((2,), 3.0))


def test_what_backward_brings_first_is_not_copied():
    box = Gradients(0)
    gradient = torch.ones(2)
    box.add(0, gradient)
    assert box.values[0] is gradient
    box.add(0, gradient)
    assert torch.equal(gradient, torch.ones(2))


def test_surrounding_code_may_change_in_place_what_it_is_given():
    outputs = torch.ones(2)
    box = Gradients(outputs)
    handed = hand_out(outputs, box)
    handed += 1
    handed.mul_(3)
    handed.sum().backward()
    assert torch.equal(handed, torch.full((2,), 6.0))
    assert torch.equal(box.values[0], torch.full((2,), 3.0))


def test_no_bytes_are_copied():
    outputs = torch.ones(2)
    for handed in (cut(outputs), hand_out(outputs, Gradients(outputs))):
        assert handed.data_ptr() == outputs.data_ptr()


def test_what_is_cut_has_no_history_and_keeps_its_nesting():
    outputs = cut({"a": (torch.ones(2, requires_grad=True) * 2, 3), "b": None})
    assert not outputs["a"][0].requires_grad
    assert outputs["a"][1:] == (3,)
    assert outputs["b"] is None


def test_a_history_is_cut_even_without_grad_mode():
    with torch.no_grad():
        handed = hand_out(torch.ones(2), Gradients(0))
    assert handed.requires_grad


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(1), True),
        (torch.ones(1, dtype=torch.bfloat16), True),
        (torch.ones(1, dtype=torch.complex64), True),
        (torch.ones(1, dtype=torch.int64), False),
        (torch.ones(1, dtype=torch.bool), False),
        (1.0, False),
        (None, False),
    ],
)
def test_only_floating_point_tensors_carry_gradients(value: object, expected: bool):
    assert is_differentiable(value) is expected
