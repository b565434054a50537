"""Models whose own code takes values past the layers by way of the model itself train as they do resident, or not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import ConfigError
from outsize.training.run import plan, train
from outsize.training.verify import verify
from support import make_run

CODE = """
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.seen, self.named, self.skip = [], {{}}, None
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.post_init()

    def forward(self, input_ids=None, labels=None, attention_mask=None, position_ids=None, **others):
        hidden = self.model.embed_tokens(input_ids)
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        angles = self.model.rotary_emb(hidden, places)
        {before}
        for layer in self.model.layers:
            hidden = layer(hidden, position_embeddings=angles)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        {behind}
        logits = self.lm_head(self.model.norm(hidden))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""
CROSSING = {
    "attribute": ("self.skip = hidden", "hidden = hidden + self.skip"),
    "detached": (
        "self.skip = hidden.detach()",
        "hidden = hidden + (0 if self.skip is None else self.skip); self.skip = None",
    ),
    "list": ("self.seen.append(hidden)", "hidden = hidden + self.seen.pop()"),
    "dict": ("self.named['skip'] = hidden", "hidden = hidden + self.named.pop('skip')"),
    "buffer": ("self.mean.copy_(hidden.detach().mean((0, 1)))", "hidden = hidden + self.mean.clone()"),
    "object": ("self.config.skip = hidden", "hidden = hidden + self.config.skip; del self.config.skip"),
}
LOCAL = {"local": ("skip = hidden", "hidden = hidden + skip")}


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a run of a model with code of its own, before and behind its layers."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(member: str, **sections: Any) -> Config:
        sections["train"] = {"steps": 2, "loss": "model", **sections.get("train", {})}
        run = make_run(tmp_path / member, model={"trust_remote_code": True}, **sections)
        before, behind = {**CROSSING, **LOCAL}[member]
        directory = Path(run.model.path)
        (directory / "own.py").write_text(CODE.format(before=before, behind=behind))
        config = json.loads((directory / "config.json").read_text())
        config |= {
            "model_type": "own",
            "architectures": ["OwnForCausalLM"],
            "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
        }
        (directory / "config.json").write_text(json.dumps(config))
        return run

    return make


@pytest.mark.parametrize("member", CROSSING)
def test_what_crosses_layers_goes_whole_or_is_refused(member: str, own_run: Any) -> None:
    cut = own_run(member)
    for refused in (train, plan, verify):
        with pytest.raises(ConfigError, match=r"OwnForCausalLM.*train\.microbatches=1"):
            refused(cut)
    free = own_run(member, train={"microbatches": None}, memory={"activations": "recompute", "slots": 1})
    assert plan(free).layout.num_microbatches == 1
    assert verify(free).equal


@pytest.mark.parametrize("rounds", [None, 1])
def test_what_crosses_nothing_is_cut(rounds: int | None, own_run: Any) -> None:
    run = own_run("local", train={"round_microbatches": rounds})
    assert plan(run).layout.num_microbatches == 2
    assert verify(run).equal
