"""Ways of PEFT to train a little of a model: over a wrapped model as over the plain one, or refused with the reason."""

from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import outsize
import zoo
from outsize.errors import ModelError
from reference import num_targets
from wrapped.loops import assert_equal, gradients, parts_of, streamed_backward, wrapped

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = zoo.batch("llama", num_sequences=4)
LINEAR = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"]}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
METHODS: dict[str, Any] = {
    "adalora": peft.AdaLoraConfig(init_r=3, target_r=2, total_step=9, tinit=1, tfinal=2, deltaT=1, **LINEAR),
    "dora": peft.LoraConfig(r=2, use_dora=True, **LINEAR),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "layer_norm": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "loha": peft.LoHaConfig(r=2, **LINEAR),
    "lokr": peft.LoKrConfig(r=2, **LINEAR),
    "oft": peft.OFTConfig(oft_block_size=4, **LINEAR),
    "p_tuning": peft.PromptEncoderConfig(encoder_hidden_size=8, **VIRTUAL),
    "prompt": peft.PromptTuningConfig(**VIRTUAL),
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj"]),
}


def tuned(config: Any) -> nn.Module:
    """A small Llama, with adapters that are not as at the beginning, where most are nothing."""
    torch.manual_seed(1)
    model: nn.Module = peft.get_peft_model(zoo.build("llama"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def resident_backward(model: nn.Module, count: int, *, virtual: bool) -> torch.Tensor:
    """The plain loop over microbatches; behind a virtual token the first label is a target, too."""
    parts = parts_of(BATCH, count)
    targets = [num_targets(part, not virtual) for part in parts]
    total = torch.zeros(())
    for part, own in zip(parts, targets, strict=True):
        loss = model(**part).loss / (sum(targets) / own)
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_losses_gradients_and_steps_are_those_of_the_plain_model(method: str, count: int):
    """A parameter that is used in several places has its gradient summed in another order, from two microbatches on."""
    plain = tuned(METHODS[method])
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    reference = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    tolerance = 1e-6 if (method, count) == ("adalora", 2) else 0.0
    with wrapped(tuned(METHODS[method]), microbatches=count) as model:
        optimizer = outsize.AdamW(model, lr=1e-2)
        for _ in range(2):
            want = resident_backward(plain, count, virtual=method in ("p_tuning", "prompt"))
            assert torch.allclose(streamed_backward(model, BATCH), want, rtol=tolerance, atol=0)
            assert_equal(gradients(model), gradients(plain), tolerance)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        assert_equal(dict(model.state_dict()), plain.state_dict(), 1e-4 if tolerance else 0.0)


def test_adalora_allocates_its_ranks():
    """From weights, gradients and what it has seen of them so far, between step and `zero_grad`."""
    plain = tuned(METHODS["adalora"])
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    with wrapped(tuned(METHODS["adalora"])) as model:
        optimizer = outsize.AdamW(model, lr=1e-2)
        for step in range(1, 5):
            for one, it in ((model, optimizer), (plain, reference)):
                streamed_backward(one, BATCH)
                it.step()
                if isinstance(it, outsize.AdamW):
                    it.settle()
                one.update_and_allocate(step)
                it.zero_grad()
        assert_equal(dict(model.state_dict()), plain.state_dict())
        masked = [p for name, p in model.named_parameters() if "lora_E" in name]
        assert any((p == 0).any() for p in masked)


def test_parameters_used_outside_of_their_unit_need_one_device():
    with (
        wrapped(tuned(METHODS["adalora"]), device="emulated:2", microbatches=2) as model,
        pytest.raises(ModelError, match=r"lora_A.* outside of its unit, as AdaLoRA does .*; use one device"),
    ):
        model(**BATCH)


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_prefix_tuning_is_refused(wrapped_first: bool):
    model, prefix = zoo.build("llama"), peft.PrefixTuningConfig(**VIRTUAL)
    with (
        wrapped(model if wrapped_first else peft.get_peft_model(model, prefix)) as model,
        pytest.raises(ModelError, match=r"cache of keys and values that trains .prefix tuning."),
    ):
        (peft.get_peft_model(model, prefix) if wrapped_first else model)(**BATCH)


IMAGES = {
    "pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 16, 16),
    "labels": torch.tensor([0, 1]),
}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def _vit() -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
    )
    return ViTForImageClassification(config)


@pytest.mark.parametrize(
    "way", [{"home": "disk"}, {"device": "emulated:1", "slots": 2, "activations": "recompute"}]
)
@pytest.mark.parametrize("kind", ["images", "experts"])
def test_adapters_of_other_kinds_of_models_train_as_plain(kind: str, way: dict[str, Any]):
    def made() -> nn.Module:
        base, names = (
            (_vit(), r".*(query|q_proj|value|v_proj)")
            if kind == "images"
            else (zoo.build("mixtral"), "q_proj")
        )
        more: dict[str, Any] = {"modules_to_save": ["classifier"]} if kind == "images" else EXPERTS
        torch.manual_seed(1)
        target = names if kind == "images" else [names]
        model: nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=target, **more))
        return model.train()

    batch, plain = (IMAGES if kind == "images" else BATCH), made()
    with wrapped(made(), **way) as model:
        for each in (plain, model):
            each(**batch).loss.backward()
        assert_equal(gradients(model), gradients(plain))
