from unittest import mock

import pytest

from outsize import native


@pytest.fixture(params=["torch", "plain", "avx2", "avx512"])
def use_native(request):
    """Every form in turn; that of torch is also what runs where there is no compiler."""
    if request.param == "torch":
        with mock.patch.object(native, "available", return_value=False):
            yield
        return
    if not native.available():
        pytest.skip(f"no kernels: {native.reason()}")
    best = native.level()
    if native.use_level(request.param) != request.param:
        pytest.skip("this processor has no such instructions")
    yield
    native.use_level(best)
