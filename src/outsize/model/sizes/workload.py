"""What a microbatch takes besides weights, from a config's sizes alone: FLOPs, activations, workspace. No torch.

A run measures these on its own model (`runtime.trial.calibrate`); this is for models that are not there. The counts
follow the tensors that Transformers' decoder blocks keep for a backward: in compute dtype the norms' outputs,
queries, keys, values, the attention's output and what the MLP makes, and in fp32 what the norms compute in.
`tests/model/test_workload.py` holds them to what is measured.
"""

from outsize.model.sizes.model_spec import ITEMSIZE, Workload
from outsize.model.sizes.spec_from_config import (
    Shape,
    attention_flops,
    forward_flops,
    mlp_flops,
    recompute_flops,
    routed_flops,
)

# Bytes per logit of a chunk of the loss: their softmax, and in the backward two more of that size, fp32.
LOGIT_BYTES = 12
# ids and labels, int64, for all microbatches of a step.
ID_BYTES = 16
_FP32 = 4


def count_workload(
    shape: Shape,
    dtype: str,
    *,
    sequences: int,
    seq_len: int,
    chunk_tokens: int = 512,
) -> Workload:
    """Return what a microbatch of ``sequences`` sequences of ``seq_len`` tokens takes.

    Args:
        shape: of the model.
        dtype: compute dtype.
        sequences: of the microbatch.
        seq_len: tokens of a sequence.
        chunk_tokens: tokens per chunk of the loss (``train.head_chunk_tokens``).
    """
    tokens, size = sequences * seq_len, ITEMSIZE[dtype]
    boundary = tokens * shape.hidden * size
    flops = forward_flops(shape, sequences, seq_len)
    table = shape.vocabulary * shape.hidden * size
    chunk = min(chunk_tokens, tokens)
    # The norm before the head is computed in fp32, twice as wide as the hidden state in all.
    head = LOGIT_BYTES * chunk * shape.vocabulary + tokens * shape.hidden * (8 + 2 * size)
    return Workload(
        tokens=tokens,
        forward_flops=flops,
        recompute_flops=recompute_flops(shape, sequences, seq_len),
        gradient_flops=tuple(2 * forward for forward in flops),  # two products for each of the forward's
        again_flops=mlp_flops(shape, sequences, seq_len) if shape.mlp_parts > 1 else (),
        routed_flops=routed_flops(shape, sequences, seq_len) if shape.experts else (),
        boundary_bytes=(tokens * 8, *[boundary] * (shape.layers + 1)),
        forward_workspace_bytes={
            "embedding": boundary,
            "block": tokens * max(_block_forward(shape, size), _experts_forward(shape, size)),
        },
        experts_forward_bytes=tokens * _experts_forward(shape, size),
        backward_workspace_bytes={
            "embedding": table + 2 * boundary,
            "block": _backward_workspace(shape, size, tokens),
            "head": head,
        },
        saved_bytes=(
            0,
            *(tokens * _block_saved(shape, size, shape.is_mixture(layer)) for layer in range(shape.layers)),
            0,
        ),
        attention_bytes=(0, *[tokens * _attention_returned(shape, size)] * shape.layers, 0),
        attention_flops=attention_flops(shape, sequences, seq_len),
        products_bytes=(
            0,
            *(
                tokens * _products_returned(shape, size, shape.is_mixture(layer))
                for layer in range(shape.layers)
            ),
            0,
        ),
        held_bytes=tokens * (size * 2 * shape.head_dim + ID_BYTES),
    )


def _backward_workspace(shape: Shape, size: int, tokens: int) -> int:
    """Return the bytes alive in a backward of a block when they are most, gradients of experts among them."""
    needed = tokens * _block_backward(shape, size)
    stacked = 2 if shape.gate_up_trains else shape.down_trains
    if not shape.experts or not stacked:
        return needed
    gradient = stacked * size * shape.experts * shape.hidden * shape.expert_intermediate
    return max(needed, tokens * _experts_backward(shape, size, stepping=True) + gradient)


def _not_kept(shape: Shape, size: int) -> int:
    """Return the bytes per token of what a frozen block does not keep: inputs of its norms and products, but the MLP's.

    Parts of the tokens need what went into the MLP all the same. A fused norm keeps its input, frozen or not.
    """
    if shape.trains:
        return 0
    if shape.fused:
        return size * 2 * shape.hidden
    norms = 3 * shape.hidden + shape.hidden * (shape.mlp_parts == 1)
    return size * (norms + shape.head_norms * (shape.attention_width + shape.kv_heads * shape.head_dim))


def _block_forward(shape: Shape, size: int) -> int:
    """Return the bytes per token alive in a forward that keeps nothing, experts apart.

    In the MLP: gate, up, their product, two residuals. In the attention: queries, output, keys and values for each of
    their heads and for each head, and what they were made of; or a norm of the queries, in fp32. Adapters of a frozen
    block have an fp32 copy of what comes into the attention.
    """
    width = shape.attention_width
    mlp = 2 * shape.hidden + 3 * _widest_dense(shape) // shape.mlp_parts
    attention = 4 * width + 2 * shape.kv_heads * shape.head_dim + shape.hidden
    norm = size * shape.hidden + (size + 8) * width + 8 * shape.heads if shape.head_norms and size < 4 else 0
    copy = 0 if shape.trains or size == _FP32 else _FP32 * shape.hidden
    return max(size * mlp, size * attention + copy, norm)


def _experts_forward(shape: Shape, size: int) -> int:
    """Return the same in experts: what an MLP has, of each visit, and copies of the token.

    Besides, what the parts return, and all of them.
    """
    if not shape.experts:
        return 0
    active, visits = _active(shape), shape.active_experts * shape.hidden
    inside = max(2 * active + 3 * visits, 3 * active + 2 * visits, 4 * active + visits)
    return size * 3 * shape.hidden + (size * inside + 12 * shape.experts) // shape.mlp_parts


def _block_backward(shape: Shape, size: int) -> int:
    """Return the bytes per token alive in a backward of a block, when they are most: all that it keeps, and more.

    That is when the MLP's backward begins. An MLP in parts has the gradients of what it received and returned besides.
    Where there are many of them, the norm before it needs more, five tensors in fp32, or attention does: gradients of
    queries, keys and values, or those of a norm of the queries, in fp32.
    """
    width, kv_width = shape.attention_width, shape.kv_heads * shape.head_dim
    mlp = 6 * _widest_dense(shape) // shape.mlp_parts + 2 * shape.hidden * (shape.mlp_parts > 1)
    kept = size * (4 * shape.hidden + 2 * width + 2 * kv_width + mlp) - _not_kept(shape, size)
    norms = 12 * shape.hidden + (size + 4) * (width + kv_width) * shape.head_norms
    before_mlp = _block_saved(shape, size, mixture=False, mlp=False)
    after_mlp = before_mlp + 20 * shape.hidden
    of_norm = 4 + size * (2 if shape.trains else shape.mlp_parts > 1)
    attention = before_mlp - of_norm * shape.hidden + size * (2 * width + 2 * kv_width + 3 * shape.hidden)
    if shape.head_norms:
        of_queries = (16 + size) * width - size * (shape.hidden + 4 * width + 4 * kv_width)
        attention += max(0, of_queries)
    dense = kept + norms if shape.has_dense else 0
    return max(dense, after_mlp, attention, _experts_backward(shape, size) if shape.experts else 0)


def _experts_backward(shape: Shape, size: int, stepping: bool = False) -> int:
    """Return the bytes per token alive in a backward of experts, of those of a part of the tokens what they make.

    Args:
        shape: of the model.
        size: of a number.
        stepping: whether at the moment when the gradient of their first weights is made; else when they are most.
    """
    active, visits = _active(shape), shape.active_experts * shape.hidden
    if stepping:
        inside = 2 * active + 2 * visits
    elif shape.gate_up_trains or shape.down_trains:
        inside = max(4 * active + 5 * visits, 5 * active + 4 * visits, 6 * active + 2 * visits)
        inside -= active * (not shape.down_trains) + visits * (not shape.gate_up_trains)
    else:
        inside = max(2 * active + 4 * visits, 6 * active - visits)
    rest = shape.hidden + shape.active_experts
    of_parts = size * (inside + rest) + 12 * shape.experts
    return (
        _block_saved(shape, size, mixture=False, mlp=False)
        + 3 * size * shape.hidden
        + of_parts // shape.mlp_parts
    )


def _block_saved(shape: Shape, size: int, mixture: bool, mlp: bool = True) -> int:
    """Return the bytes per token that a block's forward makes and its backward needs, the block's input apart.

    Without ``mlp`` what the MLP needs is apart, too; of one in parts it is nothing.

    Of a norm: what it is taken of, in fp32 (the first one's is the input itself where that is fp32), the same
    normalised, and its output, an operand of the products behind it. Of the attention: queries, keys and values with
    their positions, its output, and one fp32 for each head, its log-sum-exp. Of an MLP: the operands of its product and
    of its last matrix. A mixture has these for each expert that a token visits, with a copy of the token and what the
    expert returns. What is frozen needs no input of a product, and no normalised one.

    A fused norm keeps its input as it is, and a fused activation the two projections, not what lies between.
    """
    width, kv_width = shape.attention_width, shape.kv_heads * shape.head_dim
    if shape.fused:
        norms = 3 * size * shape.hidden + 8
    else:
        norms = 2 * (shape.hidden * (4 + 2 * size) + 4) - (4 * shape.hidden if size == 4 else 0)
    if shape.head_norms:
        each = size if shape.fused else size + 4
        norms += each * (width + kv_width) + 4 * (shape.heads + shape.kv_heads)
    attention = size * (2 * width + 2 * kv_width) + 4 * shape.heads - _not_kept(shape, size)
    if not mlp or shape.mlp_parts > 1:
        return norms + attention
    if not mixture:
        return norms + attention + size * (3 - shape.fused + shape.trains) * shape.intermediate
    num_copies = 1 + shape.trains + shape.gate_up_trains
    copies = num_copies * size * shape.active_experts * shape.hidden + 12 * shape.experts
    return norms + attention + size * (3 + shape.down_trains) * _active(shape) + copies


def _attention_returned(shape: Shape, size: int) -> int:
    """Return the bytes per token of the attention's output, and of one fp32 for each head, its log-sum-exp."""
    return size * shape.attention_width + 4 * shape.heads


def _products_returned(shape: Shape, size: int, mixture: bool) -> int:
    """Return the bytes per token of what attention and products return, the last product of a dense MLP apart.

    Queries, keys, values and the projection behind them, gate and up; of a mixture those of each expert that a token
    visits, with what the expert returns, and the router's scores.
    """
    width = shape.attention_width + 2 * shape.kv_heads * shape.head_dim + shape.hidden
    if shape.mlp_parts > 1:
        mlp = 0
    elif not mixture:
        mlp = 2 * shape.intermediate
    else:
        returned = shape.active_experts + (shape.shared_intermediate > 0)
        mlp = 2 * _active(shape) + returned * shape.hidden + shape.experts
    return _attention_returned(shape, size) + size * (width + mlp)


def _active(shape: Shape) -> int:
    """Return the width that a token goes through in experts."""
    return shape.active_experts * shape.expert_intermediate + shape.shared_intermediate


def _widest_dense(shape: Shape) -> int:
    """Return the width of a dense MLP; 0 where there is none."""
    return shape.intermediate * shape.has_dense
