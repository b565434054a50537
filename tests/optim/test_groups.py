import pytest
import torch
import transformers
from torch import nn

from outsize.optim.rate_groups import decay_parameter_names


def names_of_transformers(model):
    decaying = transformers.Trainer.get_decay_parameter_names(None, model)
    return {name for name, _ in model.named_parameters() if name in decaying}


def small(architecture, **extra):
    config = transformers.AutoConfig.for_model(
        architecture, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **extra,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "gpt2", "bloom", "falcon", "phi"])
def test_the_rule_is_that_of_the_trainer(architecture):
    model = small(architecture)
    names = {name for name, _ in model.named_parameters()}
    ours = decay_parameter_names(model) & names
    assert ours == names_of_transformers(model)
    assert any("norm" in name or "ln_" in name for name in names - ours)


class Odd(nn.Module):
    """Names that match in part, in the middle and in capitals, and a parameter inside a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.Norm = nn.Linear(2, 2, bias=False)
        self.normal = nn.Linear(2, 2)
        self.ln = nn.LayerNorm(2)
        self.ln.extra = nn.Linear(2, 2)
        self.q_norm = nn.Linear(2, 2, bias=False)
        self.abnormal_norms = nn.Linear(2, 2, bias=False)
        self.MyRMSNorm = nn.ModuleList([nn.Linear(2, 2)])
        self.scale = nn.Parameter(torch.ones(2))
        self.Bias_like = nn.Parameter(torch.ones(2))


def test_names_are_matched_as_the_trainer_matches_them():
    model = Odd()
    assert decay_parameter_names(model) == names_of_transformers(model)
    assert decay_parameter_names(model) == {"normal.weight", "abnormal_norms.weight", "scale"}
