import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import DataError
from outsize.wrapped.batching import cut, divisors, main_input, sizes_of


@given(rows=st.integers(1, 40), count=st.integers(1, 12))
def test_sizes_are_even_and_add_up(rows: int, count: int):
    sizes = sizes_of(rows, count)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, count)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == [len(part) for part in torch.arange(rows).tensor_split(min(rows, count))]


def test_tensors_of_the_batch_are_cut_and_everything_else_goes_to_every_part():
    inputs = {
        "input_ids": torch.arange(6).view(3, 2),
        "nested": [{"mask": torch.arange(3)}, torch.zeros(2, 3)],
        "position_ids": torch.zeros(1, 2),
        "scale": 2.0,
        "number": torch.tensor(7),
    }
    first, second = cut(inputs, 3, (2, 1))
    assert first["input_ids"].tolist() == [[0, 1], [2, 3]]
    assert second["nested"][0]["mask"].tolist() == [2]
    for part in (first, second):
        assert part["nested"][1] is inputs["nested"][1]
        assert part["position_ids"] is inputs["position_ids"]
        assert (part["scale"], part["number"]) == (2.0, inputs["number"])


def test_the_main_input_is_what_the_model_says_or_the_first_tensor():
    inputs = {"mask": torch.zeros(2), "x": torch.zeros(5, 1), "input_ids": torch.zeros(3, 1)}
    assert len(main_input(inputs, "x")) == 5
    assert len(main_input(inputs, None)) == 3
    assert len(main_input({"a": [torch.tensor(1), torch.zeros(4)]}, "absent")) == 4
    with pytest.raises(DataError, match="without any tensor"):
        main_input({"scale": 1.0, "number": torch.tensor(1)}, None)


def test_parts_weigh_what_they_have_of_targets():
    labels = torch.tensor([[1, 2, -100], [1, -100, -100], [5, -100, 3]])
    parts = [{"labels": labels[:1]}, {"labels": labels[1:2]}, {"labels": labels[2:]}]
    assert divisors(parts, (1, 1, 1), shifted=True) == (2.0, float("inf"), 2.0)
    assert divisors(parts, (1, 1, 1), shifted=False) == (5 / 2, 5.0, 5 / 2)
    assert divisors([{"labels": torch.zeros(2, 1)}, {"labels": torch.zeros(1, 1)}], (2, 1), True) == (
        1.5,
        3.0,
    )
    assert divisors([{}, {}], (3, 1), True) == (4 / 3, 4.0)
    assert divisors([{**part, "num_items_in_batch": 4} for part in parts], (1, 1, 1), True) == (1.0,) * 3
    nothing = [{"labels": torch.full((1, 3), -100)}] * 2
    assert divisors(nothing, (1, 1), True) == (1.0, 1.0)  # NaN, as of the model itself
