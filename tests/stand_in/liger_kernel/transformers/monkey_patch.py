"""The interface of Liger, for two types of models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3 import modeling_qwen3


def write(into: Tensor, values: Tensor) -> None:
    """Write as a kernel does: autograd counts no change, and no mode sees it."""
    target, source = into.detach(), values.detach().to(into.dtype).contiguous()
    if into.device.type == "cpu":
        target.view(torch.uint8).numpy()[...] = source.view(torch.uint8).numpy()
    else:
        into.data.copy_(source)


class LigerRMSNormFunction(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, in_place: bool) -> Tensor:
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        scales = torch.rsqrt(rows.float().pow(2).mean(-1) + eps)
        ctx.in_place = in_place
        ctx.save_for_backward(rows, weight, scales)
        return ((rows.float() * scales[:, None]).to(rows.dtype) * weight).view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, scales = ctx.saved_tensors
        gradient = gradient.contiguous()
        given = gradient.view(-1, rows.shape[-1]).float()
        normed = rows.float() * scales[:, None]
        scaled = given * weight.float()
        into = gradient if ctx.in_place else torch.empty_like(gradient)
        made = scales[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        of_weight = (given * normed.to(rows.dtype)).sum(0).to(weight.dtype)
        write(into, made.view_as(into))
        return into, of_weight, None, None


class LigerSiLUMulFunction(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        raw = gate.float()
        return (raw * torch.sigmoid(raw)).to(up.dtype) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        given, raw = gradient.float(), gate.float()
        opened = torch.sigmoid(raw)
        of_gate = given * (raw * opened * (1 - opened) + opened) * up.float()
        of_up = given * raw * opened
        write(gate, of_gate)
        write(up, of_up)
        return gate, up


class LigerRopeFunction(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return rotated(query, cos, sin), rotated(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotated(of_query, cos, -sin), rotated(of_key, cos, -sin), None, None


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads`` [batch, heads, tokens, width], in place where tokens lie before heads, as they do."""
    tokens = heads.transpose(1, 2).contiguous()
    turned = torch.cat((-tokens[..., tokens.shape[-1] // 2 :], tokens[..., : tokens.shape[-1] // 2]), -1)
    write(tokens, tokens * cos[:, :, None] + turned * sin[:, :, None])
    return tokens.transpose(1, 2)


class LigerRMSNorm(nn.Module):
    variance_epsilon: float
    weight: Tensor
    in_place: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        made: Tensor = LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, self.in_place
        )
        return made


class LigerSwiGLUMLP(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerExperts(nn.Module):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("what it adds up comes in any order")


def liger_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return LigerRopeFunction.apply(query, key, cos, sin)


def bind(module: nn.Module, donor: type[nn.Module]) -> None:
    vars(module)["forward"] = donor.forward.__get__(module, type(module))
    vars(module)["_get_name"] = (lambda self: donor.__name__).__get__(module, type(module))


def apply_liger_kernel(
    modeling: Any,
    prefix: str,
    model: Any,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
) -> None:
    """For the whole process, and for ``model``."""
    if cross_entropy or fused_linear_cross_entropy:
        raise AssertionError("losses are those of the package")
    modeling.apply_rotary_pos_emb = liger_rotary_pos_emb
    setattr(modeling, f"{prefix}RMSNorm", LigerRMSNorm)
    setattr(modeling, f"{prefix}MLP", LigerSwiGLUMLP)
    norms = [model.model.norm]
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            bind(layer.mlp.experts, LigerExperts)
        else:
            bind(layer.mlp, LigerSwiGLUMLP)
        attention = layer.self_attn
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    for norm in norms:
        norm.in_place = True
        bind(norm, LigerRMSNorm)


MODEL_TYPE_TO_APPLY_LIGER_FN = {
    "llama": (modeling_llama, "Llama"),
    "mixtral": (modeling_mixtral, "Mixtral"),
    "qwen3": (modeling_qwen3, "Qwen3"),
}


def _apply_liger_kernel_to_instance(model: Any, **kwargs: bool) -> None:
    apply_liger_kernel(*MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type], model, **kwargs)
