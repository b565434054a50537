"""A model's units from its Hugging Face ``config.json`` alone: parameters, bytes and FLOPs. No torch, no weights.

For the decoder families whose shapes their configs tell: Llama, Mistral, Qwen2, Qwen3, and
their mixtures of experts (Mixtral, Qwen2-MoE, Qwen3-MoE). A trained run takes its units from the
model itself (`model.split`); this is for asking about models that are not there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec, pack_unit

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe"),
)
_Rows = list[tuple[str, tuple[int, ...], bool, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a config decides sizes.

    Attributes:
        hidden: width of the residual stream.
        layers: blocks.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        intermediate: width of a dense MLP.
        vocabulary: tokens.
        experts: of a block; 0 where its MLP is dense.
        active_experts: that a token visits.
        expert_intermediate: width of an expert.
        shared_intermediate: width of the expert that every token visits; 0 for none.
        dense_layers: blocks of a mixture whose MLP is dense nevertheless.
        tied: whether the head's weights are the embedding's.
        attention_bias: whether query, key and value have biases.
        head_norms: whether queries and keys are normalised per head.
        mlp_parts: in how many parts an MLP takes the tokens of a microbatch.
        fused: whether norms and gated activations, but of experts, are one kernel each, as Liger's.
        trains: whether weights have gradients; what is frozen needs no inputs of its products.
        gate_up_trains: whether the experts' first stack has; a stack with adapters has gradients of all of it, too.
        down_trains: whether their second stack has.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    tied: bool = False
    attention_bias: bool = False
    head_norms: bool = False
    mlp_parts: int = 1
    fused: bool = False
    trains: bool = True
    gate_up_trains: bool = True
    down_trains: bool = True

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    def is_mixture(self, layer: int) -> bool:
        """Whether the MLP of ``layer`` is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def has_dense(self) -> bool:
        """Whether any MLP is none of experts."""
        return any(not self.is_mixture(layer) for layer in range(self.layers))


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a ``config.json`` tells.

    Raises:
        ModelError: another family, or a size is missing or not positive.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"no sizes from the config of a {family!r} model; there are {', '.join(FAMILIES)}")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        shape = Shape(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            experts=experts,
            active_experts=int(config["num_experts_per_tok"]) if experts else 0,
            expert_intermediate=int(
                config["intermediate_size" if family == "mixtral" or not experts else "moe_intermediate_size"]
            ),
            shared_intermediate=int(config["shared_expert_intermediate_size"])
            if family == "qwen2_moe"
            else 0,
            dense_layers=_dense_layers(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", family in ("qwen2", "qwen2_moe"))),
            head_norms=str(family).startswith("qwen3"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the config of this {family} model lacks a size: {error}") from error
    if min(shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.vocabulary) < 1:
        raise ModelError(f"the config of this {family} model has a size below one")
    return shape


def spec_from_config(config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Return the units of the model that ``config`` describes: embedding, blocks, head, and the rest where tied.

    Raises:
        ModelError: see `read_shape`.
    """
    shape = read_shape(config)
    table = (shape.vocabulary, shape.hidden)
    embedding: _Rows = [("model.embed_tokens.weight", table, True, True)]
    norm: _Rows = [("model.norm.weight", (shape.hidden,), True, False)]
    head: _Rows = [("lm_head.weight", table, True, True)]
    units: list[UnitSpec] = [pack_unit(0, "model.embed_tokens", "embedding", [] if shape.tied else embedding)]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        units.append(pack_unit(layer + 1, name, "block", _block(shape, layer, name)))
    units.append(pack_unit(len(units), "lm_head", "head", [] if shape.tied else head))
    units.append(pack_unit(len(units), "rest", "rest", [*(embedding if shape.tied else []), *norm]))
    return ModelSpec(units=tuple(units), dtype=dtype)


def forward_flops(shape: Shape, sequences: int, seq_len: int) -> tuple[float, ...]:
    """Return the FLOPs of each streamed unit's forward for one microbatch.

    A multiply-add counts two. Attention is causal, so half of the scores count: 2 x s^2 x width for scores and
    values together. The embedding looks up and counts nothing.
    """
    tokens = sequences * seq_len
    width, kv_width = shape.attention_width, shape.kv_heads * shape.head_dim
    projections = 2 * shape.hidden * (2 * width + 2 * kv_width)
    attention = tokens * projections + 2 * sequences * seq_len**2 * width
    blocks = (float(attention + mlp) for mlp in mlp_flops(shape, sequences, seq_len)[1:-1])
    return (0.0, *blocks, 2.0 * tokens * shape.hidden * shape.vocabulary)


def mlp_flops(shape: Shape, sequences: int, seq_len: int) -> tuple[float, ...]:
    """Return the FLOPs of the MLP, or of router and experts, of each streamed unit's forward."""
    per_token = []
    for layer in range(shape.layers):
        if shape.is_mixture(layer):
            active = shape.active_experts * shape.expert_intermediate + shape.shared_intermediate
            per_token.append(6 * shape.hidden * active + 2 * shape.hidden * shape.experts)
        else:
            per_token.append(6 * shape.hidden * shape.intermediate)
    return (0.0, *(float(sequences * seq_len * flops) for flops in per_token), 0.0)


def attention_flops(shape: Shape, sequences: int, seq_len: int) -> tuple[float, ...]:
    """Return the FLOPs of the attention of each streamed unit: causal scores, and what they weigh."""
    scores = 2.0 * sequences * seq_len**2 * shape.attention_width
    return (0.0, *[scores] * shape.layers, 0.0)


def routed_flops(shape: Shape, sequences: int, seq_len: int) -> tuple[float, ...]:
    """Return the FLOPs of the products of tokens with the experts that they visit, of each streamed unit's forward."""
    routed = 6.0 * sequences * seq_len * shape.hidden * shape.active_experts * shape.expert_intermediate
    return (0.0, *(routed * shape.is_mixture(layer) for layer in range(shape.layers)), 0.0)


def recompute_flops(shape: Shape, sequences: int, seq_len: int) -> tuple[float, ...]:
    """Return the FLOPs of what a backward needs of each streamed unit's forward.

    A dense block ends in a product whose result nothing but the next block needs. That of a mixture is weighed by the
    router, whose backward needs it. An MLP in parts makes nothing that its backward does not make again.
    """
    flops = forward_flops(shape, sequences, seq_len)
    if shape.mlp_parts > 1:
        mlps = mlp_flops(shape, sequences, seq_len)
        return tuple(whole - mlp for whole, mlp in zip(flops, mlps, strict=True))
    last = 2.0 * sequences * seq_len * shape.hidden * shape.intermediate
    embedding, *blocks, head = flops
    needed = (block - last * (not shape.is_mixture(layer)) for layer, block in enumerate(blocks))
    return (embedding, *needed, head)


def _dense_layers(config: Mapping[str, Any]) -> frozenset[int]:
    every = int(config.get("decoder_sparse_step") or 1)
    layers = range(int(config["num_hidden_layers"]))
    return frozenset(config.get("mlp_only_layers") or ()) | {u for u in layers if (u + 1) % every}


def _block(shape: Shape, layer: int, name: str) -> _Rows:
    """Return the parameters of a block."""
    hidden, width, kv_width = shape.hidden, shape.attention_width, shape.kv_heads * shape.head_dim
    rows: _Rows = []

    def add(suffix: str, *sizes: int) -> None:
        rows.append((f"{name}.{suffix}", sizes, True, len(sizes) > 1))

    for projection, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        add(f"self_attn.{projection}.weight", size, hidden)
        if shape.attention_bias:
            add(f"self_attn.{projection}.bias", size)
    add("self_attn.o_proj.weight", hidden, width)
    if shape.head_norms:
        add("self_attn.q_norm.weight", shape.head_dim)
        add("self_attn.k_norm.weight", shape.head_dim)
    if shape.is_mixture(layer):
        add("mlp.gate.weight", shape.experts, hidden)
        add("mlp.experts.gate_up_proj", shape.experts, 2 * shape.expert_intermediate, hidden)
        add("mlp.experts.down_proj", shape.experts, hidden, shape.expert_intermediate)
        if shape.shared_intermediate:
            add("mlp.shared_expert.gate_up_proj", 2 * shape.shared_intermediate, hidden)
            add("mlp.shared_expert.down_proj", hidden, shape.shared_intermediate)
            add("mlp.shared_expert_gate.weight", 1, hidden)
    else:
        for projection in ("gate_proj", "up_proj"):
            add(f"mlp.{projection}.weight", shape.intermediate, hidden)
        add("mlp.down_proj.weight", hidden, shape.intermediate)
    add("input_layernorm.weight", hidden)
    add("post_attention_layernorm.weight", hidden)
    return rows
