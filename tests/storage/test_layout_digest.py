"""Which homes are taken for which models: by what lies where, through versions of the digest, and by nothing else."""

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optim.reference import ADAFACTOR
from outsize.config import Config
from outsize.config.load import parse_config
from outsize.errors import StorageError
from outsize.model.sizes.model_spec import ModelSpec, PartKind, pack_part, pack_unit
from outsize.optim.optimizer_spec import StateLayout
from outsize.storage.home_layout import is_laid_out, layout_digest
from outsize.training.run import train

HOMES = Path(__file__).parent / "homes"


def model(**changes: Any) -> ModelSpec:
    """Two units, one of them with a frozen part; ``changes`` are to the first tensor."""
    part = pack_part(PartKind(plane="frozen", dtype="bf16"), [("b.base", (16, 8))])
    units = (
        pack_unit(0, "a", "block", [("a.w", (64, 32), True, True), ("a.b", (64,), True, False)]),
        pack_unit(1, "b", "block", [("b.w", (8, 8), True, True)], (part,)),
    )
    first, *others = units[0].tensors
    changed = replace(units[0], tensors=(replace(first, **changes), *others))
    return ModelSpec(units=(changed, units[1]), dtype="bf16")


@pytest.mark.parametrize(
    "change", [{"decay": 0.5}, {"lr_scale": 0.9}, {"muon": False}, {"trainable": False}], ids=str
)
def test_what_moves_no_byte_is_in_no_digest(change: dict[str, Any]):
    assert layout_digest(model(**change)) == layout_digest(model())


def test_what_lies_elsewhere_has_another_digest():
    factors = StateLayout(
        dtype="bf16", masters="split", num_moments=0, state_of=ADAFACTOR, temporaries=3
    ).planes
    own = [range(2048), range(0)]
    digests = [
        layout_digest(model()),
        layout_digest(model(name="a.other")),
        layout_digest(model(shape=(32, 64))),
        layout_digest(model(offset=4096)),
        layout_digest(replace(model(), dtype="fp16")),
        layout_digest(replace(model(), units=model().units[::-1])),
        layout_digest(model(), StateLayout(dtype="bf16", masters="split").planes),
        layout_digest(model(), StateLayout(dtype="bf16", masters="split", moments="int8").planes),
        layout_digest(model(), StateLayout(dtype="bf16", gradients="none").planes),
        layout_digest(model(), factors),
        layout_digest(model(trainable=False), factors),
        layout_digest(model(), None, own),
        layout_digest(model(), None, own, ("weights", "gradient")),
    ]
    assert len(set(digests)) == len(digests)
    assert all(is_laid_out(digest, model()) == (number == 0) for number, digest in enumerate(digests))


# --- homes of versions before -----------------------------------------------------------------------------------

# Digest and planes of each home as its version wrote them after step 2 of 4.
FIRST = {"full": "6274c8a3efcc82a4a080fafd2d430c4f", "lora": "c55a8abc37517e744026f95e82d77d43"}


def run_of_the_first_version(root: Path, kind: str, **optimizer: Any) -> Config:
    """Write what the run trained from, and its home as version 0.2.0 left it after step 2."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("llama", **sizes, **heads, bos_token_id=None, eos_token_id=0)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(root / "model")
    np.save(root / "tokens.npy", np.arange(1000, dtype=np.int32) * 7 % 32)
    (root / "run/store").mkdir(parents=True)
    packed = (HOMES / f"0.2.0-{kind}.bin.xz").read_bytes()
    (root / "run/store/home.bin").write_bytes(lzma.decompress(packed))
    steps = {"steps": 4, "tokens_per_step": 64, "microbatches": 2, "seed": 3, "resume": "auto"}
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "model"), "dtype": "fp32" if kind == "full" else "bf16"},
        "data": {"path": str(root / "tokens.npy"), "seq_len": 16},
        "train": {**steps, "run_dir": str(root / "run")},
        "optimizer": {"lr": 1e-3, "schedule": "constant", **optimizer},
        "memory": {"device": "cpu", "home": "disk", "device_memory": "64MiB", "host_memory": "64MiB"},
    }
    if kind == "lora":
        sections["train"]["method"] = "lora"
        sections["lora"] = {"r": 2, "lora_alpha": 4}
    return parse_config(sections)


@pytest.mark.parametrize("kind", FIRST)
def test_a_home_of_the_first_version_is_gone_on_from(kind: str, tmp_path: Path):
    settings = {"layer_decay": 0.9} if kind == "full" else {}
    config = run_of_the_first_version(tmp_path, kind, **settings)
    home = tmp_path / "run/store/home.bin"
    assert FIRST[kind].encode() in home.read_bytes()
    said: list[str] = []
    assert train(config, announce=said.append).steps == 4
    assert f"resumed from step 2 in {home}" in said
    assert not [line for line in said if "goes on with" in line]


def test_a_home_of_the_first_version_says_what_was_set_otherwise(tmp_path: Path):
    config = run_of_the_first_version(tmp_path, "full", layer_decay=0.8)
    with pytest.raises(StorageError, match=r"goes on with optimizer.layer_decay=0\.8, and had 0\.9; resume"):
        train(config)
