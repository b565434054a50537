"""Which models of transformers read padding as if it were text."""

import sys

from torch import nn

# What models call whose layers carry a state over all tokens, to have padding change none of it.
_LEAVES_OUT = "apply_mask_to_padding_states"


def reads_padding(model: nn.Module) -> bool:
    """Return whether padding before a text changes what a model makes of it: it carries a state, and reads no mask."""
    written_in = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    leaves_out = any(hasattr(sys.modules.get(name), _LEAVES_OUT) for name in written_in)
    return bool(getattr(model, "_is_stateful", False)) and not leaves_out
