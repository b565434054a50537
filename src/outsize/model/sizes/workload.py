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
    recompute_flops,
    routed_flops,
)

# Bytes per logit of a chunk of the loss: their softmax, and in the backward two more of that size, fp32.
LOGIT_BYTES = 12
# ids and labels, int64, for all microbatches of a step.
ID_BYTES = 16


def count_workload(
    shape: Shape, dtype: str, *, sequences: int, seq_len: int, chunk_tokens: int = 512
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
    mlp = 6.0 * tokens * shape.hidden * shape.intermediate
    head = LOGIT_BYTES * chunk * shape.vocabulary + tokens * shape.hidden * (8 + 2 * size)
    return Workload(
        tokens=tokens,
        forward_flops=flops,
        recompute_flops=recompute_flops(shape, sequences, seq_len),
        gradient_flops=tuple(2 * forward for forward in flops),  # two products for each of the forward's
        again_flops=(0.0, *[mlp] * shape.layers, 0.0) if shape.mlp_parts > 1 else (),
        routed_flops=routed_flops(shape, sequences, seq_len) if shape.experts else (),
        boundary_bytes=(tokens * 8, *[boundary] * (shape.layers + 1)),
        forward_workspace_bytes={"embedding": boundary, "block": tokens * _block_forward(shape, size)},
        backward_workspace_bytes={
            "embedding": table + 2 * boundary,
            "block": tokens * _block_backward(shape, size),
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
        held_bytes=tokens * (size * 2 * (shape.head_dim + shape.hidden) + ID_BYTES),
    )


def _block_forward(shape: Shape, size: int) -> int:
    """Return the bytes per token alive in a forward that keeps nothing.

    In the MLP: gate, up, their product, two residuals. In the attention: queries, output, keys and values for each of
    their heads and for each head, and what they were made of.
    """
    mlp = 2 * shape.hidden + 3 * _widest_mlp(shape) // shape.mlp_parts
    attention = 4 * shape.attention_width + 2 * shape.kv_heads * shape.head_dim + shape.hidden
    return size * max(mlp, attention) + _routing(shape, size)


def _block_backward(shape: Shape, size: int) -> int:
    """Return the bytes per token alive when the backward of a block's MLP begins: all that the block keeps.

    An MLP in parts has the gradients of what it received and returned besides. Where there are many of them, the norm
    before it needs more: five tensors in fp32.
    """
    width, kv_width = shape.attention_width, shape.kv_heads * shape.head_dim
    mlp = 6 * _widest_mlp(shape) // shape.mlp_parts + 2 * shape.hidden * (shape.mlp_parts > 1)
    kept = size * (4 * shape.hidden + 2 * width + 2 * kv_width + mlp)
    norms = 12 * shape.hidden + (size + 4) * (width + kv_width) * shape.head_norms
    after_mlp = _block_saved(shape, size, mixture=False) + 20 * shape.hidden if shape.mlp_parts > 1 else 0
    return max(kept + norms, after_mlp) + _routing(shape, size)


def _block_saved(shape: Shape, size: int, mixture: bool) -> int:
    """Return the bytes per token that a block's forward makes and its backward needs, the block's input apart.

    Of a norm: what it is taken of, in fp32 (the first one's is the input itself where that is fp32), the same
    normalised, and its output, an operand of the products behind it. Of the attention: queries, keys and values with
    their positions, its output, and one fp32 for each head, its log-sum-exp. Of an MLP: the operands of its product and
    of its last matrix. A mixture has these for each expert that a token visits, with a copy of the token and what the
    expert returns.
    """
    width, kv_width = shape.attention_width, shape.kv_heads * shape.head_dim
    norms = 2 * (shape.hidden * (4 + 2 * size) + 4) - (4 * shape.hidden if size == 4 else 0)
    if shape.head_norms:
        norms += (size + 4) * (width + kv_width) + 4 * (shape.heads + shape.kv_heads)
    attention = size * (2 * width + 2 * kv_width) + 4 * shape.heads
    if not mixture:
        return norms + attention + size * 4 * shape.intermediate * (shape.mlp_parts == 1)
    active = shape.active_experts * shape.expert_intermediate + shape.shared_intermediate
    return norms + attention + size * 4 * active + _routing(shape, size)


def _attention_returned(shape: Shape, size: int) -> int:
    """Return the bytes per token of the attention's output, and of one fp32 for each head, its log-sum-exp."""
    return size * shape.attention_width + 4 * shape.heads


def _products_returned(shape: Shape, size: int, mixture: bool) -> int:
    """Return the bytes per token of what attention and products return, the last product of a dense MLP apart.

    Queries, keys, values and the projection behind them, gate and up; of a mixture those of each expert that a token
    visits, with what the expert returns, and the router's scores.
    """
    width = shape.attention_width + 2 * shape.kv_heads * shape.head_dim + shape.hidden
    if not mixture:
        mlp = 2 * shape.intermediate * (shape.mlp_parts == 1)
    else:
        active = shape.active_experts * shape.expert_intermediate + shape.shared_intermediate
        returned = shape.active_experts + (shape.shared_intermediate > 0)
        mlp = 2 * active + returned * shape.hidden + shape.experts
    return _attention_returned(shape, size) + size * (width + mlp)


def _widest_mlp(shape: Shape) -> int:
    """Return the width that a token goes through, in the block where it is largest."""
    active = shape.active_experts * shape.expert_intermediate + shape.shared_intermediate
    has_dense = any(not shape.is_mixture(layer) for layer in range(shape.layers))
    return max(active, shape.intermediate * has_dense)


def _routing(shape: Shape, size: int) -> int:
    """Return the bytes per token of its copies for each expert, and of the router's scores in fp32."""
    if not shape.experts:
        return 0
    return 3 * size * shape.active_experts * shape.hidden + 12 * shape.experts
