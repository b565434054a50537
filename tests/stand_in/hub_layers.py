"""A kernel as repositories of the hub have them: layers without a state, which save what Liger's save, in torch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        scales = torch.rsqrt(rows.float().pow(2).mean(-1) + eps)
        ctx.save_for_backward(rows, weight, scales)
        return (rows.float() * (scales[:, None] * weight.float())).to(rows.dtype).view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, scales = ctx.saved_tensors
        given = gradient.reshape(rows.shape).float()
        normed = rows.float() * scales[:, None]
        scaled = given * weight.float()
        made = scales[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return made.to(rows.dtype).view_as(gradient), (given * normed).sum(0).to(weight.dtype), None


class LigerRMSNorm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        made: Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)
        return made


class Rotary(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin, half = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), q.shape[-1] // 2
        turned = (torch.cat((-heads[..., half:], heads[..., :half]), -1) for heads in (q, k))
        return tuple(
            torch.addcmul(heads * cos, turn, sin) for heads, turn in zip((q, k), turned, strict=True)
        )


class layers:  # noqa: N801 - the name that the package looks for
    LigerRMSNorm = LigerRMSNorm
    Rotary = Rotary
