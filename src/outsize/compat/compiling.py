"""What `torch.compile` has no public name for."""

from typing import Any

import torch


def compile_graph(backend: str, graph: Any, inputs: Any) -> Any:
    """Compile ``graph``, and its backward at once, not when one first runs; called back by `torch.compile`."""
    # torch's cache takes code made for other vectors than torch's own of today, and that is wrong: NaN was seen.
    tag = torch.compiler.config.cache_key_tag + torch.backends.cpu.get_cpu_capability()
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        return torch._dynamo.lookup_backend(backend)(graph, inputs)


def allow_forms(most: int) -> None:
    """Have `torch.compile` compile a function for ``most`` forms of its arguments at least, in this thread."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, most)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what is raised by code that cannot be compiled."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
