"""Streamed training equals resident training on a device that is late wherever it may be.

What tests/gpu runs on any accelerator is not repeated here: this is the rest that a CPU runs, and a GPU of one machine
cannot.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
import zoo
from accelerator import exactness_set, late
from devices import DEVICE, DEVICES, IS_MADE_UP, ON_ACCELERATOR, needs_accelerator
from outsize.config import load_config
from outsize.data import Batch
from outsize.hardware.from_probe import read_machine
from outsize.model import compiled
from outsize.planner.program.stages import Stages
from outsize.planner.search.partition import partition
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import assert_same_end, in_dir, make_model_dir, make_run
from train.test_combinations import documents_in
from train.test_compile import CHEAP
from train.test_liger import LIGER, STAND_IN, forget
from wrapped.loops import gradients, wrapped

pytestmark = [pytest.mark.cuda, needs_accelerator, pytest.mark.filterwarnings("default")]
made_up = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
NUM_UNITS = 5  # of the models that are cut into stages
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def assert_equal_run(directory: Path, name: str = "llama", **sections: Any) -> None:
    memory = {"device": DEVICE, "home": "host", **sections.pop("memory", {})}
    result = verify(make_run(directory, name, memory=memory, **sections))
    assert result.loss_streamed == result.loss_resident
    assert result.differing == []


CASES: dict[str, dict[str, Any]] = {
    "on disk, few slots": {"memory": {"home": "disk", "slots": 2}},
    "codecs": {"model": {"dtype": "bf16"}, "transport": {"weights": "lossless4"}},
    "two units resident": {"memory": {"resident": 2}},
    "all resident, split masters": {"model": {"dtype": "bf16"}, "memory": {"resident": 99}},
    "two workers": {"memory": {"device": DEVICES}, "train": {"microbatches": 4}},
    "4 bits": {
        "model": {"dtype": "bf16"},
        "train": {"method": "lora"},
        "lora": {**LORA, "base_codec": "nf4", "table_codec": "int8"},
    },
    "4 bits on disk, dropout": {
        "model": {"dtype": "bf16"},
        "train": {"method": "lora"},
        "lora": {**LORA, "base_codec": "nf4-double", "lora_dropout": 0.25},
        "memory": {"home": "disk"},
    },
    "fp8, two workers": {
        "model": {"dtype": "bf16"},
        "train": {"method": "lora", "microbatches": 4},
        "lora": {**LORA, "base_codec": "fp8", "table_codec": "fp8"},
        "memory": {"device": DEVICES},
    },
    "two workers through the host": {
        "memory": {"device": DEVICES},
        "train": {"microbatches": 4},
        "parallel": {"handover": "host"},
    },
    "Muon, masters of 24 bits": {
        "model": {"dtype": "bf16"},
        "optimizer": {"name": "muon", "masters": "split24"},
        "memory": {"home": "disk"},
    },
    "Muon's products on the device, clipped": {
        "model": {"dtype": "bf16"},
        "optimizer": {"name": "muon", "ns_on": "device", "max_grad_norm": 0.05},
    },
    "Muon's products on the device, over the disk": {
        "model": {"dtype": "bf16"},
        "optimizer": {"name": "muon", "ns_on": "device", "clip": "unit"},
        "memory": {"home": "disk"},
    },
    "Muon's products on two devices, in rounds": {
        "optimizer": {"name": "muon", "ns_on": "device"},
        "memory": {"device": DEVICES},
        "train": {"microbatches": 4},
    },
    "adapters, products offloaded": {
        "model": {"dtype": "bf16"},
        "train": {"method": "lora"},
        "lora": LORA,
        "memory": {"activations": "offload-products"},
    },
    "experts, products kept": {
        "name": "qwen3_moe",
        "model": {"dtype": "bf16"},
        "memory": {"activations": "keep-products"},
    },
    "products wait below the device": {
        "model": {"dtype": "bf16"},
        "memory": {"activations": "offload-products", "home": "disk"},
    },
}


def test_where_muon_multiplies_is_timed_on_the_device_and_told(tmp_path: Path):
    said: list[str] = []
    train(make_run(tmp_path, optimizer={"name": "muon"}, memory={"device": DEVICE}), announce=said.append)
    (told,) = [line for line in said if line.startswith("optimizer.ns_on: auto is ")]
    place = told.removeprefix("optimizer.ns_on: auto is ").partition(":")[0]
    assert load_config(tmp_path / "run" / "config.yaml", environ={}).optimizer.ns_on == place
    rate = read_machine(tmp_path / "run" / "machine.json").gpus[0].products
    assert f"5 iterations on 32 x 48, {DEVICE}" in rate.source


@made_up
@pytest.mark.parametrize("name", exactness_set.CASES)
def test_the_set_of_the_seeds(name: str, request: pytest.FixtureRequest, tmp_path: Path):
    """What `bench/bench_seeds.py` tries over and over; `make test` tries it once."""
    options = request.config
    found = exactness_set.differences_of(
        name, options.getoption("lateness"), options.getoption("late_seed"), tmp_path
    )
    assert found == []


def test_adapters(tmp_path: Path):
    assert_equal_run(tmp_path, train={"method": "lora"}, lora=LORA)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_kind(case: str, tmp_path: Path):
    assert_equal_run(tmp_path, **CASES[case])


@pytest.mark.parametrize("activations", ["recompute", "keep-products"])
def test_kernels_of_liger_over_documents(activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a stand-in, whose kernels run where tensors lie on the device, and so not in the trial."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    forget()
    data = {"path": str(documents_in(tmp_path)), "pack": "documents"}
    assert_equal_run(tmp_path, model=LIGER, memory={"activations": activations}, data=data)
    forget()


@made_up
@pytest.mark.parametrize("backend", [CHEAP, pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Inductor makes no kernels for such a device: blocks run as they are there, which is told."""
    monkeypatch.setattr(compiled, "BACKEND", backend)
    said: list[str] = []
    sections = {"memory": {"device": DEVICE, "home": "host"}, "train": {"steps": 2, "microbatches": 4}}
    result = verify(make_run(tmp_path, model={"compile": "blocks"}, **sections), announce=said.append)
    torch._dynamo.reset()
    assert (result.equal, result.differing) == (True, [])
    assert any("compile: LlamaDecoderLayer, in" in line for line in said) == (backend != "inductor")
    assert any("runs as it is" in line for line in said) == (backend == "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in zoo.ARCHITECTURES if not zoo.is_masked(name)])
def test_every_family(name: str, dtype: str, tmp_path: Path):
    make_model_dir(tmp_path / "model", name, tie_word_embeddings=False)
    assert_equal_run(tmp_path, name, model={"dtype": dtype}, memory={"home": "disk", "slots": 2})


UP, FEW = ((0, 1), (1, 2), (2, 3), (3, 4)), ((4, 5), (2, 4), (0, 2))
STAGES = {
    "the head's input is handed on": ("llama", "peer", UP, FEW),
    "the rest's gradient is another device's": ("gpt2", "host", ((0, 4),), ((4, 5), (3, 4), (1, 3), (0, 1))),
    "a gradient lies where it goes": ("gpt2", "peer", UP, ((4, 5), (1, 4), (0, 1))),
}


@pytest.fixture
def cut_into(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have steps cut as a test says, and not by what this machine measures."""

    def cut(**spans: Any) -> None:
        def cut_so(*args: Any, **options: Any) -> Stages:
            return replace(partition(*args, **options), **spans)

        monkeypatch.setattr("outsize.planner.search.plan_stages.partition", cut_so)

    return cut


@pytest.mark.parametrize("devices", [DEVICES, f"{DEVICE},0" if ON_ACCELERATOR else DEVICE])
@pytest.mark.parametrize("case", STAGES)
def test_stages_between_two_devices(case: str, devices: str, cut_into: Callable[..., None], tmp_path: Path):
    """Of two devices, and of two workers on one, where no copy between them orders what they do."""
    name, handover, forward, backward = STAGES[case]
    make_model_dir(tmp_path / "model", name, tie_word_embeddings=False)
    cut_into(forward=forward, backward=backward, round_size=2, cursor=1)
    sections = {"parallel": {"handover": handover}, "train": {"microbatches": 4}}
    assert_equal_run(tmp_path, name, memory={"device": devices}, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_stages_cut_anywhere(seed: int, cut_into: Callable[..., None], tmp_path: Path):
    draw = random.Random(seed)
    name, fused = draw.choice(["llama", "gpt2", "llama_tied", "qwen3_moe"]), draw.randrange(1, NUM_UNITS)

    def spans() -> tuple[tuple[int, int], ...]:
        cuts = [0, *(at for at in range(1, fused) if draw.random() < 0.5), fused]
        return tuple(itertools.pairwise(cuts))

    backward = ((fused, NUM_UNITS), *reversed(spans()))
    cut_into(
        forward=spans(), backward=backward, round_size=draw.choice([1, 2, 3, 4]), cursor=draw.choice([0, 1])
    )
    sections = {
        "parallel": {"handover": draw.choice(["host", "peer"])},
        "model": {"dtype": draw.choice(["fp32", "bf16"])},
        "train": {"microbatches": 4},
    }
    make_model_dir(
        tmp_path / "model", name, **({} if name == "llama_tied" else {"tie_word_embeddings": False})
    )
    rate = (
        {"peer_gb_per_s": 8.0} if DEVICES.startswith("emulated") else {}
    )  # which copy to each other if told how fast
    assert_equal_run(tmp_path, name, memory={"device": DEVICES, **rate}, **sections)


@made_up
def test_devices_without_peer_access_go_through_the_host(tmp_path: Path):
    with late.no_peer_access():
        assert_equal_run(tmp_path, memory={"device": DEVICES}, train={"microbatches": 4})


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_run_goes_on_to_the_same_bits(home: str, tmp_path: Path):
    config = make_run(tmp_path, memory={"device": DEVICE, "home": home}, train={"steps": 3, "save_every": 1})
    train(in_dir(config, tmp_path / "whole"))
    train(in_dir(config, tmp_path / "parts", steps=2))
    train(in_dir(config, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@made_up
@pytest.mark.parametrize(("count", "resident"), [(1, 0), (2, 0), (2, 3), (1, 99)])
def test_a_wrapped_model_waits_for_inputs_that_are_on_their_way(count: int, resident: int):
    """Batches pinned and sent with non_blocking=True, as loops with ``pin_memory`` do, whatever is resident."""
    batches = [
        {key: value.pin_memory() for key, value in zoo.batch("llama", num_sequences=4, seed=seed).items()}
        for seed in range(3)
    ]
    found = []
    for waits, number in ((True, 0), (False, resident)):
        torch.manual_seed(0)
        seen: list[torch.Tensor] = []
        room = {"device": DEVICE, "home": "host", "resident": number}
        with wrapped(zoo.build("llama"), **room, microbatches=count) as model:
            optimizer = outsize.AdamW(model, lr=1e-3)
            for host in batches:
                stream = torch.late.current_stream()
                batch = {name: value.to(DEVICE, non_blocking=True) for name, value in host.items()}
                if waits:
                    stream.synchronize()
                loss = model(**batch).loss
                loss.backward()
                seen += [loss.detach().cpu(), *(value.cpu() for value in gradients(model).values())]
                optimizer.step()
                optimizer.zero_grad()
        found.append(seen)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_run_copies_its_batches_from_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pinned, pin = [], Batch.pinned

    def watched(batch: Batch) -> Batch:
        pinned.append(pin(batch))
        return pinned[-1]

    monkeypatch.setattr(Batch, "pinned", watched)
    train(make_run(tmp_path, memory={"device": DEVICE, "home": "host"}, train={"steps": 2}))
    assert len(pinned) >= 2
    for batch in pinned:
        assert batch.input_ids.is_pinned()
        assert batch.labels.is_pinned()
