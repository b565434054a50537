"""What transformers records inside units (router logits, attention probabilities) travels with a unit's outputs.

transformers hangs hooks on modules deep inside; they append to lists of the forward that is under way in their context.
A unit of a walk runs in another context, and more than once. So the boundary asks which lists the forward wants; the
unit's forward collects them for itself and returns them behind its outputs, cut and given gradients as those are; and
the boundary appends them where the model's own code will look.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from outsize.compat.transformers_private import output_collector
from outsize.model.modes import MODES

# The keyword argument that tells a unit's forward what to collect.
WANTED = "_outsize_recorded"
# These are recorded of the units themselves, outside of them.
_OF_UNITS = frozenset({"hidden_states", "_hidden_states_layers"})
Found = dict[str, list[Any]]


def wanted() -> tuple[str, ...]:
    """What the forward under way in this context wants recorded inside units; empty for nothing."""
    collector = output_collector()
    lists = collector.get() if collector is not None else None
    return tuple(key for key in lists or () if key not in _OF_UNITS)


def note(records: Found) -> None:
    """Give the forward under way in this context what was recorded inside a unit."""
    collector = output_collector()
    assert collector is not None
    for key, values in records.items():
        collector.get()[key].extend(values)


def recording(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a unit's forward that returns ``(outputs, recorded)`` where `WANTED` says what to record.

    It runs in the modes that `MODES` says.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        modes = kwargs.pop(MODES, None)
        if modes is not None:
            with modes.around():
                return forward(*args, **kwargs)
        keys = kwargs.pop(WANTED, ())
        if not keys:
            return real(*args, **kwargs)
        with _collecting(keys) as records:
            outputs = real(*args, **kwargs)
        return outputs, records

    forward.__wrapped__ = real  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def _collecting(keys: tuple[str, ...]) -> Iterator[Found]:
    collector = output_collector()
    assert collector is not None
    records: Found = {key: [] for key in keys}
    token = collector.set(records)
    try:
        yield records
    finally:
        collector.reset(token)
