"""LoRA adapters of PEFT, and TRL's trainer, over a wrapped model; skipped where the extras are not installed."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import outsize
import zoo
from wrapped.loops import assert_equal, gradients, parts_of, resident_backward, streamed_backward, wrapped

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = zoo.batch("llama", num_sequences=4)


def adapted(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes
    )
    base = zoo.build("llama").to(dtype)
    base.config.use_cache = True  # as published configs have it
    model: nn.Module = peft.get_peft_model(base, config)
    return model


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_peft_model_trains_as_it_is(count: int, home: str, tmp_path: Path):
    """Only adapters have gradients and state; the frozen base crosses the link on its way up and never down."""
    plain = adapted()
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    with wrapped(adapted(), home=home, microbatches=count) as model:
        assert isinstance(model, peft.PeftModelForCausalLM)
        optimizer = outsize.AdamW(model, lr=1e-2)
        for step in range(3):
            batch = zoo.batch("llama", seed=step, num_sequences=4)
            assert torch.equal(streamed_backward(model, batch), resident_backward(plain, batch, count))
            if home == "host":
                assert_equal(gradients(model), gradients(plain))
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        assert_equal(dict(model.state_dict()), plain.state_dict())
        assert optimizer.without_gradient == ()


@pytest.mark.parametrize("home", ["host", "disk"])
def test_fp32_adapters_train_on_a_half_precision_base(home: str):
    """The base of a unit is a plane of its own: 2 bytes per parameter at home, and nothing else of it anywhere."""
    plain = adapted(dtype=torch.bfloat16)
    dtypes = {parameter.dtype for parameter in plain.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    with wrapped(adapted(dtype=torch.bfloat16), home=home, microbatches=2) as model:
        optimizer = outsize.AdamW(model, lr=1e-2)
        for step in range(3):
            batch = zoo.batch("llama", seed=step, num_sequences=4)
            assert torch.equal(streamed_backward(model, batch), resident_backward(plain, batch, 2))
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        assert_equal(dict(model.state_dict()), plain.state_dict())
        assert {p.dtype for p in model.parameters()} == dtypes


@pytest.mark.parametrize(
    ("home", "codec"), [("host", "nf4-double"), ("disk", "nf4-double"), ("host", "fp8"), ("disk", "fp8")]
)
def test_adapters_train_on_a_base_in_fewer_bits(home: str, codec: str):
    """As over the same model with the weights that the codec gives back, bit for bit."""
    codecs = {"base_codec": codec, "table_codec": "int8"}
    plain = adapted(dtype=torch.bfloat16)
    exact = {name: value.clone() for name, value in plain.state_dict().items()}
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    with wrapped(adapted(dtype=torch.bfloat16), home=home, microbatches=2, **codecs) as model:
        plain.load_state_dict(dict(model.state_dict()))
        differing = {n for n, value in plain.state_dict().items() if not torch.equal(value, exact[n])}
        assert differing
        assert not any("lora" in name or "norm" in name for name in differing)
        weights = dict(model.state_dict())
        for name, error in model.quantisation_errors().items():
            want = exact[name].float()
            assert error == pytest.approx(float((weights[name] - want).norm() / want.norm()), rel=1e-4)
        optimizer = outsize.AdamW(model, lr=1e-2)
        for step in range(3):
            batch = zoo.batch("llama", seed=step, num_sequences=4)
            with torch.no_grad():
                want = torch.cat([plain(**part).logits for part in parts_of(batch, 2)])
                assert torch.equal(model(**batch).logits, want)
            assert torch.equal(streamed_backward(model, batch), resident_backward(plain, batch, 2))
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        assert_equal(dict(model.state_dict()), plain.state_dict())
    assert_equal(
        model.state_dict(), plain.state_dict()
    )  # unwrapped, it has the weights that it computed with


@pytest.mark.parametrize(("codec", "most"), [("raw", 2.1), ("nf4-double", 0.6), ("fp8", 1.1)])
@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_frozen_weights_only_go_up(codec: str, most: float, activations: str):
    """Bytes per frozen parameter and pass, and no gradient of it on the link."""
    settings = {"base_codec": codec, "table_codec": codec, "activations": activations, "slots": 2}
    config = zoo.make_config("llama")
    config.hidden_size, config.head_dim, config.intermediate_size = 256, 64, 512
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    with wrapped(model, device="emulated:1", home="host", **settings):
        runner = vars(model)["_outsize_runner"]
        streamed_backward(model, BATCH)
        model.zero_grad()
        before = runner._engine.link_bytes()
        streamed_backward(model, BATCH)
        after = runner._engine.link_bytes()
        trained = sum(unit.numel for unit in runner.split.spec.units if unit.trainable)  # whole granules
    up, down = (after[lane] - before[lane] for lane in ("up:w0", "down:w0"))
    assert (up - 2 * 4 * trained) / frozen < 2 * most
    assert down == 4 * trained


def test_a_codec_that_frozen_weights_cannot_have_is_refused():
    with pytest.raises(outsize.ConfigError, match="no codec 'entropy'"):
        outsize.wrap(adapted(), base_codec="entropy")


def test_a_base_that_became_trainable_after_wrap_has_the_gradients_of_the_plain_model():
    plain = adapted().requires_grad_(True)
    with wrapped(adapted(), microbatches=1) as model:
        model.requires_grad_(True)
        assert torch.equal(streamed_backward(model, BATCH), resident_backward(plain, BATCH, 1))
        assert_equal(gradients(model), gradients(plain))


def test_what_trains_has_one_dtype():
    model = adapted()
    next(p for p in model.parameters() if p.requires_grad).data = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(outsize.ModelError, match="parameters that train"):
        outsize.wrap(model)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_the_adapter_is_saved_in_peft_s_format(home: str, tmp_path: Path):
    with wrapped(adapted(), home=home) as model:
        optimizer = outsize.AdamW(model, lr=1e-2)
        streamed_backward(model, BATCH)
        optimizer.step()
        model.save_pretrained(tmp_path)
        want = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = peft.PeftModel.from_pretrained(zoo.build("llama"), tmp_path)
    assert_equal(loaded.state_dict(), want)


@pytest.mark.parametrize("adapters", [False, True])
def test_sft_trainer_trains_a_wrapped_model(adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    import datasets
    import trl

    from support import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    ids = [tokenizer(f"the square of {n} is {n * n}")["input_ids"] for n in range(12)]
    tokens = datasets.Dataset(datasets.table.InMemoryTable.from_pydict({"input_ids": ids}), fingerprint="t")

    def fit(model: nn.Module, directory: Path, own: Any = None) -> list[float]:
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(
                output_dir=str(directory),
                max_steps=3,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                logging_steps=1,
                max_length=32,
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                dataloader_pin_memory=False,
                save_strategy="no",
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=tokens,
            processing_class=tokenizer,
            optimizers=(own, None),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    config = zoo.make_config("llama")
    config.vocab_size = 264

    def make() -> nn.Module:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        made: nn.Module = AutoModelForCausalLM.from_config(config)
        lora = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear")
        return peft.get_peft_model(made, lora) if adapters else made

    want = fit(make(), tmp_path / "plain")
    with wrapped(make(), microbatches=1, home="disk", head="resident") as model:
        own = outsize.AdamW(model, lr=1e-2, weight_decay=0.0)
        assert fit(model, tmp_path / "streamed", own) == want
