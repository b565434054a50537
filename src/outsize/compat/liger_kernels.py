"""What Liger Kernel has no public name for."""

from torch import nn


def put_kernels_in(model: nn.Module, **kernels: bool) -> None:
    """Have Liger put its kernels into ``model``; keywords leave some out."""
    from liger_kernel.transformers import monkey_patch

    monkey_patch._apply_liger_kernel_to_instance(model, **kernels)
