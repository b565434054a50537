import math

import pytest
import torch

from outsize.runtime.forward.unit_state import same_values


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, math.nan], [1.0, math.nan], True),
        ([1.0, math.nan], [1.0, 2.0], False),
        ([math.nan, 1.0], [math.nan, 2.0], False),
        ([1.0], [1.0, 1.0], False),
        ([math.inf], [math.inf], True),
    ],
)
def test_what_is_no_number_equals_itself(one, other, same):
    assert same_values(torch.tensor(one), torch.tensor(other)) is same
