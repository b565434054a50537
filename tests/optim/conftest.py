import pytest

from outsize import native


@pytest.fixture(params=["torch", "plain", "avx2", "avx512"])
def use_native(request):
    """Every form in turn; that of torch is also what runs where there is no compiler."""
    if request.param == "torch":
        yield False
        return
    if not native.available():
        pytest.skip(f"no kernels: {native.reason()}")
    best = native.level()
    if native.use_level(request.param) != request.param:
        pytest.skip("this processor has no such instructions")
    yield True
    native.use_level(best)
