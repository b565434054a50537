from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from outsize.model.build import build_skeleton
from outsize.model.split import split
from outsize.model.walk import Boundaries
from outsize.runtime.trial import measured
from outsize.runtime.trial.calibrate import calibrate
from outsize.runtime.trial.measured import Measured
from outsize.runtime.trial.trial_pass import UnitOrderError
from runtime.oddities import VOCAB, WIDTH, Odd, Sparse


def skeleton(name: str, **changes: Any) -> nn.Module:
    config = zoo.make_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    return build_skeleton(config)


def measure(
    model: nn.Module, seq_len: int = 16, num_sequences: int = 1, chunk_tokens: int | None = None
) -> Measured:
    generator = torch.Generator().manual_seed(0)
    vocabulary = VOCAB if isinstance(model, Odd | Sparse) else zoo.VOCAB_SIZE

    def make_inputs(rows: int, length: int) -> Mapping[str, Tensor]:
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    parts = split(model)
    with Boundaries(parts.modules) as boundaries:
        return calibrate(
            parts,
            boundaries.forwards,
            make_inputs,
            num_sequences=num_sequences,
            seq_len=seq_len,
            chunk_tokens=chunk_tokens,
        )


def test_a_block_s_input_is_one_hidden_state():
    measured = measure(skeleton("llama"), seq_len=16, num_sequences=3)
    hidden = 3 * 16 * 32 * 4
    assert measured.boundary_bytes == (0, hidden, hidden, hidden, hidden)  # ids carry no gradient
    assert all(forward >= hidden for forward in measured.forward_bytes[:-1])
    pairs = zip(measured.forward_bytes, measured.backward_bytes, strict=True)
    assert all(backward > forward for forward, backward in pairs)
    assert not measured.inputs_shared


def test_blocks_of_one_kind_are_measured_once_and_are_alike():
    measured = measure(skeleton("llama"))
    assert len(set(measured.backward_bytes[1:4])) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral"])
def test_long_sequences_are_extrapolated_from_short_ones(name: str, monkeypatch: pytest.MonkeyPatch):
    """Never to less than it is, nor much more: what does not grow with the length (gradients) counts as if it did."""
    model = skeleton(name, max_position_embeddings=1024, n_positions=1024)
    scaled = measure(model, seq_len=700)
    monkeypatch.setattr(measured, "SHORT_LENGTHS", (700,))
    direct = measure(model, seq_len=700)
    assert scaled.boundary_bytes == direct.boundary_bytes
    for ours, theirs in zip(scaled.backward_bytes, direct.backward_bytes, strict=True):
        assert theirs <= ours <= 1.25 * theirs


def test_chunks_need_less_than_all_logits():
    model = skeleton("llama", vocab_size=5000)
    whole = measure(model, seq_len=64)
    chunked = measure(model, seq_len=64, chunk_tokens=8)
    assert chunked.backward_bytes[-1] < whole.backward_bytes[-1] / 3
    assert chunked.backward_bytes[:-1] == whole.backward_bytes[:-1]


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "gpt_neox", "gpt2", "phi", "gemma2", "cohere", "bert"]
)
def test_chunking_is_for_losses_that_are_plain_cross_entropy(name: str):
    assert measure(skeleton(name)).plain_head == (name not in ("gemma2", "cohere", "bert"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mamba", *zoo.MASKED])
def test_encoders_predict_the_token_in_its_place(name: str):
    if name == "albert":  # repeats its layers
        return
    assert measure(skeleton(name), seq_len=48).shifted != zoo.is_masked(name)


@pytest.mark.parametrize(("name", "expected"), [("llama", False), ("doge", True)])
def test_a_graph_matters_where_it_changes_bits(name: str, expected: bool):
    """doge makes its attention mask out of parameters: torch has another kernel for masks that need a gradient."""
    assert measure(skeleton(name)).graph_matters is expected


def test_inputs_of_several_units_are_found():
    torch.manual_seed(0)
    assert measure(Odd()).inputs_shared
    assert not measure(Sparse()).inputs_shared


def test_what_the_model_s_own_code_keeps_is_counted():
    torch.manual_seed(0)
    assert measure(Odd(), seq_len=64).held_bytes >= 64 * WIDTH


def test_nothing_is_left_behind():
    """Parameters lie on meta again, random numbers go on as before, and no boundary changed anything."""
    model = skeleton("llama")
    before = dict(model.named_parameters())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = measure(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        parameter is before[name] and parameter.is_meta for name, parameter in model.named_parameters()
    )
    assert measure(model) == first


class Jumping(Sparse):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.blocks[0](torch.zeros(*input_ids.shape, WIDTH), input_ids)
        return super().forward(input_ids, labels)


def test_the_order_of_units_that_are_called_out_of_turn_is_told():
    with pytest.raises(UnitOrderError, match="does not call unit embed in its turn") as raised:
        measure(Jumping())
    assert raised.value.calls[:3] == ("blocks.0", "embed", "blocks.0")


@pytest.mark.parametrize(
    ("name", "users"), [("llama", {4}), ("llama_tied", {0, 4}), ("gpt2", {0, 1, 4}), ("bloom", {0, 1, 4})]
)
def test_units_that_add_to_the_gradient_of_the_rest_are_known(name: str, users: set[int]):
    """The final norm runs before the head, position tables before the first block; tied tables are both ends'."""
    assert measure(skeleton(name)).rest_users == users


def test_units_that_draw_random_numbers_are_noticed():
    assert not measure(zoo.build("gpt2", dropout=0.0)).draws_random
    assert measure(zoo.build("gpt2", dropout=0.1)).draws_random
    assert measure(zoo.build("llama", dropout=0.1)).draws_random
