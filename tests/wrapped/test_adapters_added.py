"""What preference training does to a model after `outsize.wrap`: adapters are added, switched and turned off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
import zoo
from outsize.errors import StorageError
from outsize.storage.home import DiskHome, HostHome
from wrapped.loops import assert_equal, gradients, wrapped

peft = pytest.importorskip("peft")
CONFIG = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
BATCH = zoo.batch("llama", num_sequences=4)
# PEFT asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def adapted() -> nn.Module:
    model = zoo.build("llama")
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIG)


def add_reference(model: nn.Module) -> None:
    """As TRL's ``DPOTrainer`` does in its constructor: a copy of the adapter that stays as it is."""
    torch.manual_seed(2)
    model.add_adapter("ref", CONFIG)
    for name, parameter in model.named_parameters():
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)


def logits_without(model: nn.Module) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        return model(**BATCH).logits


def logits_with(model: nn.Module, adapter: str) -> Tensor:
    former = model.active_adapter
    model.set_adapter(adapter)
    try:
        with torch.no_grad():
            return model(**BATCH).logits
    finally:
        model.set_adapter(former)


def step(model: nn.Module) -> list[Tensor]:
    """A loss against a reference; its forwards come between the forward that trains and its backward."""
    out = model(**BATCH)
    reference, bare = logits_with(model, "ref"), logits_without(model)
    (out.loss + (out.logits - reference).square().mean() + (out.logits - bare).square().mean()).backward()
    return [out.loss.detach(), reference, bare]


@pytest.mark.parametrize("device", ["cpu", "emulated:1"])
@pytest.mark.parametrize("settings", [{}, {"microbatches": 1, "activations": "recompute", "slots": 1}])
def test_an_adapter_that_is_added_is_streamed_like_the_others(device: str, settings: dict[str, Any]):
    plain = adapted()
    add_reference(plain)
    with wrapped(adapted(), device=device, home="host", **settings) as model:
        add_reference(model)
        for made in (plain, model):
            optimizer = torch.optim.SGD([p for n, p in made.named_parameters() if ".default." in n], lr=0.1)
            made.seen = []
            for _ in range(2):
                made.seen += step(made)
                optimizer.step()
                made.zero_grad()
        for got, want in zip(model.seen, plain.seen, strict=True):
            assert torch.equal(got, want)
        step(plain), step(model)
        assert_equal(gradients(model), gradients(plain))
        assert_equal(dict(model.state_dict()), dict(plain.state_dict()))


def test_adapters_that_are_switched_off_do_not_plan_anew():
    with wrapped(adapted(), home="host") as model:
        add_reference(model)
        step(model)
        engine = outsize.wrapped.module.runner_of(model)._engine
        step(model)
        assert outsize.wrapped.module.runner_of(model)._engine is engine


@pytest.mark.parametrize("home", ["host", "disk"])
def test_an_adapter_that_is_added_trains_over_either_home(home: str):
    plain = adapted()
    torch.manual_seed(2)
    plain.add_adapter("other", CONFIG)
    plain.set_adapter("other")
    want = plain(**BATCH).loss
    want.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    with wrapped(adapted(), home=home) as model:
        torch.manual_seed(2)
        model.add_adapter("other", CONFIG)
        model.set_adapter("other")
        optimizer = outsize.AdamW(model, lr=1e-2, weight_decay=0.0)
        got = model(**BATCH).loss
        got.backward()
        assert torch.equal(got, want)
        assert torch.equal(outsize.clip_grad_norm_(model, float("inf")), norm)
        optimizer.step()


@pytest.mark.parametrize("home", ["host", "disk"])
def test_an_adapter_that_peft_makes_on_meta_and_fills_trains_as_any_other(home: str, tmp_path: Path):
    torch.manual_seed(2)
    peft.get_peft_model(zoo.build("llama"), CONFIG).save_pretrained(tmp_path)
    plain = adapted()
    plain.load_adapter(str(tmp_path), "other", is_trainable=True)
    plain.set_adapter("other")
    want = plain(**BATCH).loss
    want.backward()
    with wrapped(adapted(), home=home) as model:
        model.load_adapter(str(tmp_path), "other", is_trainable=True, low_cpu_mem_usage=True)
        model.set_adapter("other")
        got = model(**BATCH).loss
        got.backward()
        assert torch.equal(got, want)
        assert_equal(gradients(model), gradients(plain))


def test_adapters_without_values_are_refused_by_name():
    on_meta = "lora_A.other.weight is on meta, .*low_cpu_mem_usage=False"
    with wrapped(adapted()) as model:
        model.add_adapter("other", CONFIG, low_cpu_mem_usage=True)
        with pytest.raises(outsize.ConfigError, match=on_meta):
            model(**BATCH)
    empty = peft.get_peft_model(zoo.build("llama"), CONFIG, adapter_name="other", low_cpu_mem_usage=True)
    with pytest.raises(outsize.ConfigError, match=on_meta):
        outsize.wrap(empty, device="cpu", device_memory="64MiB", home="host")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, hidden, hidden)[0]
        return hidden


def test_parameters_that_peft_makes_anew_are_refused_by_name():
    model = peft.get_peft_model(Attending(), peft.LoraConfig(target_modules=["0", "1"]))
    with pytest.raises(outsize.ModelError, match="in_proj_weight is made anew"):
        outsize.wrap(model, device="cpu", device_memory="64MiB", home="host")


def test_a_directory_that_the_first_home_has_made_is_there_for_what_leaves_the_device(tmp_path: Path):
    store_dir = tmp_path / "made"
    with wrapped(adapted(), home="disk", store_dir=store_dir, offload=True) as model:
        model.add_adapter("other", CONFIG)
        model(**BATCH).loss.backward()
        assert outsize.wrapped.module.runner_of(model)._plan.layout.offload
    assert not store_dir.exists()


def test_a_parameter_that_was_replaced_counts_and_is_refused_once_an_optimizer_has_the_former_one():
    def change(model: nn.Module, factor: float) -> nn.Module:
        model.model.norm.weight = nn.Parameter(factor * torch.ones_like(model.model.norm.weight))
        return model

    plain = change(zoo.build("llama"), 2.0)
    plain(**BATCH).loss.backward()
    with wrapped(zoo.build("llama")) as model:
        change(model, 2.0)(**BATCH).loss.backward()
        assert_equal(gradients(model), gradients(plain))
        optimizer = outsize.AdamW(model, lr=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(outsize.ModelError, match="replaced"):
            change(model, 3.0)(**BATCH)


class Fused(nn.Module):
    """Takes the weight of its head by itself, as TRL's forwards do, where it is asked to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = zoo.build("llama")
        self.config = self.model.config

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, input_ids: Tensor, fused_lm_head: bool = False) -> Tensor:
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.model.lm_head
        return hidden @ head.weight.T if fused_lm_head else head(hidden)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_the_head_stays_on_the_device_from_the_first_forward_that_takes_its_weight(home: str):
    ids = BATCH["input_ids"]
    plain = Fused()
    want = plain(ids, fused_lm_head=True)
    want.square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    with wrapped(Fused(), home=home) as model:
        assert torch.equal(model(ids), plain(ids))  # the head is a unit
        got = model(ids, fused_lm_head=True)
        assert torch.equal(got, want)
        got.square().mean().backward()
        assert torch.equal(outsize.clip_grad_norm_(model, float("inf")), norm)
        assert torch.equal(model(ids), plain(ids))
    with (
        wrapped(Fused(), home=home, head="streamed") as model,
        pytest.raises(outsize.ModelError, match="head="),
    ):
        model(ids, fused_lm_head=True)


def test_a_home_that_cannot_be_moved_stays_as_it_was():
    size = sum(p.numel() for p in zoo.build("llama").parameters())
    with wrapped(adapted(), home="host", host_memory=size * 4 + 600_000) as model:
        want = model(**BATCH).loss.detach()
        model.add_adapter("large", peft.LoraConfig(r=256, task_type="CAUSAL_LM", target_modules="all-linear"))
        with pytest.raises(outsize.OutsizeError):
            model(**BATCH)
        model.delete_adapter("large")
        assert torch.equal(model(**BATCH).loss, want)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_model_whose_move_has_failed_half_way_is_as_it_was(home: str, monkeypatch: pytest.MonkeyPatch):
    """For adapters that were added it moves to another home; nothing is let go of before all of it is there."""
    plain, model = adapted(), adapted()
    kind = HostHome if home == "host" else DiskHome
    written, write = [], kind.write

    def fails(self: Any, *given: Any) -> None:
        written.append(given)
        if len(written) == 8:
            raise StorageError("planted")
        write(self, *given)

    with wrapped(model, home=home):
        for made in (plain, model):
            torch.manual_seed(2)
            made.add_adapter("other", CONFIG)
        monkeypatch.setattr(kind, "write", fails)
        with pytest.raises(StorageError, match="planted"):
            logits_with(model, "other")
        assert torch.equal(logits_with(model, "other"), logits_with(plain, "other"))


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("own", [False, True])
def test_an_optimizer_made_before_adapters_have_gone_home_steps_them(own: bool, home: str):
    """As a trainer makes it, between `get_peft_model` and the first call."""

    def train(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, CONFIG)
        adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        if own and model is not plain:
            optimizer: torch.optim.Optimizer = outsize.AdamW(model, groups=[{"params": adapters}])
        else:
            optimizer = torch.optim.AdamW(adapters, fused=True)
        for _ in range(2):
            adapted(**BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in adapted.state_dict().items()}

    plain = zoo.build("llama")
    want = train(plain)
    with wrapped(zoo.build("llama"), home=home) as model:
        assert_equal(train(model), want)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_an_adapter_that_no_optimizer_has_comes_and_goes(home: str):
    def train(model: nn.Module) -> list[Tensor]:
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, fused=True)
        losses = []
        for _ in range(2):
            losses.append(model(**BATCH).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.manual_seed(3)
            model.add_adapter("other", CONFIG)
            losses.append(logits_with(model, "other"))
            model.delete_adapter("other")
        return losses

    want = train(adapted())
    with wrapped(adapted(), home=home) as model:
        assert all(torch.equal(one, other) for one, other in zip(train(model), want, strict=True))


def test_a_copy_of_a_copy_of_a_layer_computes_with_its_own_weights():
    """PEFT replicates layers anew for each adapter that it adds; merged, they are called as they stand."""
    settings: dict[str, Any] = {"layer_replication": [(0, 2), (1, 2)], "init_lora_weights": False}
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], **settings)

    def merged(model: nn.Module) -> list[Tensor]:
        seen = [logits_with(model, "default")]
        for adapter in ("two", "three"):
            torch.manual_seed(2)
            model.add_adapter(adapter, config)
            seen.append(logits_with(model, adapter))
        with torch.no_grad():
            return [*seen, model.merge_and_unload(adapter_names=["default", "three"])(**BATCH).logits]

    def replicated() -> nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(zoo.build("llama"), config)

    want = merged(replicated())
    with wrapped(replicated()) as model:
        got = merged(model)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
