"""The users' reference is `reference.train`, which shares no line with it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import reference
import zoo
from outsize.data.batch import IGNORED, Batch
from outsize.session.job.prepare import Job, prepare
from outsize.streamed.spec import RunSpec
from outsize.training.resident import materialise
from outsize.training.short_runs import run_resident
from support import make_batches, make_config, microbatches, recipe_of, reseed_of, save_model, unit_names


def both(
    name: str,
    directory: Path,
    batches: list[Batch] | None = None,
    dropout: float = 0.0,
    tolerance: float = 0.0,
    **sections,
):
    model = zoo.build(name, dropout=dropout)
    save_model(model, directory / "model")
    batches = make_batches(name) if batches is None else batches
    config = make_config(directory / "model", batches, **sections)
    prepared = prepare(RunSpec.of(config, directory), lambda _: None)
    losses, weights = run_resident(prepared, batches)
    recipe = recipe_of(
        config,
        causal=not zoo.is_masked(name),
        chunk_tokens=prepared.chunk_tokens,
        head="lm_head",
        loss_scale=2.0**16 if config.model.dtype == "fp16" else 1.0,
        units=unit_names(prepared.split),
        reseed=reseed_of(config.train.seed),
    )
    masters = None
    if config.model.dtype != "fp32":
        masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[config.model.dtype]
        model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=dtype).train()
    want = reference.train(model, microbatches(batches, config.microbatches), recipe, masters)
    assert losses == pytest.approx(want.losses, rel=tolerance, abs=0.0)
    assert weights.keys() == want.weights.keys()
    assert [n for n, w in want.weights.items() if (weights[n] - w).abs().max() > tolerance] == []
    return prepared


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loss", ["model", "chunked"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_resident_run_is_the_reference(count: int, loss: str, dtype: str, tmp_path: Path):
    train = {"microbatches": count, "loss": loss, "head_chunk_tokens": 5}
    both("llama", tmp_path, model={"dtype": dtype}, train=train, optimizer={"max_grad_norm": 0.5})


@pytest.mark.parametrize("count", [1, 3])
def test_also_with_experts(count: int, tmp_path: Path):
    both("mixtral", tmp_path, train={"microbatches": count})


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "bert"])
def test_also_with_ties_and_encoders(name: str, tmp_path: Path):
    both(name, tmp_path, train={"microbatches": 1})


def test_ties_are_summed_module_by_module(tmp_path: Path):
    """Plain PyTorch sums microbatch by microbatch, which rounds differently."""
    both("llama_tied", tmp_path, train={"microbatches": 3}, tolerance=1e-6)


def test_also_with_dropout(tmp_path: Path):
    both("gpt_neox", tmp_path, dropout=0.2, train={"microbatches": 2})


@pytest.mark.parametrize(
    "freeze", [("model.embed_tokens.*", "model.layers.0.*"), ("model.*",), ("lm_head.*",)]
)
@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_also_with_frozen_parameters(freeze: tuple[str, ...], loss: str, tmp_path: Path):
    both("llama", tmp_path, model={"freeze": freeze}, train={"loss": loss, "head_chunk_tokens": 7})


@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_also_with_a_microbatch_without_targets(loss: str, tmp_path: Path):
    batches = make_batches("llama")
    for batch in batches:
        batch.labels[-1] = IGNORED
    both("llama", tmp_path, batches, train={"microbatches": 4, "loss": loss, "head_chunk_tokens": 7})


def prepared_llama(directory: Path, dtype: str) -> Job:
    save_model(zoo.build("llama"), directory / "model")
    config = make_config(directory / "model", make_batches("llama"), model={"dtype": dtype})
    return prepare(RunSpec.of(config, directory), lambda _: None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_real_parameters_are_there_for_as_long_as_they_are_needed(dtype: str, tmp_path: Path):
    prepared = prepared_llama(tmp_path, dtype)
    model = prepared.split.model
    before = dict(model.named_parameters())
    expected = dict(zoo.build("llama").named_parameters())
    with materialise(prepared) as masters:
        for name, parameter in model.named_parameters():
            assert torch.equal(masters[name], expected[name])
            assert torch.equal(parameter, expected[name].to(parameter.dtype))
            assert (masters[name] is parameter) == (dtype == "fp32")
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())


def test_parameters_go_even_when_training_fails(tmp_path: Path):
    prepared = prepared_llama(tmp_path, "fp32")
    with pytest.raises(ZeroDivisionError), materialise(prepared):
        raise ZeroDivisionError
    assert all(parameter.is_meta for parameter in prepared.split.model.parameters())
