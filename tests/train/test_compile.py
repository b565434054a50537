"""Runs whose blocks are compiled: streamed equals resident under the same kernels, and each kind is compiled once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from torch.utils import _python_dispatch
from transformers.models.llama.modeling_llama import LlamaMLP

from outsize.config import Config
from outsize.model import compiled
from outsize.session.decide.rates import measure_rates
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.short_runs import verify
from support import make_run

# Whole graphs, whose forward and backward run in torch's own kernels: what streams them is the same.
CHEAP = "aot_eager"
FAMILIES = (
    "llama_biased", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "falcon", "opt", "cohere2", "mixtral", "deepseek_v3",
    "mamba2", "gpt_oss",
)  # fmt: skip
# A microbatch of one short sequence, so that the trial's form is that of the run.
ONE_FORM: dict[str, Any] = {"train": {"steps": 2, "microbatches": 4}}
BLOCKS = {"compile": "blocks"}
# torch imports parts that it deprecates itself.
OF_INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning")
OFFLOADED = {"activations": "offload", "device": "emulated:1"}
LORA: dict[str, Any] = {"r": 2, "target_modules": ("q_proj", "v_proj")}
RUNS: dict[str, dict[str, Any]] = {
    "recomputed": {**ONE_FORM, "memory": {"activations": "recompute"}},
    "all kept": {**ONE_FORM, "memory": {"activations": "keep"}},
    "offloaded": {**ONE_FORM, "memory": OFFLOADED},
    "disk, bf16": {**ONE_FORM, "model": {"dtype": "bf16"}, "memory": {"home": "disk", "slots": 2}},
    "rounds": {"train": {"microbatches": 4, "round_microbatches": 2}},
    "uneven microbatches": {"train": {"steps": 2, "microbatches": 3, "loss": "model"}},
    "lora": {"train": {"method": "lora", "microbatches": 4}, "lora": LORA},
    "lora over 4 bits": {
        "train": {"method": "lora", "microbatches": 4},
        "lora": {**LORA, "base_codec": "nf4"},
    },
    "a frozen prefix": {**ONE_FORM, "model": {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}},
    "three workers": {**ONE_FORM, "memory": {"device": "emulated:3"}},
}


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", CHEAP)
    yield
    torch._dynamo.reset()


def compile_run(directory: Path, name: str = "llama", **sections: Any) -> Config:
    return make_run(directory, name, **{**sections, "model": {**BLOCKS, **sections.get("model", {})}})


def assert_equal(config: Config) -> list[str]:
    """Verify a run, and return what it said of compiling."""
    said: list[str] = []
    result = verify(config, announce=said.append)
    assert (result.equal, result.differing) == (True, [])
    told = [line for line in said if line.startswith("compile: ")]
    assert told
    assert not any("runs as it is" in line for line in told), told
    # Before the first step; inputs of a resident run need no gradients above what is frozen, which is another form.
    streamed = said[said.index("streamed run") : said.index("resident run")]
    assert not any(line.startswith("compile: ") for line in streamed), streamed
    return told


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_is_resident_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert_equal(compile_run(tmp_path, name, **ONE_FORM))


@pytest.mark.parametrize("case", RUNS)
def test_whatever_becomes_of_what_forwards_make(case: str, tmp_path: Path) -> None:
    assert_equal(compile_run(tmp_path, **RUNS[case]))


@pytest.mark.slow
@OF_INDUCTOR
def test_a_later_start_finds_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, whole; but not for vectors of another length, with which torch's cache goes wrong."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found = []
    for capability in (None, None, "another"):
        if capability is not None:
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", partial(str, capability))
        torch._dynamo.reset()
        counters.clear()
        assert_equal(compile_run(tmp_path, **ONE_FORM))
        found.append({**counters["aot_autograd"], **counters["inductor"]})
    first, second, elsewhere = found
    assert (
        first["autograd_cache_miss"] == second["autograd_cache_hit"] == elsewhere["autograd_cache_miss"] > 0
    )
    assert not second.get("autograd_cache_miss", 0) + second.get("autograd_cache_bypass", 0)
    assert not second.get("fxgraph_cache_miss", 0) + second.get("fxgraph_cache_bypass", 0)


def test_what_is_timed_is_what_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled block computes compiled where there is a graph only, and a block as it is needs none."""
    graphs: set[bool] = set()
    run = compiled.CompiledKind.__call__

    def note(kind: compiled.CompiledKind, *args: Any, **kwargs: Any) -> Any:
        graphs.add(torch.is_grad_enabled())
        return run(kind, *args, **kwargs)

    prepared = prepare(RunSpec.of(compile_run(tmp_path, **ONE_FORM), tmp_path), lambda _: None)
    monkeypatch.setattr(compiled.CompiledKind, "__call__", note)
    measure_rates(prepared, tmp_path)
    assert graphs == {True}
    with compiled.as_they_are(prepared.split.model):
        measure_rates(prepared, tmp_path)
    assert graphs == {True, False}


@pytest.mark.slow
@OF_INDUCTOR
@pytest.mark.parametrize(
    ("name", "case"),
    [("llama", "all kept"), ("gpt2", "recomputed"), ("qwen3", "all kept"), ("llama", "a frozen prefix")],
)
def test_kernels_of_inductor_too(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    assert_equal(compile_run(tmp_path, name, **RUNS[case]))


def test_each_kind_is_compiled_once_for_a_form(tmp_path: Path) -> None:
    """Three layers, the trial, both runs: one form where a microbatch is one short sequence."""
    assert len(assert_equal(compile_run(tmp_path, **ONE_FORM))) == 1


def test_what_torch_takes_for_a_mode_of_this_thread_keeps_nothing_from_being_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own sign is one for all threads, and stays set where modes of two of them have overlapped."""
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", True)
    assert_equal(compile_run(tmp_path, **ONE_FORM))


def test_a_block_that_is_no_graph_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward

    def by_value(mlp: LlamaMLP, hidden: Tensor) -> Tensor:
        return forward(mlp, hidden) if hidden.sum() < 1e9 else hidden  # the line

    monkeypatch.setattr(LlamaMLP, "forward", by_value)
    said: list[str] = []
    assert verify(compile_run(tmp_path), announce=said.append).equal
    told = [line for line in said if line.startswith("compile: ")]
    line = by_value.__code__.co_firstlineno + 1
    assert len(told) == 1
    assert told[0].startswith("compile: LlamaDecoderLayer runs as it is: ")
    assert told[0].endswith(f", at {__file__}:{line}")


@OF_INDUCTOR
def test_without_a_compiler_blocks_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    assert verify(compile_run(tmp_path), announce=said.append).equal
    told = [line for line in said if line.startswith("compile: ")]
    assert len(told) == 1
    assert "LlamaDecoderLayer runs as it is: " in told[0]
    assert "compiler" in told[0]


def test_the_memory_of_a_compiled_block_is_measured(tmp_path: Path) -> None:
    """Its forward makes what a backward needs, and nothing within can be kept by itself or left out."""
    plain, compiled_one = (
        prepare(
            RunSpec.of(make_run(tmp_path / mode, model={"compile": mode}), tmp_path), lambda _: None
        ).measured
        for mode in ("off", "blocks")
    )
    assert 0 < compiled_one.saved_bytes[1] < plain.saved_bytes[1]
    assert compiled_one.forward_bytes[1] > compiled_one.saved_bytes[1]
    assert compiled_one.graph_matters
    assert not compiled_one.needed
    assert not any(map(any, (*compiled_one.attention, *compiled_one.products)))
