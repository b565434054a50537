"""Vision-language models train by TRL's SFTTrainer on images, over less memory than their weights take, as in plain."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import outsize
import zoo_of_lists
from outsize.wrapped.module import runner_of
from support import save_model
from wrapped.loops import assert_equal

pytestmark = pytest.mark.filterwarnings("default")  # those of TRL are its own

SCRIPT = Path(__file__).parents[2] / "examples" / "trainers" / "sft_images.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()
BUDGET_BYTES = 7 * 2**19
WAYS = {
    "recomputed": f"device='emulated:1', device_memory={BUDGET_BYTES}, slots=2, activations='recompute'",
    "on two workers": "device='emulated:2', device_memory='1GiB'",
}
TEMPLATE = """\
{% for message in messages %}{{ message['role'] }}: \
{% for part in message['content'] %}{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}\
{% endfor %}"""
SIDES = {"height": 16, "width": 16}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per character, and the images of `zoo_of_lists` by their numbers."""
    names = {0: "<pad>", 1: "<bos>", 2: "<eos>", zoo_of_lists.IMAGE: "<image>", 151: "<boi>", 152: "<eoi>"}
    names |= dict(enumerate(("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"), 153))
    names |= {number + 5: chr(number + 32) for number in range(95)}
    vocabulary = {names.get(number, f"<{number}>"): number for number in range(160)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<3>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<3>", bos_token="<bos>",
        extra_special_tokens=special,
    )  # fmt: skip


def make_processor(name: str) -> Any:
    tokenizer = make_tokenizer()
    template = TEMPLATE.replace("IMAGE", {"gemma3": "'<boi>'"}.get(name, "'<image> '"))
    if name == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=SIDES)
        return transformers.Gemma3Processor(images, tokenizer, template, image_seq_length=4)
    if name == "llava_next":
        images = transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=SIDES, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]]
        )
        return transformers.LlavaNextProcessor(
            images, tokenizer, 4, "default", template, num_additional_image_tokens=1
        )
    if name == "smolvlm":  # whose own processor asks for num2words
        images = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
        )
        return transformers.Idefics3Processor(images, tokenizer, 4, template)
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    with pytest.MonkeyPatch.context() as patch:  # cannot be checked without torchvision: it is for videos
        patch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        return transformers.Qwen2_5_VLProcessor(images, tokenizer, None, template)


def run(lines: list[str], where: Path, processor: Any) -> dict[str, Any]:
    """Run the script; returns its losses and its model's weights."""
    made: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT.name, str(where)])
        patch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_: processor)
        exec(compile("\n".join(lines), SCRIPT.name, "exec"), made)
    model = made["model"]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if "outsize" in made:
        assert runner_of(model).split.streamed_share > 0.75
        outsize.unwrap(model)
    return {"losses": torch.tensor(made["losses"]), **weights}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gemma3", "on two workers"),
        ("smolvlm", "recomputed"),
        ("qwen2_5_vl", "recomputed"),
    ],
)
def test_losses_and_weights_are_those_of_the_plain_script(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    if way == "recomputed":
        monkeypatch.setitem(zoo_of_lists.TEXT, "intermediate_size", 512)
        monkeypatch.setitem(zoo_of_lists.TEXT, "num_hidden_layers", 20)
    model = save_model(zoo_of_lists.build(name)[0], tmp_path / "model")
    script = [line.replace("batch_size=4", "batch_size=2") for line in LINES]
    plain = [line for line in script if "outsize" not in line]
    want = run(plain, model, make_processor(name))
    assert len(want["losses"]) == 3
    assert way != "recomputed" or sum(value.nbytes for value in want.values()) > BUDGET_BYTES
    lines = [line.replace('device_memory="1GiB"', f"home='host', {WAYS[way]}") for line in script]
    assert_equal(run(lines, model, make_processor(name)), want, 0.0)
