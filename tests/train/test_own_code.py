"""Models whose own code takes values past the layers by way of the model itself train as they do resident, or not."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.short_runs import verify
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
        self.standard = torch.nn.BatchNorm1d(config.hidden_size, affine=False)
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
TURNED = "hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)"
NORMED = "hidden = self.standard(hidden.transpose(1, 2)).transpose(1, 2)"
NAMES = {
    "list": r"OwnForCausalLM\.seen",
    "dict": r"OwnForCausalLM\.named",
    "buffer": r"OwnForCausalLM\.mean",
    "object": r"OwnForCausalLM\.config",
}
LOCAL = {
    "local": ("skip = hidden", "hidden = hidden + skip"),
    "turned before": (TURNED, ""),
    "turned behind": ("", TURNED),
    "normed before": (NORMED, ""),
    "normed behind": ("", NORMED),
}


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
    cut, crossing = own_run(member), NAMES.get(member, r"OwnForCausalLM\.skip")
    for refused in (train, plan, verify):
        with pytest.raises(ConfigError, match=rf"OwnForCausalLM sets {crossing} .*train\.microbatches=1"):
            refused(cut)
    free = own_run(member, train={"microbatches": None}, memory={"activations": "recompute", "slots": 1})
    said: list[str] = []
    assert plan(free).layout.num_microbatches == 1
    assert verify(free, announce=said.append).equal
    assert len([line for line in said if re.search(f"not cut into microbatches: .*{crossing}", line)]) == 1


def test_what_does_not_fit_whole_is_told_why_it_was_not_cut(own_run: Any) -> None:
    tight = own_run("attribute", train={"microbatches": None}, memory={"device_memory": "100KiB"})
    with pytest.raises(
        InfeasiblePlanError, match=r"not cut into microbatches: .*OwnForCausalLM\.skip .*short"
    ):
        plan(tight)


@pytest.mark.parametrize(("member", "rounds"), [("local", 1), *((member, None) for member in LOCAL)])
def test_what_crosses_nothing_is_cut(member: str, rounds: int | None, own_run: Any) -> None:
    run = own_run(member, train={"round_microbatches": rounds})
    assert plan(run).layout.num_microbatches == 2
    assert verify(run).equal
