"""Generations in flight together: the tokens of each alone, and weights that come up once for all."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import outsize
from outsize.errors import ConfigError, DataError, InfeasiblePlanError
from outsize.inference.inference_session import InferenceStatistics
from outsize.inference.waves import PAST_BREAK_EVEN, LoadHiding
from outsize.wrapped.module import runner_of
from support import make_model_dir

pytestmark = pytest.mark.filterwarnings("ignore")
ROOM: dict[str, Any] = {"device": "cpu", "home": "disk", "device_memory": "600KiB"}
NUM_NEW = 7


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    """Loads models that write, which end with the test."""
    with contextlib.ExitStack() as stack:

        def loaded(place: Path, **settings: Any) -> Any:
            model = outsize.load(place, trainable=False, **{**ROOM, "dtype": "fp32", **settings})
            stack.callback(runner_of(model).close)
            return model

        yield loaded


def make_prompts(count: int = 12) -> list[list[int]]:
    draws = random.Random(0)
    return [[draws.randrange(3, 200) for _ in range(draws.choice([2, 5, 9]))] for _ in range(count)]


def alone(place: Path, prompts: list[list[int]], seed: int | None = None, **choice: Any) -> list[list[int]]:
    """What transformers writes after each prompt by itself."""
    resident = AutoModelForCausalLM.from_pretrained(place).eval()
    written = []
    for number, prompt in enumerate(prompts):
        if seed is not None:
            torch.manual_seed(seed + number)
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        choice = {"pad_token_id": 0, **choice}
        out = resident.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, **choice)
        written.append(out[0, len(prompt) :].tolist())
    return written


@pytest.mark.parametrize(
    "name",
    ["llama_tied", "gemma2", "qwen3_moe", "gpt2", "falcon_alibi", "mamba", "deepseek_v3", "recurrent_gemma"],
)
def test_tokens_are_those_of_each_prompt_alone(name: str, tmp_path: Path, load: Callable[..., Any]):
    place = make_model_dir(tmp_path / "model", name)
    prompts = make_prompts()
    model = load(place)
    for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 20}):
        ends = [tokens[2] for tokens in alone(place, prompts[:2], 5, **settings)]  # some end before others
        want = alone(place, prompts, 5, eos_token_id=ends, **settings)
        got = outsize.generate(
            model, prompts, max_new_tokens=NUM_NEW, in_flight=5, seed=5, eos_token_id=ends, **settings
        )
        assert got == want
        assert len({len(tokens) for tokens in got}) > 1


@pytest.mark.parametrize("device", ["cpu", "emulated:1"])
def test_weights_come_up_once_for_all_in_flight(device: str, tmp_path: Path, load: Callable[..., Any]):
    place = make_model_dir(tmp_path / "model", "llama")
    prompts, moved = make_prompts(), []
    for in_flight in (1, 6):
        model = load(place, device=device, device_memory="150KiB")
        got = outsize.generate(
            model, prompts, max_new_tokens=NUM_NEW, in_flight=in_flight, do_sample=False, eos_token_id=None
        )
        assert got == alone(place, prompts, do_sample=False)
        told = runner_of(model).inference_statistics()
        assert told is not None
        moved.append(told.bytes_moved)
        assert told.num_passes <= (
            len(prompts) * NUM_NEW + 2 if in_flight == 1 else 40
        )  # those that measure, too
    assert moved[1] < moved[0] / 2


def test_batches_fly_together_and_are_handed_over_in_order(tmp_path: Path, load: Callable[..., Any]):
    place = make_model_dir(tmp_path / "model", "llama")
    prompts = make_prompts()
    numbers: list[int] = []
    got = outsize.generate(
        load(place),
        prompts,
        max_new_tokens=NUM_NEW,
        batch_size=3,
        in_flight=2,
        seed=1,
        do_sample=True,
        on_tokens=lambda number, tokens: numbers.append(number),
    )
    assert got == alone(place, prompts, 1, do_sample=True)
    assert numbers == list(range(len(prompts)))


ENDS = list(range(3, 130))


@pytest.mark.parametrize(
    "choice",
    [
        {"min_length": 11, "eos_token_id": ENDS},
        {"encoder_repetition_penalty": 3.0, "pad_token_id": 9},
        {"eos_token_id": torch.tensor(ENDS)},
        {"generation_config": GenerationConfig(do_sample=True, temperature=1.6)},
        {"generation_config": GenerationConfig(eos_token_id=ENDS, min_length=9)},
        {"generation_config": GenerationConfig(num_beams=2)},
    ],
    ids=str,
)
def test_what_is_said_beside_the_checkpoint_counts_as_what_it_says(
    tmp_path: Path, load: Callable[..., Any], choice: dict[str, Any]
):
    """In batches of prompts of several lengths, whose padding is no text, and by a config that is given."""
    place = make_model_dir(tmp_path / "model", "llama")
    prompts = make_prompts(6)
    got = outsize.generate(load(place), prompts, max_new_tokens=NUM_NEW, batch_size=3, seed=5, **choice)
    want = alone(place, prompts, 5, **choice)
    ends = set(ENDS if "eos_token_id" in str(choice) else ())
    ended = [next((n for n, token in enumerate(row, 1) if token in ends), None) for row in want]
    assert got == [row[:end] for row, end in zip(want, ended, strict=True)]


def test_only_as_many_fly_as_have_room(tmp_path: Path, load: Callable[..., Any]):
    """And one that has none by itself is refused as ever."""
    place = make_model_dir(tmp_path / "model", "llama")
    prompts = [[5, 6, 7]] * 40
    model = load(place, device_memory="160KiB")
    got = outsize.generate(model, prompts, max_new_tokens=40, in_flight=40, do_sample=False)
    assert len({tuple(tokens) for tokens in got}) == 1
    told = runner_of(model).inference_statistics()
    assert told is not None
    assert 0 < told.cache_bytes < 160 * 1024
    with pytest.raises(InfeasiblePlanError, match="lower max_new_tokens"):
        outsize.generate(model, [[5] * 8] * 6, max_new_tokens=50, batch_size=6)


def test_beams_and_encoders_write_as_alone(tmp_path: Path, load: Callable[..., Any]):
    place = make_model_dir(tmp_path / "model", "llama")
    prompts = make_prompts(5)
    got = outsize.generate(load(place), prompts, max_new_tokens=NUM_NEW, in_flight=3, num_beams=3)
    want = alone(place, prompts, num_beams=3)
    assert got == [tokens[: len(one)] for tokens, one in zip(want, got, strict=True)]
    got = outsize.generate(load(place), prompts, max_new_tokens=NUM_NEW, seed=2, num_beams=2, do_sample=True)
    want = alone(place, prompts, 2, num_beams=2, do_sample=True)
    assert got == [tokens[: len(one)] for tokens, one in zip(want, got, strict=True)]


def test_what_cannot_be_generated_is_refused(tmp_path: Path, load: Callable[..., Any]):
    model = load(make_model_dir(tmp_path / "model"))
    with pytest.raises(ConfigError, match="num_return_sequences"):
        outsize.generate(model, [[5]], max_new_tokens=2, num_return_sequences=2)
    with pytest.raises(ConfigError, match="return_dict_in_generate"):
        outsize.generate(model, [[5]], max_new_tokens=2, return_dict_in_generate=True)
    several = GenerationConfig(do_sample=True, num_return_sequences=2)
    with pytest.raises(ConfigError, match="num_return_sequences"):
        outsize.generate(model, [[5]], max_new_tokens=2, generation_config=several)
    with pytest.raises(ConfigError, match="in_flight 0"):
        outsize.generate(model, [[5]], max_new_tokens=2, in_flight=0)
    with pytest.raises(DataError, match="an empty prompt"):
        outsize.generate(model, [[5], []], max_new_tokens=2)
    with pytest.raises(DataError, match="prompt 0 has 63 tokens"):
        outsize.generate(model, [[5] * 63], max_new_tokens=2)


def test_an_error_in_one_generation_ends_all_and_the_model_goes_on(tmp_path: Path, load: Callable[..., Any]):
    model = load(make_model_dir(tmp_path / "model"))

    def fails(ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        if ids.shape[1] > 7:
            raise KeyError("mine")
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyError, match="mine"):
        outsize.generate(model, [[5, 6]] * 4, max_new_tokens=9, stopping_criteria=[fails])
    assert len(outsize.generate(model, [[5, 6]] * 4, max_new_tokens=3, eos_token_id=None)[3]) == 3


def statistics(moved: int, stall_s: float, load_s: float) -> InferenceStatistics:
    names = dict.fromkeys(InferenceStatistics.__dataclass_fields__, 0)
    return InferenceStatistics(**{**names, "bytes_moved": moved, "stall_s": stall_s, "load_s": load_s})  # type: ignore[arg-type]


def test_enough_hides_loading_also_where_nobody_sees_how_long_copies_take():
    break_even = LoadHiding()
    break_even.took(1, 1.0, None, statistics(1000, 0.9, 0.001))  # a copy is handed over at once
    assert break_even.load_s == 1.0
    assert break_even.enough == int(PAST_BREAK_EVEN / 0.1)
    break_even.took(15, 1.6, statistics(1000, 0.9, 0.001), statistics(2000, 0.9, 0.002))
    assert break_even.enough == int(PAST_BREAK_EVEN / (1.6 / 15))
    resident = LoadHiding()
    resident.took(1, 1.0, statistics(5, 0.0, 0.0), statistics(5, 0.0, 0.0))
    assert resident.enough == 0
