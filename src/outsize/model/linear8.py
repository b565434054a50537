"""A linear layer that multiplies in 8 bits as torchao's does; torchao is there, or this module cannot be imported."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig


class Linear8(Float8Linear):  # type: ignore[misc]
    """torchao's linear layer, emulated on a CPU, of any number of tokens, and with weights that may be frozen.

    Attributes:
        on_cpu: how its products are computed there: emulated.
        padded: how they are elsewhere where `multiple` does not divide the tokens, over which gradients of weights sum.
        multiple: what instructions for fp8 multiply is a whole number of these.
    """

    on_cpu: LinearMMConfig
    padded: LinearMMConfig
    multiple: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the products of ``input`` [..., in] with the weights, [..., out], in the dtype of ``input``."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        way = self.on_cpu
        if kind != "cpu":
            fits = input.numel() // input.shape[-1] % self.multiple == 0
            way = self.linear_mm_config if fits else self.padded
        product = matmul_with_hp_or_float8_args if self.weight.requires_grad else _FrozenProduct
        output: Tensor = product.apply(input, self.weight.t(), way, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def linear_class(recipe: str, multiple: int) -> type[Linear8]:
    """Return the class of layers that torchao converts by ``recipe``; what they have beside parameters is the class's.

    So a `torch.nn.Linear` that gets this class is one of them, and is what it was when it gets its own one back.
    """
    plain: nn.Module = nn.Linear(multiple, multiple, device="meta")
    config = Float8LinearConfig.from_recipe_name(recipe)
    converted = convert_to_float8_training(plain, config=config)
    attributes = {name: value for name, value in vars(converted).items() if name not in vars(plain)}
    ways = attributes["linear_mm_config"]
    attributes["multiple"] = multiple
    attributes["on_cpu"] = LinearMMConfig(*(way._replace(emulate=True) for way in ways))
    attributes["padded"] = LinearMMConfig(*(way._replace(pad_inner_dim=True) for way in ways))
    return type(Linear8.__name__, (Linear8,), attributes)


@torch.compiler.allow_in_graph
class _FrozenProduct(Function):
    """torchao's product for weights that do not train: their gradient is not computed, nor the input saved for it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_t: Tensor, way: LinearMMConfig, config: Any) -> Tensor:
        ctx.save_for_backward(weight_t)
        ctx.way, ctx.config = way, config
        rows = _cast(
            input.reshape(-1, input.shape[-1]), config.cast_config_input, GemmInputRole.INPUT, -1, way, config
        )
        weights = _cast(weight_t, config.cast_config_weight, GemmInputRole.WEIGHT, 0, way, config)
        return torch.mm(rows, weights).view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight_t,) = ctx.saved_tensors
        way, config, role = ctx.way, ctx.config, GemmInputRole.GRAD_OUTPUT
        rows = _cast(
            gradient.reshape(-1, gradient.shape[-1]), config.cast_config_grad_output, role, -1, way, config
        )
        kind = config.cast_config_weight_for_grad_input
        weights = _cast(weight_t, kind, GemmInputRole.WEIGHT, -1, way, config)
        flat_gradient = torch.mm(rows, weights.t())
        return flat_gradient.view(*gradient.shape[:-1], -1), None, None, None


def _cast(tensor: Tensor, kind: Any, role: GemmInputRole, dim: int, way: LinearMMConfig, config: Any) -> Any:
    """Return ``tensor`` in 8 bits, by torchao, with a scale for all of it, or for each of its rows along ``dim``."""
    return hp_tensor_to_float8_dynamic(
        tensor,
        kind.target_dtype,
        way,
        gemm_input_role=role,
        scaling_granularity=kind.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, kind.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
