import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outsize.model.tiled import IGNORE_INDEX, chunked_head_loss, shift_labels

VOCAB, WIDTH = 13, 6


def make(rows: int, length: int, seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Linear(WIDTH, VOCAB)
        hidden = torch.randn(rows, length, WIDTH)
        labels = torch.randint(0, VOCAB, (rows, length))
        labels[torch.rand(rows, length) < 0.3] = IGNORE_INDEX
    return head, hidden, labels


def test_labels_move_one_place_to_the_left_within_their_row():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift_labels(labels).tolist() == [2, 3, IGNORE_INDEX, 5, 6, IGNORE_INDEX]
    assert labels.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert shift_labels(torch.tensor([[7]])).tolist() == [IGNORE_INDEX]


def test_shifted_labels_mean_what_transformers_means():
    from transformers.loss.loss_utils import ForCausalLMLoss

    head, hidden, labels = make(3, 5)
    logits = head(hidden)
    ours = F.cross_entropy(logits.flatten(0, 1), shift_labels(labels), ignore_index=IGNORE_INDEX)
    assert torch.equal(ours, ForCausalLMLoss(logits, labels, VOCAB))


@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 7),
    chunk=st.integers(1, 25),
    divisor=st.sampled_from([1, 3.5]),
)
def test_chunks_of_any_size_give_loss_and_gradients_of_the_whole(
    rows: int, length: int, chunk: int, divisor: float
):
    head, hidden, labels = make(rows, length, seed=rows * 10 + length)
    targets = shift_labels(labels)
    loss, gradient = chunked_head_loss(head, hidden, targets, divisor, chunk)
    ours = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    leaf = hidden.clone().requires_grad_()
    logits = head(leaf).flatten(0, 1)
    whole = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
    whole.backward()
    assert torch.allclose(loss, whole, rtol=1e-5)
    assert torch.allclose(gradient, leaf.grad, atol=1e-6)
    for mine, parameter in zip(ours, head.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, atol=1e-5)


def test_one_chunk_is_the_whole_bit_for_bit():
    head, hidden, labels = make(2, 5)
    targets = shift_labels(labels)
    loss, gradient = chunked_head_loss(head, hidden, targets, 4.0, 10)
    leaf = hidden.clone().requires_grad_()
    logits = head(leaf).flatten(0, 1)
    whole = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum") / 4.0
    whole.backward()
    assert torch.equal(loss, whole)
    assert torch.equal(gradient, leaf.grad)


def test_the_result_has_no_history_and_the_input_is_left_alone():
    head, hidden, labels = make(2, 5)
    before = hidden.clone()
    with torch.no_grad():
        loss, gradient = chunked_head_loss(head, hidden, shift_labels(labels), 4.0, 3)
    assert not loss.requires_grad
    assert not gradient.requires_grad
    assert hidden.grad is None
    assert torch.equal(hidden, before)
    assert head.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_taken_in_fp32(dtype: torch.dtype):
    head, hidden, labels = make(2, 5)
    loss, gradient = chunked_head_loss(head.to(dtype), hidden.to(dtype), shift_labels(labels), 4.0, 3)
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)


def test_tokens_without_a_target_have_no_gradient():
    head, hidden, _ = make(2, 5)
    nothing = torch.full((10,), IGNORE_INDEX)
    loss, gradient = chunked_head_loss(head, hidden, nothing, 1.0, 3)
    assert loss == 0
    assert not gradient.any()
    assert not head.weight.grad.any()


def test_no_more_than_one_chunk_of_logits_exists():
    head, hidden, labels = make(3, 7)
    seen = []

    def watched(piece: Tensor) -> Tensor:
        seen.append(piece.shape[0])
        return head(piece)

    chunked_head_loss(watched, hidden, shift_labels(labels), 1.0, 8)
    assert seen == [8, 8, 5]


def test_a_frozen_head_still_passes_gradients_on():
    head, hidden, labels = make(2, 5)
    head.requires_grad_(False)
    _, gradient = chunked_head_loss(head, hidden, shift_labels(labels), 1.0, 4)
    assert gradient.any()
    assert head.weight.grad is None
