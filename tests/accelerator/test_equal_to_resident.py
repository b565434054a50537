"""Streamed training equals resident training on a device that is late wherever it may be.

What tests/gpu runs on any accelerator is not repeated here: this is the rest that a CPU runs, and a GPU of one machine
cannot.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
import zoo
from accelerator import exactness_set, late
from devices import DEVICE, DEVICES, IS_MADE_UP, needs_accelerator
from outsize.data import Batch
from outsize.training.run import train
from outsize.training.verify import verify
from support import assert_same_end, in_dir, make_model_dir, make_run
from wrapped.loops import gradients, wrapped

pytestmark = [pytest.mark.cuda, needs_accelerator, pytest.mark.filterwarnings("default")]
made_up = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def assert_equal_run(directory: Path, name: str = "llama", **sections: Any) -> None:
    memory = {"device": DEVICE, "home": "host", **sections.pop("memory", {})}
    result = verify(make_run(directory, name, memory=memory, **sections))
    assert result.loss_streamed == result.loss_resident
    assert result.differing == []


CASES: dict[str, dict[str, Any]] = {
    "on disk, few slots": {"memory": {"home": "disk", "slots": 2}},
    "codecs": {"model": {"dtype": "bf16"}, "transport": {"weights": "lossless4"}},
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
    "two workers through the host": {
        "memory": {"device": DEVICES},
        "train": {"microbatches": 4},
        "parallel": {"handover": "host"},
    },
    "products wait below the device": {
        "model": {"dtype": "bf16"},
        "memory": {"activations": "offload-products", "home": "disk"},
    },
}


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in zoo.ARCHITECTURES if not zoo.is_masked(name)])
def test_every_family(name: str, dtype: str, tmp_path: Path):
    make_model_dir(tmp_path / "model", name, tie_word_embeddings=False)
    assert_equal_run(tmp_path, name, model={"dtype": dtype}, memory={"home": "disk", "slots": 2})


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
@pytest.mark.parametrize("count", [1, 2])
def test_a_wrapped_model_waits_for_inputs_that_are_on_their_way(count: int):
    """Batches pinned and sent with non_blocking=True, as loops with ``pin_memory`` do."""
    batches = [
        {key: value.pin_memory() for key, value in zoo.batch("llama", num_sequences=4, seed=seed).items()}
        for seed in range(3)
    ]
    found = []
    for waits in (True, False):
        torch.manual_seed(0)
        seen: list[torch.Tensor] = []
        with wrapped(zoo.build("llama"), device=DEVICE, home="host", microbatches=count) as model:
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
