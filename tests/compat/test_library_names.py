"""Private names of transformers, TRL and Liger, in the versions that are here."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import zoo
from outsize.compat import transformers_private


def test_a_model_says_how_it_attends_and_what_it_keeps_in_fp32():
    model = zoo.build("llama")
    assert transformers_private.attention_of(model) == "sdpa"
    assert transformers_private.kept_in_fp32(model, torch.bfloat16) == ()
    assert transformers_private.kept_in_fp32(zoo.build("deepseek_v3"), torch.bfloat16)
    assert not transformers_private.has_hub_kernels(model)


def test_a_layer_is_drawn_as_its_model_draws_it():
    model = zoo.build("llama")
    layer = torch.nn.Linear(512, 512)
    transformers_private.initialize(model, layer)
    assert float(layer.weight.detach().std()) == pytest.approx(model.config.initializer_range, rel=0.02)
    assert not layer.bias.any()


def test_layers_put_outputs_into_the_collector():
    collector = transformers_private.output_collector()
    model = zoo.build("mixtral").eval()
    seen = []
    block = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    block.register_forward_pre_hook(lambda *_: seen.append(collector.get() is not None))
    model(torch.ones(1, 3, dtype=torch.long), output_router_logits=True)
    assert seen == [True]


def test_hooks_that_record_outputs_are_there_before_a_call():
    model = zoo.build("mixtral").eval()

    def num_hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    assert not num_hooks()
    transformers_private.put_output_hooks(model)
    put = num_hooks()
    assert put
    model(torch.ones(1, 3, dtype=torch.long), output_router_logits=True)
    assert num_hooks() == put
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert all(map(transformers_private.records_outputs, hooks))
    assert not transformers_private.records_outputs(num_hooks)


def test_a_tokenizer_with_code_of_its_own_is_told():
    class Own(transformers.PreTrainedTokenizerFast):
        def _encode_plus(self, *args, **kwargs):
            return super()._encode_plus(*args, **kwargs)

    backend = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert transformers_private.encodes_as_the_library(plain)
    assert not transformers_private.encodes_as_the_library(Own(tokenizer_object=backend, unk_token="[UNK]"))


def test_ways_to_take_replies_apart_are_those_of_tokenizer_family_and_template():
    from trl.chat_template_utils import llama3_1_chat_template, llama3_template

    def ways(tokenizer, family):
        return list(transformers_private.response_templates(tokenizer, zoo.build(family)))

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    assert ways(tokenizer, "llama") == []
    (qwen,) = ways(tokenizer, "qwen2")
    assert qwen["fields"]["tool_calls"]["close"] == "</tool_call>"
    tokenizer.chat_template = llama3_1_chat_template
    assert ways(tokenizer, "llama") == [llama3_template]
    tokenizer.response_template = qwen
    assert ways(tokenizer, "llama")[0] == qwen


def test_a_trainer_takes_the_steps_that_stand_before_it(tmp_path):
    """Else a trainer would clip and save as the library does, and nobody would notice."""
    taken = []

    class Before(transformers_private.TrainerSteps):
        def clipped(self, most):
            taken.append(most)
            return torch.tensor(1.0)

        def saving(self):
            taken.append("saving")
            return super().saving()

    kind = type("Trainer", (Before, transformers.Trainer), {})
    rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        max_grad_norm=0.5, logging_strategy="no",
    )  # fmt: skip
    trainer = kind(model=zoo.build("llama"), args=arguments, train_dataset=rows)
    trainer.train()
    assert taken == [0.5, 0.5, "saving"]
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    arguments.max_grad_norm = 0.0
    taken.clear()
    kind(model=trainer.model, args=arguments, train_dataset=rows).train()
    assert taken == [float("inf"), float("inf"), "saving"]
    assert transformers_private.on_device(trainer, {"x": torch.ones(1)})["x"].device.type == "cpu"


def test_trl_asks_the_step_that_sends_nothing():
    from trl.trainer.base_trainer import _BaseTrainer

    assert "_send_telemetry" in vars(_BaseTrainer)
    assert "_send_telemetry" in _BaseTrainer.__init__.__code__.co_names


def test_metrics_are_forgotten_and_one_device_used():
    trainer = SimpleNamespace(_metrics={"train": {"loss": 1}}, _stored_metrics={"eval": {"loss": 2}})
    transformers_private.forget_metrics(trainer)
    assert trainer._metrics == {"train": {}}
    assert trainer._stored_metrics == {"eval": {}}
    arguments = transformers.TrainingArguments(use_cpu=True, report_to="none")
    transformers_private.use_one_device(arguments)
    assert arguments.n_gpu <= 1


def test_liger_has_what_puts_its_kernels_into_a_model():
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    assert callable(monkey_patch._apply_liger_kernel_to_instance)


def test_caches_say_their_layers_tensors_and_windows():
    keys = torch.ones(1, 1, 3, 2)
    grows, crossed = transformers.DynamicCache(), transformers.DynamicCache()
    grows.update(keys, keys, 0)
    crossed.update(keys, keys, 0)
    both = transformers.EncoderDecoderCache(grows, crossed)
    assert transformers_private.cache_layers(grows) == (grows.layers, [])
    assert transformers_private.cache_layers(both) == (grows.layers, crossed.layers)
    (layer,) = grows.layers
    assert {name for name, _ in transformers_private.cached_tensors(layer)} == {"keys", "values"}
    assert transformers_private.window_length(layer) <= 0
    sliding = transformers.LlamaConfig(
        num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=4
    )
    (window,) = transformers.DynamicCache(config=sliding).layers
    assert transformers_private.window_length(window) == 4


def test_attention_says_which_layer_of_a_cache_it_uses():
    model = zoo.build("llama")
    blocks = [module for name, module in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    assert [transformers_private.layer_numbers(block) for block in blocks] == [[0], [1]]
    assert transformers_private.layer_numbers(torch.nn.Linear(1, 1)) == []
