import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cli.command_line import status_of
from outsize.checkpoint.export import write_gguf
from outsize.errors import CheckpointError
from outsize.training.run import train
from support import make_model_dir, make_run

# Names of a block's weights, in the file too, of those whose rows the converter leaves in their order.
PLAIN = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes in the form of Llama 2's, which llama.cpp takes whatever its words are."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(directory)


def test_an_export_is_written_for_llama_cpp_too(tmp_path: Path, capsys: Any):
    save_tokenizer(make_model_dir(tmp_path / "model", num_hidden_layers=2))
    train(make_run(tmp_path, train={"steps": 1}))
    out, file = tmp_path / "out", tmp_path / "out.gguf"
    assert status_of("export", tmp_path / "run", "--out", out, "--gguf", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gguf"] == str(file)
    assert status_of("export", tmp_path / "run", "--out", tmp_path / "again", "--gguf", file) == 2
    assert "exists; name another file" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    weights = load_file(out / "model.safetensors")
    tensors = GGUFReader(tmp_path / "out.gguf").tensors
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in tensors}
    assert torch.equal(found["token_embd.weight"], weights["model.embed_tokens.weight"])
    for layer in range(2):
        for ours, theirs in PLAIN.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            assert torch.equal(found[f"blk.{layer}.{theirs}.weight"], weight), ours
        for ours, theirs in {"q_proj": "attn_q", "k_proj": "attn_k"}.items():
            weight = weights[f"model.layers.{layer}.self_attn.{ours}.weight"]
            rows = {tuple(row) for row in found[f"blk.{layer}.{theirs}.weight"].tolist()}
            assert rows == {tuple(row) for row in weight.tolist()}, ours


def test_a_model_that_llama_cpp_does_not_know_is_refused_by_it(tmp_path: Path):
    with pytest.raises(CheckpointError, match="made no out"):
        write_gguf(
            make_model_dir(tmp_path / "model"), tmp_path / "out.gguf"
        )  # its tokenizer is none of the known
    assert not list(tmp_path.glob("out.gguf*"))
