"""Generation of a wrapped model: transformers' own, token for token what the resident model writes."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

import outsize
import zoo
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.split import split
from outsize.runtime.device.device import EmulatedDevice
from outsize.wrapped.module import runner_of
from support import save_model
from wrapped.loops import ROOM, streamed_backward, wrapped

PLACES = [("cpu", "host"), ("cpu", "disk"), ("emulated:1", "host"), ("emulated:1", "disk")]
STREAMED = PLACES[1:]
# Of the tiny llama, 118 kB: room for its slots, a forward of the prompts below, and little else.
TIGHT = 165_000
ARCHITECTURES = ["llama", "llama_tied", "gemma3_text", "gpt2", "qwen3_moe", "qwen3_next", "opt", "mamba"]


def prompts(rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Token ids of several lengths, padded on the left."""
    ids = zoo.batch("llama", num_sequences=rows, seq_len=length)["input_ids"].clone()
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, :row] = 0
        mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def write(model: nn.Module, **settings: Any) -> Tensor:
    torch.manual_seed(3)
    asked = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, **prompts(), **settings}
    return model.generate(**asked)


def tight(name: str) -> int:
    """A budget with room for two units, the rest, and a forward of the prompts."""
    units = split(plain(name)).spec.units
    rest = sum(unit.weight_bytes("fp32") for unit in units if unit.kind == "rest")
    forward = {"qwen3_next": 1_250_000, "mamba": 150_000}.get(name, 90_000)
    return 2 * max(unit.weight_bytes("fp32") for unit in units if unit.kind == "block") + rest + forward


def plain(name: str = "llama") -> nn.Module:
    return zoo.build(name).eval()


def frozen(name: str = "llama") -> nn.Module:
    return plain(name).requires_grad_(False)


def test_a_forward_that_finds_no_room_gives_back_what_it_has_opened(monkeypatch: pytest.MonkeyPatch):
    with wrapped(frozen(), device="emulated:1") as model:
        closed = []
        with monkeypatch.context() as patch:
            patch.setattr("outsize.wrapped.inferring.Source", lambda *given: 1 / 0)
            close = EmulatedDevice.close
            patch.setattr(EmulatedDevice, "close", lambda device: closed.append(close(device)))
            with pytest.raises(ZeroDivisionError):
                write(model)
        assert closed
        assert torch.equal(write(model), write(plain()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_the_resident_model(name: str):
    want = write(plain(name))
    for device, home in STREAMED:
        with wrapped(frozen(name), device=device, home=home, device_memory=tight(name)) as model:
            assert torch.equal(write(model), want)
            assert torch.equal(write(model), want)  # with what the first call has left there


@pytest.mark.parametrize(("device", "home"), STREAMED[:2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_cache": False},
        {"do_sample": True, "top_k": 20, "temperature": 1.5},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 2},
        {"repetition_penalty": 1.3, "min_new_tokens": 4},
    ],
    ids=str,
)
def test_every_way_of_choosing_tokens_works_unmodified(device: str, home: str, settings: dict[str, Any]):
    want = write(plain(), **settings)
    budget = TIGHT + 55_000 * (settings.get("num_beams", 1) - 1)
    with wrapped(frozen(), device=device, home=home, device_memory=budget) as model:
        assert torch.equal(write(model, **settings), want)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_model_generates_as_its_checkpoint_says_when_loaded_and_saved(home: str, tmp_path: Path):
    model = plain()
    model.generation_config.eos_token_id = [5, 7]
    save_model(model, tmp_path / "model")
    loaded = outsize.load(tmp_path / "model", trainable=False, home=home, store_dir=tmp_path / "home", **ROOM)
    assert loaded.generation_config.eos_token_id == [5, 7]
    loaded.save_pretrained(tmp_path / "saved")
    runner_of(loaded).close()
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [5, 7]


def test_a_key_that_means_nothing_to_a_wrapped_model_is_refused():
    with pytest.raises(ConfigError, match="commits: it is of outsize train only"):
        outsize.wrap(plain(), device="cpu", commits="none")


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_context_of_the_caller_will_do(within: Callable[[], Any]):
    want = write(plain())
    with wrapped(frozen(), home="disk", device_memory=TIGHT) as model, within():
        assert torch.equal(write(model), want)


def test_each_pass_moves_what_is_not_kept_and_no_more():
    with wrapped(frozen(), home="disk", device_memory=125_000) as model, torch.no_grad():
        found = []
        for _ in range(6):
            model(**prompts())
            found.append(runner_of(model).inference_statistics())
        assert found[1].num_streamed > 0
        assert found[1].num_kept > 0
        assert found[5].num_passes == 6
        for before, after in pairwise(found[2:]):
            rows = 8192 * 3 * 7  # of the embedding: at most a stretch for each token
            unsteady = 2 * 32768  # what was ahead
            assert abs(after.bytes_moved - before.bytes_moved - after.bytes_per_pass) <= rows + unsteady
        assert found[5].bytes_moved - found[1].bytes_moved < 4 * (found[1].bytes_per_pass + rows) + unsteady


def test_a_model_that_fits_is_read_once():
    with wrapped(frozen(), home="disk") as model:
        write(model)
        first = runner_of(model).inference_statistics()
        write(model)
        second = runner_of(model).inference_statistics()
        assert first is not None
        assert second is not None
        assert second.num_streamed == 0
        rows = 8192 * (3 * 7 + 5 * 3)
        assert second.bytes_moved - first.bytes_moved <= rows


def test_units_give_way_to_a_cache_that_grows():
    with wrapped(frozen(), home="disk", device_memory=200_000) as model:
        kept = []
        for tokens in (6, 56):
            write(model, max_new_tokens=tokens, eos_token_id=None)
            found = runner_of(model).inference_statistics()
            assert found is not None
            kept.append(found.num_kept)
        assert kept[0] > kept[1]
        assert torch.equal(
            write(model, max_new_tokens=56, eos_token_id=None),
            write(plain(), max_new_tokens=56, eos_token_id=None),
        )


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_cache_that_leaves_no_room_rests_on_the_host(name: str, settings: dict[str, Any]):
    long = {"max_new_tokens": 24, "eos_token_id": None, **settings}
    want = write(plain(name), **long)
    with wrapped(frozen(name), device="emulated:1") as model:
        write(model, **long)
        roomy = runner_of(model).inference_statistics()
    assert roomy is not None
    assert roomy.cache_bytes_moved == 0
    units = split(plain(name)).spec.units
    rest = sum(unit.weight_bytes("fp32") for unit in units if unit.kind == "rest")
    largest = max(unit.weight_bytes("fp32") for unit in units if unit.kind == "block")
    budget = rest + largest + roomy.workspace_bytes + int(0.85 * roomy.cache_bytes)
    with wrapped(frozen(name), device="emulated:1", device_memory=budget) as model:
        assert torch.equal(write(model, **long), want)
        found = runner_of(model).inference_statistics()
        assert found is not None
        assert found.cache_bytes_moved > 0
        if not settings and name == "llama":  # it appends: what goes down is the news, once each
            up = roomy.cache_bytes * found.num_passes
            assert found.cache_bytes_moved < up


@pytest.mark.parametrize(("device", "home"), STREAMED)
def test_a_device_too_small_for_a_unit_is_refused_before_anything_begins(device: str, home: str):
    with (
        wrapped(frozen(), device=device, home=home, device_memory="20KiB") as model,
        pytest.raises(InfeasiblePlanError) as refusal,
    ):
        write(model)
    assert refusal.value.short_by["device"] > 0


def test_an_exception_in_a_layer_is_the_layers_own_and_the_next_call_works():
    model = frozen()
    calls = []

    def break_once(module: nn.Module, args: Any) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise ValueError("broken")

    model.model.layers[1].mlp.register_forward_pre_hook(break_once)
    with wrapped(model, home="disk", device_memory=TIGHT):
        with pytest.raises(ValueError, match="broken"):
            write(model)
        assert torch.equal(write(model), write(plain()))


@pytest.mark.parametrize(("device", "home"), PLACES)
def test_generation_between_steps_of_training_sees_the_weights_of_now(device: str, home: str):
    batch = zoo.batch("llama")
    reference, model = zoo.build("llama"), zoo.build("llama")
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    with wrapped(model, device=device, home=home):
        optimizer = outsize.AdamW(model, lr=1e-2)
        for _ in range(2):
            streamed_backward(model, batch)
            reference(**batch).loss.backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            assert torch.equal(write(model), write(reference))
        model.load_state_dict(plain().state_dict())
        assert torch.equal(write(model), write(plain()))


@pytest.mark.parametrize(("device", "home"), PLACES)
def test_a_frozen_model_without_a_gradient_is_streamed_as_well(device: str, home: str):
    """Encoders: embeddings of sentences."""
    batch = prompts()
    with torch.no_grad():
        want = zoo.build("bert").eval()(**batch, output_hidden_states=True).hidden_states[-1]
    with wrapped(frozen("bert"), device=device, home=home, device_memory="400KiB") as model, torch.no_grad():
        assert torch.equal(model(**batch, output_hidden_states=True).hidden_states[-1], want)
        moved = runner_of(model).inference_statistics()
        assert (moved is None) == ((device, home) == ("cpu", "host"))


def test_a_model_loaded_from_files_writes_what_it_would(tmp_path: Any):
    save_model(plain(), tmp_path / "model")
    model = outsize.load(
        tmp_path / "model", dtype="fp32", home="disk", trainable=False, **{**ROOM, "device_memory": TIGHT}
    )
    try:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert str(model.device) == "cpu"
        assert torch.equal(write(model), write(plain()))
    finally:
        outsize.unwrap(model)


def test_ids_outside_the_vocabulary_are_refused():
    with wrapped(frozen(), home="disk", device_memory=TIGHT) as model, pytest.raises(IndexError, match="97"):
        model.generate(torch.tensor([[3, 97]]), max_new_tokens=2)


def test_parameters_replaced_after_wrap_are_noticed():
    def changed(model: nn.Module) -> nn.Module:
        model.model.norm.weight = nn.Parameter(torch.linspace(-1, 1, 32), requires_grad=False)
        return model

    want, other = write(plain()), write(changed(plain()))
    with wrapped(frozen(), home="disk", **{**ROOM, "device_memory": TIGHT}) as model:
        assert torch.equal(write(model), want)
        assert torch.equal(write(changed(model)), other)
    runner_of(outsize.wrap(model, home="disk")).close()
    with pytest.raises(ConfigError):
        write(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("device", "home"), STREAMED[:2])
def test_adapters_of_peft_write_as_well(device: str, home: str):
    import peft

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(zoo.build("llama"), config).eval()

    want = write(adapted())
    with wrapped(adapted(), device=device, home=home, device_memory=260_000) as model:
        assert torch.equal(write(model), want)


def ids_of(rows: int, length: int) -> dict[str, Tensor]:
    ids = zoo.batch("llama", num_sequences=rows, seq_len=length)["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(("device", "home"), STREAMED)
@pytest.mark.parametrize(
    "sizes", [((1, 1), (1, 40)), ((1, 40), (1, 1)), ((2, 3), (1, 40), (4, 9), (1, 2), (2, 44))], ids=str
)
def test_prompts_of_any_size_come_in_any_order(device: str, home: str, sizes: tuple[tuple[int, int], ...]):
    """What a small forward took says little of a large one."""
    resident = plain()
    with wrapped(frozen(), device=device, home=home, device_memory=260_000) as model:
        for rows, length in sizes:
            asked = {**ids_of(rows, length), "max_new_tokens": 4, "eos_token_id": None}
            assert torch.equal(write(model, **asked), write(resident, **asked))


@pytest.mark.parametrize(("device", "budget"), [("cpu", 150_000), ("emulated:1", 130_000)])
def test_a_cache_that_will_outgrow_the_device_is_refused_before_the_first_token(device: str, budget: int):
    """With the number of tokens that has room, which then runs to its end."""
    steps: list[Tensor] = []

    def watch(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        steps.append(ids)
        return torch.zeros(len(ids), dtype=torch.bool)

    asked = {**ids_of(1, 4), "eos_token_id": None, "stopping_criteria": [watch]}
    with wrapped(frozen(), device=device, home="disk", device_memory=budget) as model:
        with pytest.raises(InfeasiblePlanError, match="lower max_new_tokens to") as refusal:
            write(model, **asked, max_new_tokens=4000)
        assert steps == []
        assert refusal.value.short_by["device"] > 0
        fits = int(str(refusal.value).partition("max_new_tokens to ")[2].partition(",")[0])
        with pytest.raises(InfeasiblePlanError, match=f"max_new_tokens to {fits},"):
            write(model, **asked, max_new_tokens=fits + 1)
        if device == "cpu":
            assert write(model, **asked, max_new_tokens=fits).shape == (1, 4 + fits)


@pytest.mark.parametrize(("beams", "together"), [(1, True), (2, False)])
def test_a_cache_that_will_outgrow_the_host_is_refused_before_the_first_token(beams: int, together: bool):
    """What has room runs to its end; beams, of which transformers makes a copy, need twice as much."""
    sizes = {"num_hidden_layers": 12, "max_position_embeddings": 512}
    asked = {**ids_of(1, 4), "eos_token_id": None, "num_beams": beams}
    own = {name: value for name, value in asked.items() if name not in ("input_ids", "attention_mask")}

    def write_on(model: nn.Module, count: int) -> Tensor:
        if not together:
            return write(model, **asked, max_new_tokens=count)
        ids = asked["input_ids"].tolist()
        (new,) = outsize.generate(model, ids, max_new_tokens=count, **own)
        return torch.tensor([ids[0] + new])

    room = {"device_memory": 140_000 + 30_000 * beams, "host_memory": 300_000 * beams}
    model = zoo.small_llama(**sizes).requires_grad_(False).eval()
    with wrapped(model, device="emulated:1", home="disk", **room):
        with pytest.raises(InfeasiblePlanError, match="raise device_memory or host_memory") as refusal:
            write_on(model, 150)
        assert refusal.value.short_by.keys() == {"host"}
        fits = int(str(refusal.value).partition("max_new_tokens to ")[2].partition(",")[0])
        with pytest.raises(InfeasiblePlanError, match=f"max_new_tokens to {fits},"):
            write_on(model, fits + 1)
        plain = zoo.small_llama(**sizes).eval()
        assert torch.equal(write_on(model, fits), write(plain, **asked, max_new_tokens=fits))
        moved = runner_of(model).inference_statistics()
        assert moved is not None
        assert moved.cache_bytes_moved > 0


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize(
    "said",
    [{"temperature": 0.9, "top_p": 0.6}, {"early_stopping": True}, {"min_p": 0.1, "top_k": 3}],
    ids=str,
)
def test_a_generation_config_that_transformers_would_not_write_is_saved_as_it_was(
    home: str, said: dict[str, Any], tmp_path: Path
):
    """It is no part of what was trained, and the last save is too late to find fault with it."""
    save_model(plain(), tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": 5, **said}))
    loaded = outsize.load(tmp_path / "model", home=home, store_dir=tmp_path / "home", **ROOM)
    try:
        loaded.save_pretrained(tmp_path / "saved")
        found = json.loads((tmp_path / "saved/generation_config.json").read_text())
        assert said.items() <= found.items()
        assert found["eos_token_id"] == loaded.generation_config.eos_token_id == 5
    finally:
        runner_of(loaded).close()
