"""Models whose labels are not tokens: a class, a number or several marks for each row."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import outsize
from wrapped.loops import assert_equal, gradients, wrapped

ROWS = 4
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(1, 64, (ROWS, 12), generator=torch.Generator().manual_seed(3))
PIXELS = torch.rand(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(4))
CLASSES = torch.tensor([2, 0, 1, 2])


def text(kind: str, **settings: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=64, pad_token_id=0, **SIZES, **{"num_labels": 3, **settings}
    )
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
    return made.eval()  # without dropout, whose masks no resident loop draws in the same order


def image() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SIZES)
    return transformers.ViTForImageClassification(config).eval()


CASES = {
    "llama": (lambda: text("llama"), {"input_ids": IDS, "labels": CLASSES}),
    "bert": (
        lambda: text("bert"),
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": CLASSES},
    ),
    "as many rows as tokens": (lambda: text("bert"), {"input_ids": IDS[:, :ROWS], "labels": CLASSES}),
    "as many rows as classes": (lambda: text("bert"), {"input_ids": IDS[:3], "labels": CLASSES[:3]}),
    "regression": (lambda: text("bert", num_labels=1), {"input_ids": IDS, "labels": torch.rand(ROWS)}),
    "several marks": (
        lambda: text("bert", problem_type="multi_label_classification"),
        {"input_ids": IDS, "labels": torch.eye(3)[CLASSES]},
    ),
    "vit": (image, {"pixel_values": PIXELS, "labels": CLASSES}),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_resident_model(name: str, count: int):
    make, batch = CASES[name]
    plain, rows = make(), len(batch["labels"])
    want: Tensor = torch.zeros(())
    for part in range(count):
        own = {key: value.tensor_split(count)[part] for key, value in batch.items()}
        loss = plain(**own).loss / (rows / len(own["labels"]))
        loss.backward()
        want = want + loss.detach()
    with wrapped(make(), microbatches=count) as model:
        got = model(**batch)
        assert torch.equal(got.loss, want)
        got.loss.backward()
        assert_equal(gradients(model), gradients(plain))


def test_an_error_of_the_model_itself_says_nothing_of_settings_that_the_caller_has_not():
    with (
        wrapped(text("bert")) as model,
        pytest.raises(outsize.ModelError, match="run on such a batch by itself") as raised,
    ):
        model(input_ids=IDS, labels=torch.zeros(ROWS, 7))
    assert "data.seq_len" not in str(raised.value)
