"""The FLOPs of one operation below autograd, by PyTorch's own table of them; a multiply-add counts two."""

from collections.abc import Mapping
from typing import Any

from outsize.runtime.forward.selective_recompute import ATTENTION

# Products of tokens with their experts' weights in one operation, which PyTorch's table does not know: each row of the
# first operand goes through one matrix of the second.
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of an operation that has returned ``out``; 0 for one that the table leaves out."""
    # What it is from is slow to import, and of use in trials alone.
    from torch.utils.flop_counter import flop_registry

    if func in ATTENTION:
        return attention_flops(args, kwargs)
    name = _name(func)
    if name.startswith("_scaled_dot_product") and name.endswith("backward"):
        # Scores that it makes again are not counted, as elsewhere.
        return 2 * attention_flops(args[1:], kwargs)
    if name in _GROUPED:
        return int(2 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def attention_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of an attention that is one operation; causal where it is said to be, half of its scores."""
    query, key = args[0], args[1]
    causal = any(arg is True for arg in (*args, kwargs.get("is_causal")))
    return int(4 * query.numel() * key.shape[-2] // (2 if causal else 1))


def is_routed(func: Any) -> bool:
    """Return whether an operation multiplies tokens with the experts that they visit."""
    return _name(func) in _GROUPED


def _name(func: Any) -> str:
    return getattr(getattr(func, "overloadpacket", func), "__name__", "")
