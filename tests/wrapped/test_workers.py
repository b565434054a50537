"""A wrapped model over several workers: what the loop computes is what one device computes, bit for bit."""

import gc
import random
from functools import partial
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn

import outsize
import zoo
from outsize.errors import ConfigError, ModelError
from outsize.runtime.forward.staged_run import StagedRun
from outsize.session.session import Session
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, gradients, resident_backward, streamed_backward, train, wrapped

BATCH = zoo.batch("llama", num_sequences=4)
FOUR: dict[str, Any] = {"device": "emulated:4", "home": "host"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded activations": {"activations": "offload-products"},
    "encoded weights": {"transport": {"weights": "lossless4"}},
    "both": {"activations": "offload-attention", "transport": {"weights": "lossless3"}},
    "disk": {"home": "disk"},
}


@pytest.mark.parametrize(
    ("draws", "in_turn"),
    [(None, False), (partial(torch.rand, ()), True), (random.random, True), (np.random.random, True)],
)
def test_workers_take_turns_where_random_numbers_are_drawn(
    draws: Any, in_turn: bool, monkeypatch: pytest.MonkeyPatch
):
    """The generators of Python, numpy and the CPU are one for all workers; else these compute at once."""
    opened, open_engine = [], Session.open_engine

    def noted(session: Session, *given: Any) -> Any:
        opened.append(given[-1].draws_random)
        return open_engine(session, *given)

    monkeypatch.setattr(Session, "open_engine", noted)
    model = zoo.build("llama")
    if draws is not None:
        model.model.layers[1].register_forward_pre_hook(lambda *_: (draws(), None)[1])
    with wrapped(model, microbatches=2, **FOUR) as model:
        streamed_backward(model, BATCH)
    assert opened[-1] is in_turn


def test_a_model_that_trains_in_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Each of them would train a copy of its own, in silence."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = zoo.build("llama")
    with pytest.raises(ConfigError, match="one of 2 processes, and a wrapped model sums no gradients"):
        outsize.wrap(model, home="host", device="cpu")
    outsize.wrap(model.requires_grad_(False), home="host", device="cpu")
    model(**zoo.batch("llama"))
    model.lm_head.requires_grad_(True)
    with pytest.raises(ConfigError, match="one of 2 processes"):  # thawed, or adapters added
        model(**zoo.batch("llama"))
    model.lm_head.requires_grad_(False)
    outsize.unwrap(model)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_steps_of_four_workers_are_those_of_the_plain_loop(way: dict[str, Any]):
    batches = [zoo.batch("llama", seed=seed, num_sequences=4) for seed in range(3)]
    plain = zoo.build("llama")
    want = train(
        plain,
        batches,
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model, batch: resident_backward(model, batch, 4),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    with wrapped(zoo.build("llama"), microbatches=4, **{**FOUR, **way}) as model:
        got = train(
            model,
            batches,
            outsize.AdamW,
            streamed_backward,
            lambda model: outsize.clip_grad_norm_(model, 0.1),
        )
        assert got == want
        assert_equal(dict(model.state_dict()), plain.state_dict())
        moved = runner_of(model)._engine.link_bytes()  # type: ignore[union-attr]
        assert all(moved[f"up:w{worker}"] > 0 for worker in range(4))


def test_a_larger_batch_than_before_is_handed_over():
    """An evaluation after the first steps, say; the rooms between workers were as large as the batches so far."""
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), device="emulated:2") as model, torch.no_grad():
        for rows in (2, 4):
            batch = {name: value[:rows] for name, value in BATCH.items()}
            assert torch.equal(model(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "bert", "llama_tied"])
@pytest.mark.parametrize("device", ["emulated:2", "emulated:3"])
def test_gradients_are_those_of_the_plain_model(name: str, device: str):
    plain, batch = zoo.build(name), zoo.batch(name, num_sequences=4)
    tied = len(list(plain.named_parameters())) < len(list(plain.named_parameters(remove_duplicate=False)))
    with wrapped(zoo.build(name), microbatches=2, device=device) as model:
        for _ in range(2):  # onto the gradients that are there
            want = resident_backward(plain, batch, 2, causal=not zoo.is_masked(name))
            assert torch.equal(streamed_backward(model, batch), want)
        assert_equal(gradients(model), gradients(plain), 1e-6 if tied else 0.0)


def test_the_rest_may_be_loaded_again_before_a_backward_on_another_worker(monkeypatch: pytest.MonkeyPatch):
    """BERT's head lies behind a norm of the rest, which the worker of its forward loads again for units of its own."""
    enter = StagedRun._enter

    def loaded_again(run: StagedRun, *arguments: Any) -> None:
        for worker in range(3):
            for plane in run._glue._rest_planes(worker):
                plane.copy_(plane.clone())
        enter(run, *arguments)

    monkeypatch.setattr(StagedRun, "_enter", loaded_again)
    test_gradients_are_those_of_the_plain_model("bert", "emulated:3")


def test_between_passes_the_model_shows_its_own_parameters():
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), microbatches=2, **FOUR) as model:
        before = dict(model.named_parameters())
        streamed_backward(model, BATCH)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert_equal(dict(model.state_dict()), plain.state_dict())


def test_forwards_without_a_backward_and_modes():
    plain = zoo.build("gpt2", dropout=0.5).eval()
    batch = zoo.batch("gpt2", num_sequences=4)
    with wrapped(zoo.build("gpt2", dropout=0.5), microbatches=2, **FOUR) as model:
        model.train()
        streamed_backward(model, batch)
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                want = [plain(**{k: v[i : i + 2] for k, v in batch.items()}).logits for i in (0, 2)]
                assert torch.equal(model(**batch).logits, torch.cat(want))
        ids = batch["input_ids"][:1]
        want_ids = plain.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), want_ids)


def test_a_batch_that_goes_whole_draws_what_the_plain_model_draws():
    """Kept and recomputed, and what is drawn behind it."""
    plain = zoo.build("phi", dropout=0.5)
    torch.manual_seed(2)
    want = [resident_backward(plain, BATCH, 1) for _ in range(2)], torch.rand(3)
    with wrapped(zoo.build("phi", dropout=0.5), **FOUR) as model:
        torch.manual_seed(2)
        losses = [streamed_backward(model, BATCH) for _ in range(2)]
        assert torch.equal(torch.rand(3), want[1])
        found = gradients(model)
    assert all(map(torch.equal, losses, want[0]))
    assert_equal(found, gradients(plain))


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_is_only_looked_at_comes_between_another_and_its_backward(training: bool):
    plain, other = zoo.build("llama"), zoo.batch("llama", seed=1, num_sequences=4)
    want = resident_backward(plain, BATCH, 1)
    with wrapped(zoo.build("llama"), **FOUR) as model:
        out = model.train(training)(**BATCH)
        with torch.no_grad():
            assert torch.equal(model(**other).loss, plain(**other).loss)
        out.loss.backward()
        assert torch.equal(out.loss.detach(), want)
        assert_equal(gradients(model), gradients(plain))


def test_smaller_batches_and_forwards_that_are_dropped():
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), microbatches=4, **FOUR) as model:
        for _ in range(2):
            model(**BATCH)
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o) is StagedRun]
        with pytest.raises(ConfigError, match="room for one forward at a time"):
            _first, _second = model(**BATCH), model(**BATCH)
        small = {name: value[:2] for name, value in BATCH.items()}
        for batch, count in ((small, 2), (BATCH, 4)):
            assert torch.equal(streamed_backward(model, batch), resident_backward(plain, batch, count))
        assert_equal(gradients(model), gradients(plain))


def test_after_an_error_in_a_layer_the_next_call_works(monkeypatch: pytest.MonkeyPatch):
    resident, streamed = zoo.build("llama"), zoo.build("llama")
    kind, planted = type(streamed.model.layers[2]), []
    inner = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if planted:
            raise IndexError(planted.pop())
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    with wrapped(streamed, microbatches=2, **FOUR) as model:
        streamed_backward(model, BATCH)
        model.zero_grad()
        planted.append("planted")
        with pytest.raises(ModelError, match="IndexError: planted"):
            streamed_backward(model, BATCH)
        assert not planted
        model.zero_grad()
        assert torch.equal(streamed_backward(model, BATCH), resident_backward(resident, BATCH, 2))
        assert_equal(gradients(model), gradients(resident))


def test_what_several_workers_cannot_keep_is_refused():
    model = zoo.build("llama")
    with wrapped(model, activations="keep", **FOUR), pytest.raises(ConfigError, match="or one device"):
        model(**BATCH)


def adapted() -> Any:
    torch.manual_seed(1)
    adapters = peft.LoraConfig(
        r=2, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(zoo.small_llama(), adapters)


def mlp_of(model: Any) -> Any:
    return model.get_base_model().model.layers[1].mlp


def scaled(model: Any) -> None:
    mlp_of(model).up_proj.scaling["default"] *= 3


def eps(model: Any) -> None:
    model.get_base_model().model.layers[1].input_layernorm.variance_epsilon = 0.5


def attention(model: Any) -> None:
    model.get_base_model().config._attn_implementation = "eager"


def merged(model: Any) -> None:
    model.merge_adapter()


def hook_of_a_layer(model: Any) -> None:
    model.get_base_model().model.layers[1].register_forward_hook(lambda module, given, output: output * 0.5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_what_a_program_changes_in_layers_later_holds_on_every_worker():
    plain = adapted()
    with wrapped(adapted(), device="emulated:2", home="host") as model:
        for change in (scaled, eps, attention, hook_of_a_layer, merged):
            for made in (plain, model):
                made.zero_grad()
                loss = made(**BATCH).loss
                with (
                    torch.no_grad(),
                    made.disable_adapter(),
                ):  # as trainers of preferences have their reference
                    made.reference = made(**BATCH).loss
                loss.backward()
                with torch.no_grad():
                    change(made)
                    made.changed = made(**BATCH).loss
            assert_equal(gradients(model), gradients(plain))
            assert torch.equal(model.reference, plain.reference)
            assert torch.equal(model.changed, plain.changed), change.__name__


def hook_inside(model: Any) -> None:
    mlp_of(model).register_forward_hook(lambda module, given, output: output * 0.5)


def hook_of_a_backward(model: Any) -> None:
    mlp_of(model).register_full_backward_hook(lambda module, given, gradients: given)


def other_module(model: Any) -> None:
    mlp_of(model).act_fn = nn.Identity()


def other_forward(model: Any) -> None:
    forward = mlp_of(model).forward
    mlp_of(model).forward = lambda hidden: forward(hidden) * 0.5


def other_class(model: Any) -> None:
    mlp_of(model).__class__ = type("Mlp", (type(mlp_of(model)),), {})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "change", [hook_inside, hook_of_a_backward, other_module, other_forward, other_class]
)
def test_what_copies_of_layers_cannot_follow_is_refused(change: Any):
    with wrapped(adapted(), device="emulated:2", home="host") as model, torch.no_grad():
        model(**BATCH)
        change(model)
        with pytest.raises(ModelError, match="in a layer was given another module, hook, forward or class"):
            model(**BATCH)


def test_a_forward_put_inside_a_layer_is_refused():
    plain = zoo.small_llama()
    forward = plain.model.layers[1].mlp.forward
    plain.model.layers[1].mlp.forward = lambda hidden: forward(hidden) * 0.5
    with wrapped(plain, device="emulated:2") as model, pytest.raises(ModelError, match="put in from outside"):
        model(**BATCH)
