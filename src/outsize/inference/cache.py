"""Keys and values of a generation: how many bytes they are, by what transformers' caches hold."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache that a unit is called with, or None."""
    from transformers.cache_utils import Cache, EncoderDecoderCache

    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Cache | EncoderDecoderCache):
            return value
    return None


def layers_of(cache: Any) -> Iterator[Any]:
    """The layers of a cache; of one for encoder and decoder, both its caches'."""
    for part in (
        getattr(cache, "self_attention_cache", cache),
        getattr(cache, "cross_attention_cache", None),
    ):
        yield from getattr(part, "layers", ())


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds: of whole storages, since a sliding window is a view of more."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for layer in layers_of(cache)
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())
