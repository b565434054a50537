"""A loop over a wrapped model on a GPU: the backward runs inside the caller's own, and they do not block each other.

``OUTSIZE_TEST_DEVICE=emulated:1 pytest tests/gpu/test_wrap.py`` tries the test itself where there is no GPU.
"""

import pytest
import torch

import outsize
import zoo
from devices import DEVICE, TORCH_DEVICE, needs_accelerator
from wrapped.loops import assert_equal, gradients, planned_in, resident_backward, wrapped

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize(("count", "in_a_round"), [(1, 1), (3, 3), (3, 1)])
def test_losses_and_gradients_on_a_gpu(count: int, in_a_round: int, home: str):
    where = torch.device(TORCH_DEVICE)
    plain = zoo.build("llama").to(where)
    batch = {name: value.to(where) for name, value in zoo.batch("llama", num_sequences=4).items()}
    settings = {"device": DEVICE, "home": home, "microbatches": count}
    with planned_in(in_a_round), wrapped(zoo.build("llama"), **settings) as model:
        optimizer = outsize.AdamW(model, lr=1e-3)
        for _ in range(3):
            out = model(**batch)
            assert out.logits.device == where
            out.loss.backward()
            want = resident_backward(plain, batch, count)
            assert torch.allclose(out.loss, want, rtol=1e-5)
            if home == "host":
                got = {name: gradient.to(where) for name, gradient in gradients(model).items()}
                assert_equal(got, gradients(plain), 1e-5)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.settle()
            with torch.no_grad():
                for name, value in dict(model.state_dict()).items():
                    plain.get_parameter(name).copy_(value)
            plain.zero_grad()
