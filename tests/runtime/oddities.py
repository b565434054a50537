"""Models that do what real ones do, and then some: written by hand, small, awkward on purpose."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCAB = 8, 11


class Block(nn.Module):
    """A block whose calls differ per layer and that returns more than a tensor."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(1)) if kind != "identity" else None

    def forward(self, x: Tensor, *extra: Any, mask: Tensor | None = None, **options: Any) -> Any:
        if self.kind == "identity":
            return x
        hidden = torch.tanh(self.linear(x)) * options.get("scale", 1.0) + self.bias
        if mask is not None:
            hidden = hidden * mask
        for tensor in extra:
            if isinstance(tensor, Tensor):
                hidden = hidden + tensor
        if self.kind == "tuple":
            return hidden, None, hidden.mean(dim=-1, keepdim=True)
        if self.kind == "dict":
            return {"out": hidden, "side": [hidden.sum(dim=-1, keepdim=True)], "layer": self.kind}
        return hidden


class Odd(nn.Module):
    """Code between blocks, tensors that skip blocks, arguments of every kind, a loss of its own at the end."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in ("tuple", "dict", "plain", "identity", "tuple"))
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        bias = torch.sigmoid(self.gate) * x.mean(
            dim=1, keepdim=True
        )  # a position bias: one graph, several units
        mask = (input_ids > 1).unsqueeze(-1)
        x, nothing, side = self.blocks[0](x, "text", 3, mask=mask, flag=True)
        assert nothing is None
        out = self.blocks[1](x * 2, bias, None, scale=0.5, shape=torch.Size([1]), pair=(1, (2,)))
        x = out["out"] + self.norm(x + side + out["side"][0])
        x = self.blocks[2](x, bias, mask=mask.float())
        x = self.blocks[3](x)
        x += 1  # in place, on what the model's own code owns
        x, _, last = self.blocks[4](x, side, scale=torch.tensor(0.7))
        logits = self.head(self.norm(x) * last)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


class Sparse(nn.Module):
    """Each block has an expert per token id; one that is not asked in a step gets no gradient in it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(VOCAB))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert in ids.unique().tolist():
                chosen = (ids == expert).unsqueeze(-1)
                out = out + torch.where(chosen, self.experts[expert](x), 0.0)
            return x + self.norm(out)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, input_ids)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def batch(seed: int = 0, rows: int = 2, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}
