"""Scores of many texts: the numbers of transformers, and weights that come up once for a wave."""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import outsize
from contracts.device_contract import encode
from outsize.codecs.codec import open_codec
from outsize.errors import ConfigError, DataError
from outsize.wrapped.module import runner_of
from outsize.wrapped.writing.scoring import Logprobs, ScoredText, ScoringFigures, score
from support import DTYPES, make_model_dir

pytestmark = pytest.mark.filterwarnings("ignore")
ARCHITECTURES = (
    *("llama_tied", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "gpt2", "falcon_alibi"),
    *("phi3", "olmo2", "deepseek_v3", "mamba", "rwkv"),
)
ROOM: dict[str, Any] = {"device": "cpu", "home": "disk", "device_memory": "600KiB"}


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    """Loads models to be scored by, which end with the test."""
    with contextlib.ExitStack() as stack:

        def loaded(place: Path, **settings: Any) -> Any:
            model = outsize.load(place, trainable=False, **{**ROOM, "dtype": "fp32", **settings})
            stack.callback(runner_of(model).close)
            return model

        yield loaded


def make_texts(lengths: Sequence[int] = range(4, 44, 3)) -> list[ScoredText]:
    """Texts of lengths that differ, so that each is computed as it is alone; of some only the end counts."""
    draws = random.Random(0)
    return [
        ScoredText([draws.randrange(3, 200) for _ in range(length)], draws.randrange(1, length))
        for length in lengths
    ]


def expected(model: Any, texts: list[ScoredText]) -> list[Logprobs]:
    """What transformers says, text by text."""
    found = []
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([text.ids])).logits[0, text.start - 1 : -1]
        targets = torch.tensor(text.ids[text.start :])
        logprobs = logits.float().log_softmax(-1)[range(len(targets)), targets]
        found.append(Logprobs(logprobs.tolist(), bool((logits.argmax(-1) == targets).all())))
    return found


def assert_equal(got: list[Logprobs], want: list[Logprobs]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (list(one.tokens), one.is_greedy) == (list(other.tokens), other.is_greedy)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_those_of_transformers(name: str, dtype: str, tmp_path: Path, load: Callable[..., Any]):
    """Number by number."""
    place = make_model_dir(tmp_path / "model", name)
    texts = make_texts()
    model = load(place, dtype=dtype)
    figures = ScoringFigures()
    got = list(score(model, texts, wave_tokens=120, figures=figures))
    assert_equal(
        got, expected(AutoModelForCausalLM.from_pretrained(place, dtype=DTYPES[dtype]).eval(), texts)
    )
    assert figures.num_tokens == sum(len(text.ids) for text in texts)
    assert figures.num_waves > 1
    moved = runner_of(model).inference_statistics()
    assert moved is not None
    if name != "rwkv":  # whose forward sets a number on the model: one sequence goes behind the other
        assert moved.num_passes <= figures.num_waves  # and not one for each group


def test_texts_of_one_length_are_scored_as_transformers_scores_the_batch(
    tmp_path: Path, load: Callable[..., Any]
):
    place = make_model_dir(tmp_path / "model", "llama")
    texts = make_texts([9] * 5)
    resident = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        want = resident(torch.tensor([text.ids for text in texts])).logits
    got = score(load(place, dtype="bf16"), texts, want="logits")
    for text, row, logits in zip(texts, want, got, strict=True):
        assert torch.equal(logits, row[text.start - 1 : -1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adapters", "nf4", "adapters over nf4"])
def test_scores_of_adapters_and_of_quantised_weights(
    kind: str, dtype: str, tmp_path: Path, load: Callable[..., Any]
):
    """Number by number those of PEFT, over the weights that the codec gives back."""
    place = make_model_dir(tmp_path / "model", "llama")
    resident: Any = AutoModelForCausalLM.from_pretrained(place, dtype=DTYPES[dtype]).eval()
    if "nf4" in kind:
        codec = open_codec("nf4")
        for name, parameter in resident.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                codec.decode(encode(codec, parameter.data), parameter.data)
    if "adapters" in kind:
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        resident = peft.get_peft_model(resident, adapters).eval()
        resident.save_pretrained(tmp_path / "adapters")
    place, base = (tmp_path / "adapters", place) if "adapters" in kind else (place, None)
    settings = {"base_codec": "nf4"} if "nf4" in kind else {}
    model = load(place, base=base, dtype=dtype, device_memory="4MiB", **settings)
    assert_equal(list(score(model, make_texts())), expected(resident, make_texts()))


@pytest.mark.parametrize("home", ["disk", "host"])
def test_hidden_states_and_embeddings_are_of_a_model_without_its_head(
    tmp_path: Path, load: Callable[..., Any], home: str
):
    place = make_model_dir(tmp_path / "model", "llama")
    texts = [list(range(5, 5 + length)) for length in (3, 8, 20)]
    model = load(place, head="none", home=home)
    resident = AutoModel.from_pretrained(place).eval()
    embeddings = score(model, texts, want="embeddings")
    for text, hidden, embedding in zip(texts, score(model, texts, want="hidden"), embeddings, strict=True):
        with torch.no_grad():
            want = resident(torch.tensor([text])).last_hidden_state[0]
        assert torch.equal(hidden, want)
        assert torch.equal(embedding, want.mean(0))
    with pytest.raises(Exception, match="writes no text"):
        next(score(model, texts))


def test_what_cannot_be_scored_is_refused(tmp_path: Path, load: Callable[..., Any]):
    model = load(make_model_dir(tmp_path / "model"))
    with pytest.raises(ConfigError, match='head="none"'):
        next(score(model, [[5, 6]], want="hidden"))
    with pytest.raises(DataError, match="text 1 has 0 tokens"):
        list(score(model, [[5, 6], []]))
    with pytest.raises(DataError, match="text 0 has 1 tokens"):
        list(score(model, [[5]]))
    for given in ("words", {"input_ids": [5, 6]}, [5.0, 6.0], 5):
        with pytest.raises(DataError, match=r"text 0 is .*, not a list of tokens"):
            list(score(model, [given]))  # type: ignore[list-item]
        with pytest.raises(DataError, match=r"prompt 0 is .*, not a list of tokens"):
            outsize.generate(model, [given], max_new_tokens=1)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="want is 'logprob'; write logprobs, "):
        next(score(model, [[5, 6]], want="logprob"))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="more than the 64 positions"):
        list(score(model, [[5] * 65]))


@pytest.mark.parametrize("room", ["350KiB", "600KiB"])
def test_what_is_computed_together_leaves_room_for_a_unit_to_come_up(
    room: str, tmp_path: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """Or each unit would be waited for, where the same texts in smaller groups hide it."""
    monkeypatch.setattr("outsize.wrapped.writing.scoring.FIRST_TOKENS", 32)
    texts = make_texts([32] * 64)
    model = load(make_model_dir(tmp_path / "model", "llama"), device_memory=room)
    list(score(model, texts[:1], wave_tokens=32))
    list(score(model, texts, wave_tokens=64 * 32))
    scan = runner_of(model)._scan
    assert scan is not None
    assert scan._scan.num_slots != 1


def test_waves_grow_until_computing_takes_longer_than_moving(tmp_path: Path, load: Callable[..., Any]):
    """And those that take more than there is are run in halves."""
    model = load(make_model_dir(tmp_path / "model"), device_memory="300KiB")
    figures = ScoringFigures()
    texts = [list(range(5, 35))] * 200
    got = list(score(model, texts, figures=figures))
    assert all(one.tokens == pytest.approx(got[0].tokens, abs=2e-5) for one in got)
    assert figures.num_texts == 200
    assert math.isclose(figures.tokens_per_s * figures.seconds, 6000)
    assert figures.predicted_tokens_per_s > 0
