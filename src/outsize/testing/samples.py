"""Small models and tensors to try things on, and ways to compare what came of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.storage.arena import Arena


def small_model(dtype: str = "bf16") -> ModelSpec:
    """Return a model of four units: two trained ones, a frozen one and an empty one."""
    return ModelSpec(
        dtype=dtype,
        units=(
            pack_unit(0, "embed", "embedding", [("embed.weight", (300, 33), True, True)]),
            pack_unit(1, "block", "block", [("w", (70, 70), True, True), ("b", (7,), True, False)]),
            pack_unit(2, "frozen", "block", [("f", (50, 50), False, True)]),
            pack_unit(3, "tied", "head", []),
        ),
    )


def pattern(numel: int, dtype: torch.dtype, seed: int, arena: Arena) -> Tensor:
    """Return an aligned tensor of random bits, NaN patterns included: storage must not look at values."""
    tensor = arena.take(numel * dtype.itemsize, "pattern")
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))
    return tensor.view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def raises(kind: type[BaseException], call: Callable[[], object]) -> bool:
    """Whether ``call`` raises ``kind``."""
    try:
        call()
    except kind:
        return True
    return False
