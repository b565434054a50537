"""Calls that programs of others make of a wrapped model: compiled, positional, of images, with PEFT's experts."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, GptOssForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import outsize
import zoo
from outsize.errors import ConfigError
from outsize.wrapped import batching
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, gradients, wrapped

peft = pytest.importorskip("peft")
BATCH = zoo.batch("llama", num_sequences=4)
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def test_a_model_given_to_torch_compile_runs_as_it_is(capfd: pytest.CaptureFixture[str]):
    plain = zoo.build("llama")
    want = plain(**BATCH).loss
    want.backward()
    with wrapped(zoo.build("llama"), home="host") as model:
        for compiled in (torch.compile(model, backend="eager"), model):
            model.zero_grad()
            got = compiled(**BATCH).loss
            got.backward()
            assert torch.equal(got, want)
            assert_equal(gradients(model), gradients(plain))
    assert "Exception ignored" not in capfd.readouterr().err


def adapted(name: str = "llama", **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False, **settings}
    return peft.get_peft_model(zoo.build(name), peft.LoraConfig(r=2, **settings))


def test_positional_arguments_go_by_the_names_of_the_model_inside_adapters():
    ids = BATCH["input_ids"]
    want = adapted()(ids, torch.ones_like(ids)).logits
    with wrapped(adapted(), home="host") as model:
        assert torch.equal(model(ids, torch.ones_like(ids)).logits, want)


class Starred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](inputs[0]))


def test_arguments_that_have_no_name_are_refused():
    with wrapped(Starred(), home="host") as model, pytest.raises(ConfigError, match=r"takes \*inputs"):
        model(torch.ones(2, 4))


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    targets = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    settings = {"target_parameters": targets, "target_modules": [], "init_lora_weights": False}
    return peft.get_peft_model(GptOssForCausalLM(config), peft.LoraConfig(r=2, **settings))


@pytest.mark.parametrize("way", [{}, {"device": "emulated:1", "activations": "recompute"}], ids=str)
def test_experts_whose_parameters_peft_reorders_in_the_forward_train_as_plain_ones(way: dict[str, Any]):
    plain = experts()
    ids = torch.arange(24).reshape(2, 12)
    with wrapped(experts(), home="host", **way) as model:
        for made in (plain, model):
            optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
            made.seen = []
            for _ in range(3):
                loss = made(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                made.zero_grad()
                made.seen.append(loss.detach())
        assert all(map(torch.equal, model.seen, plain.seen))


def test_an_adapter_that_is_first_seen_in_inference_mode_trains_later():
    ids = BATCH["input_ids"]

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        with torch.inference_mode():
            first = model(input_ids=ids).logits.clone()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return first, loss.detach()

    plain = adapted()
    want = run(plain)
    for count in (1, 2):
        with wrapped(adapted(), home="host", microbatches=count) as model:
            got = run(model)
            if count == 1:
                assert all(map(torch.equal, got, want))
                assert_equal(gradients(model), gradients(plain))


IMAGE, BORDER = 90, 92


def looking() -> nn.Module:
    torch.manual_seed(0)
    text = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    marks = {
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "vision_start_token_id": BORDER,
        "vision_end_token_id": 93,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks)
    return Qwen2_5_VLForConditionalGeneration(config).float()


def pictures(rows: int, *, positions: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.tensor([[1, BORDER, *[IMAGE] * 4, 93, 5, 6, 7, 8, 9 + row] for row in range(rows)])
    batch = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.where(ids >= IMAGE, -100, ids),
        "mm_token_type_ids": (ids == IMAGE).long(), "pixel_values": torch.randn(16 * rows, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
    }  # fmt: skip
    if positions:
        batch["position_ids"] = torch.arange(ids.shape[1]).expand(3, rows, -1).contiguous()
    return batch


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("rows", "positions"), [(1, False), (2, False), (4, False), (3, True), (2, True)])
def test_images_of_several_rows_in_one_tensor_give_the_plain_loss(rows: int, positions: bool, count: int):
    plain, batch = looking(), pictures(rows, positions=positions)
    want = plain(**batch).loss
    want.backward()
    with wrapped(looking(), home="host", microbatches=count) as model:
        got = model(**batch).loss
        got.backward()
        assert torch.equal(got, want)
        assert_equal(gradients(model), gradients(plain), 1e-6)


def test_positions_in_three_directions_are_cut_by_rows():
    rows = 3  # as many as directions
    batch = {
        n: t
        for n, t in pictures(rows, positions=True).items()
        if n in ("input_ids", "labels", "position_ids")
    }
    batch["position_ids"] = batch["position_ids"] + torch.arange(rows)[None, :, None]
    batch["input_ids"] = batch["input_ids"].clamp(max=IMAGE - 1)
    plain = looking()
    want = []
    for row in range(rows):
        part = {n: t[:, [row]] if n == "position_ids" else t[[row]] for n, t in batch.items()}
        want.append(plain(**part).logits)
    with wrapped(looking(), home="host", microbatches=rows) as model:
        assert torch.equal(model(**batch).logits, torch.cat(want))


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad.*:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_blocks_that_was_on_before_wrap_changes_nothing(reentrant: bool):
    def build() -> nn.Module:
        model = adapted()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model.train()

    plain = build()
    plain(**BATCH).loss.backward()
    for way in ({"home": "host"}, {"device": "emulated:1", "slots": 2, "activations": "recompute"}):
        with wrapped(build(), **way) as model:
            model(**BATCH).loss.backward()
            assert_equal(gradients(model), gradients(plain))


def scoring(model: nn.Module) -> Any:
    """A forward for ``model.forward =`` that calls the decoder by itself, and takes the head's weight, as TRL's."""
    usual = model.forward

    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        if labels is None:
            return usual(input_ids=input_ids, **others)
        others.pop("use_cache", None)
        hidden = self.base_model(input_ids=input_ids, use_cache=False, **others).last_hidden_state
        logits = nn.functional.linear(hidden[:, :-1], self.get_output_embeddings().weight)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

    return MethodType(forward, model)


def around(model: nn.Module) -> Any:
    """One that calls the model's own, as autocasts do."""
    usual = model.forward.__func__  # type: ignore[attr-defined]

    def forward(self: Any, **inputs: Any) -> Any:
        output = usual(self, **inputs)
        output.loss = None if output.loss is None else output.loss * 2
        return output

    return MethodType(forward, model)


@pytest.mark.parametrize("settings", [{"home": "disk"}, {"device": "emulated:1"}, {"device": "emulated:2"}])
@pytest.mark.parametrize("put", [scoring, around])
def test_a_forward_in_the_place_of_the_model_s_streams(put: Any, settings: dict[str, Any]):
    plain = zoo.build("llama")
    plain.forward = put(plain)
    with wrapped(zoo.build("llama"), activations="recompute", **settings) as model:
        model.forward = put(model)
        for _ in range(2):
            for each in (plain, model):
                each.zero_grad()
                each.loss = each(**BATCH)["loss"]
                each.loss.backward()
            assert torch.equal(model.loss, plain.loss)
            assert_equal(gradients(model), gradients(plain))
        assert runner_of(model).plan is not None
        ids = BATCH["input_ids"]
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        written = [
            each.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0) for each in (model, plain)
        ]
        assert torch.equal(*written)  # between steps, as GRPO has it


def test_a_forward_in_the_place_of_the_model_s_runs_once():
    """The first call tries it, and undoes what that has left on the model; from then on it runs once."""
    seen: list[int] = []

    def counting(model: nn.Module) -> Any:
        scored = scoring(model)

        def forward(self: Any, **inputs: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            seen.append(self.calls)
            return scored(**inputs)

        return MethodType(forward, model)

    with wrapped(zoo.build("llama"), home="host", device="emulated:1") as model:
        model.forward = counting(model)
        model(**BATCH)["loss"].backward()
        seen.clear()
        for _ in range(2):
            model(**BATCH)["loss"].backward()
        assert seen == [2, 3]


def test_a_part_that_is_called_by_itself_is_said_once_and_computes(caplog: pytest.LogCaptureFixture):
    plain = zoo.build("llama")
    ids = BATCH["input_ids"]
    with wrapped(zoo.build("llama"), home="disk") as model:
        model(**BATCH).loss.backward()
        assert "outside of the model's own forward" not in caplog.text
        for each in (plain, model):
            each.zero_grad()
            for _ in range(2):
                each.model(input_ids=ids).last_hidden_state.square().mean().backward()
        assert_equal(gradients(model), gradients(plain))
    assert caplog.text.count("model.embed_tokens was called outside of the model's own forward") == 1


def test_hooks_and_modes_that_see_nothing_of_layers_are_said_once(caplog: pytest.LogCaptureFixture):
    halved = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 0.5 if t.dim() else t)
    batching.say_once.cache_clear()
    with wrapped(zoo.build("llama"), home="host") as model:
        for _ in range(2):
            with halved, torch.no_grad(), FlopCounterMode(display=False):
                model(**BATCH)
    said = [each.getMessage() for each in caplog.records if "sees nothing of its layers" in each.getMessage()]
    assert [text.split()[0] for text in said] == ["saved_tensors_hooks", "a"]


class Changing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _dual(model: Any, vectors: Tensor) -> None:
    with forward_ad.dual_level():
        model(inputs_embeds=forward_ad.make_dual(vectors, torch.ones_like(vectors)))


def _in_a_mode(model: Any, vectors: Tensor) -> None:
    with Changing():
        model(inputs_embeds=vectors)


# What a caller does to a model, by vectors in the place of tokens.
TRANSFORMS: dict[str, Any] = {
    "forward-mode": _dual,
    "jvp": lambda model, x: torch.func.jvp(lambda y: model(inputs_embeds=y).logits, (x,), (x,)),
    "vmap": lambda model, x: torch.func.vmap(lambda y: model(inputs_embeds=y[None]).logits)(x),
    "grad": lambda model, x: torch.func.grad(lambda y: model(inputs_embeds=y).logits.sum())(x),
    "jacrev": lambda model, x: torch.func.jacrev(lambda y: model(inputs_embeds=y).logits.sum())(x),
    "TorchFunctionMode": _in_a_mode,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch's own decompositions
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_transforms_around_a_call_are_refused(name: str, frozen: bool):
    vectors = torch.randn(2, 8, zoo.build("llama").config.hidden_size)
    with wrapped(zoo.build("llama").requires_grad_(not frozen), home="host") as model:
        with pytest.raises(ConfigError, match=r"around a call of a wrapped model does not reach its layers"):
            TRANSFORMS[name](model, vectors)
        with torch.device("cpu"):
            model(inputs_embeds=vectors)


def test_a_model_within_another_is_not_wrapped_twice():
    with wrapped(zoo.build("llama"), home="host") as model:
        around = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for one in (around, model.model):
            with pytest.raises(ConfigError, match="is wrapped already"):
                outsize.wrap(one, home="host")


@pytest.mark.parametrize("norm_type", [1, 2.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_that_is_asked_for(norm_type: float):
    plain = zoo.build("llama")
    plain(**BATCH).loss.backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    with wrapped(zoo.build("llama"), home="host") as model:
        model(**BATCH).loss.backward()
        assert torch.equal(outsize.clip_grad_norm_(model, 0.1, norm_type=norm_type), want)
        assert_equal(gradients(model), gradients(plain))


def test_a_hook_on_logits_of_which_the_model_took_the_loss_is_not_run_with_nothing():
    with wrapped(zoo.build("llama"), home="host") as model:
        output, seen = model(**BATCH), list[Any]()
        output.logits.register_hook(seen.append)
        with pytest.raises(ConfigError, match="call it without labels"):
            output.loss.backward()
        assert not seen
