"""What people expect of a model in their own loop, one sentence each."""

import copy
import gc
import io
import itertools
import logging
import pickle
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import nn

import outsize
import zoo
from outsize.errors import ConfigError, DataError, ModelError
from reference import IGNORED
from runtime.oddities import Odd, batch
from wrapped.loops import assert_equal, gradients, parts_of, resident_backward, streamed_backward, wrapped

BATCH = zoo.batch("llama", num_sequences=4)
HOMES = ["host", "disk"]


def make(kind: type[nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


class Scaled(nn.Module):
    """Two blocks whose loss has the gradient that it is told, in any dtype."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_accumulate_in_fp32_over_calls_and_microbatches(dtype: torch.dtype):
    """2048 + 1 + 1 + 1 + 1 = 2052, which bf16 and fp16 sums do not reach."""
    model = Scaled().to(dtype)
    with torch.no_grad():
        for block in model.blocks:
            block.weight.fill_(1.0)
    with wrapped(model, microbatches=2):
        model(torch.full((1, 1), 2048.0, dtype=dtype)).sum().backward()
        for _ in range(2):
            model(torch.ones(2, 1, dtype=dtype)).sum().backward()
        assert model.blocks[1].weight.grad.item() == 2052
        assert model.blocks[0].weight.grad.dtype is torch.float32


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("home", HOMES)
def test_gradients_of_several_backwards_add_up_as_in_a_loop(home: str, count: int):
    other = zoo.batch("llama", seed=5, num_sequences=4)
    plain = zoo.build("llama")
    for one in (BATCH, other, BATCH):
        resident_backward(plain, one, count)
    want = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    with wrapped(zoo.build("llama"), home=home, microbatches=count) as model:
        for one in (BATCH, other, BATCH):
            streamed_backward(model, one)
        assert torch.equal(outsize.clip_grad_norm_(model, float("inf")), want)
        if home == "host":
            assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"activations": "recompute", "slots": 1},
        {"activations": "recompute", "offload": True},
        {"slots": 1, "offload": True},
        {"device": "emulated:1"},
    ],
)
def test_dropout_masks_of_the_recompute_are_those_of_the_forward(settings: dict[str, object]):
    """Whatever the schedule; with other masks the gradient would not be that of the loss."""

    def run(**how: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with wrapped(zoo.build("gpt2", dropout=0.3), microbatches=2, **how) as model:
            torch.manual_seed(3)
            return streamed_backward(model, BATCH), gradients(model)

    loss, got = run(**settings)
    want_loss, want = run(slots=4, offload=False)
    assert torch.equal(loss, want_loss)
    assert_equal(got, want)
    with wrapped(zoo.build("gpt2", dropout=0.3), microbatches=2, **settings) as model, torch.no_grad():
        name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("h.1.mlp.c_fc.bias"))
        direction = got[name] / got[name].norm()
        values = []
        for sign in (1, -1):  # the slope of the loss with the same masks
            parameter.add_(direction, alpha=sign * 1e-2)
            torch.manual_seed(3)
            values.append(model(**BATCH).loss)
            parameter.sub_(direction, alpha=sign * 1e-2)
        assert ((values[0] - values[1]) / 2e-2).item() == pytest.approx(got[name].norm().item(), rel=2e-2)


def test_uneven_microbatches_give_the_mean_of_the_full_batch():
    labels = BATCH["labels"].clone()
    labels[0, :-2] = IGNORED
    labels[3] = IGNORED  # a microbatch with no target at all
    uneven = {**BATCH, "labels": labels}
    plain = zoo.build("llama")
    want = plain(**uneven).loss
    want.backward()
    same = zoo.build("llama")
    with wrapped(zoo.build("llama"), microbatches=4) as model:
        got = streamed_backward(model, uneven)
        assert torch.equal(got, resident_backward(same, uneven, 4))
        assert_equal(gradients(model), gradients(same))
    assert torch.allclose(got, want, rtol=1e-5)
    assert_equal(gradients(same), gradients(plain), 1e-5)


def test_how_microbatches_weigh_is_known_from_rows_without_a_target_too():
    """The first call has ignored labels where the trial looks; the next one has targets of any number."""
    first, other = zoo.batch("llama", seed=5, num_sequences=4), zoo.batch("llama", seed=2, num_sequences=4)
    first["labels"][:2] = IGNORED
    other["labels"][0] = other["input_ids"][0]
    other["labels"][2:, :6] = IGNORED
    with wrapped(zoo.build("llama"), microbatches=2) as model:
        for one in (first, other):
            assert torch.equal(streamed_backward(model, one), resident_backward(zoo.build("llama"), one, 2))


class Breaking(Odd):
    """Raises in the forward of a block when told to."""

    def __init__(self):
        super().__init__()
        # Not a number, which a call would leave on the model: such batches go whole.
        self.calls, self.break_at = itertools.count(1), 0
        inner = self.blocks[2].forward

        def forward(*args, **kwargs):
            if next(self.calls) == self.break_at:
                raise IndexError("planted")
            return inner(*args, **kwargs)

        self.blocks[2].forward = forward


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_exception_in_a_layer_is_catchable_and_the_next_call_works(call: int, home: str):
    """In either microbatch, in the forward and in the recompute; everything under way is freed."""
    want = make(Breaking)
    resident_backward(want, batch(rows=4), 2, causal=False)
    with wrapped(make(Breaking), microbatches=2, home=home, activations="recompute") as model:
        streamed_backward(model, batch(rows=4))
        model.zero_grad()
        model.calls, model.break_at = itertools.count(1), call
        with pytest.raises(ModelError, match="IndexError: planted") as raised:
            streamed_backward(model, batch(rows=4))
        assert isinstance(raised.value, IndexError)  # whoever waits for what the layer raises gets it
        assert isinstance(raised.value.__cause__, IndexError)
        del raised
        gc.collect()
        alive = [o for o in gc.get_objects() if type(o).__name__ in ("MicrobatchRun", "AutogradBridge")]
        assert not alive
        model.break_at = 0
        model.zero_grad()
        streamed_backward(model, batch(rows=4))
        norm = outsize.clip_grad_norm_(model, float("inf"))
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(want.parameters(), float("inf")))


@pytest.mark.parametrize("call", [2, 3, 4])
def test_an_exception_leaves_nothing_of_what_was_saved_off_the_device(call: int):
    """There is room for one forward: the next one finds all of it."""
    plain, calls = zoo.build("llama"), []
    inner = plain.model.layers[2].forward

    def forward(*args, **kwargs):
        calls.append(len(calls) + 1)
        if calls[-1] == call:
            raise IndexError("planted")
        return inner(*args, **kwargs)

    plain.model.layers[2].forward = forward
    calls.extend(range(call + 1))
    with wrapped(plain, microbatches=2, offload=True, activations="recompute") as model:
        streamed_backward(model, BATCH)
        for _ in range(2):
            calls.clear()
            with pytest.raises(ModelError, match="IndexError: planted"):
                streamed_backward(model, BATCH)
        calls.extend(range(call + 1))
        streamed_backward(model, BATCH)


@pytest.mark.parametrize("home", HOMES)
def test_weights_loaded_after_the_optimizer_was_built_survive_the_next_step(home: str):
    other = zoo.build("llama", seed=9).state_dict()
    with wrapped(zoo.build("llama"), home=home) as model:
        optimizer = outsize.AdamW(model, lr=0.0, weight_decay=0.0)
        streamed_backward(model, BATCH)
        assert not model.load_state_dict(other).missing_keys
        optimizer.step()
        assert_equal(dict(model.state_dict()), other)
        with pytest.raises(RuntimeError, match="nonsense"):
            model.load_state_dict({**other, "nonsense": torch.zeros(1)})


def test_training_follows_train_and_eval():
    with wrapped(zoo.build("gpt2", dropout=0.5)) as model:
        assert model.train().training
        assert all(m.training for m in model.modules())
        first, second = (model(**BATCH).loss for _ in range(2))
        assert first != second
        assert not model.eval().training
        plain = zoo.build("gpt2", dropout=0.5).eval()
        assert torch.equal(model(**BATCH).loss, plain(**BATCH).loss)


@pytest.mark.parametrize("count", [1, 2])
def test_late_requires_grad_is_respected(count: int):
    """Frozen after wrapping, and trained after having been frozen when it was wrapped."""
    plain, model = zoo.build("llama"), zoo.build("llama")
    for one in (plain, model):
        one.model.layers[2].requires_grad_(False)
    with wrapped(model, microbatches=count):
        streamed_backward(model, BATCH)
        resident_backward(plain, BATCH, count)
        assert_equal(gradients(model), gradients(plain))
        for one in (plain, model):
            one.zero_grad()
            one.model.layers[2].requires_grad_(True)
            one.model.layers[0].requires_grad_(False)
            one.model.embed_tokens.requires_grad_(False)
        optimizer, reference = outsize.AdamW(model), torch.optim.AdamW(plain.parameters(), fused=True)
        streamed_backward(model, BATCH)
        resident_backward(plain, BATCH, count)
        assert_equal(gradients(model), gradients(plain))
        optimizer.step()
        reference.step()
        assert_equal(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(("rows", "count"), [(1, 4), (3, 4), (5, 2), (7, 3)])
def test_odd_batches_and_batches_smaller_than_microbatches(rows: int, count: int):
    one = zoo.batch("llama", num_sequences=rows)
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), microbatches=count) as model:
        assert torch.equal(streamed_backward(model, one), resident_backward(plain, one, count))
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("settings", [{}, {"offload": True}, {"offload": True, "home": "disk"}])
def test_batches_of_changing_size_and_length(settings: dict[str, object]):
    """With larger ones, the room for saved activations grows as well."""
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), microbatches=2, **settings) as model:
        for step, (rows, length) in enumerate([(2, 8), (5, 12), (1, 4), (4, 20), (2, 8)]):
            one = zoo.batch("llama", seed=step, num_sequences=rows, seq_len=length)
            assert torch.equal(streamed_backward(model, one), resident_backward(plain, one, 2))
        if "home" not in settings:
            assert_equal(gradients(model), gradients(plain))


class Nested(nn.Module):
    """Inputs in dicts and lists, with values that are no tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs, *, options=("plain", None), scale: float = 1.0):
        x = inputs["x"] + inputs["more"][0] if options[0] == "plain" else inputs["x"]
        for block in self.blocks:
            x = torch.tanh(block(x) * scale) + inputs["shared"]
        return {"out": x, "note": options[0], "pieces": [x.sum(-1), x.mean()]}


def test_nested_inputs_and_values_that_are_no_tensors():
    given = {"x": torch.randn(5, 4), "more": [torch.randn(5, 4)], "shared": torch.randn(4)}
    plain = make(Nested)
    # In the same microbatches: a product of other rows may have other bits.
    parts = [
        {**given, "x": given["x"][rows], "more": [given["more"][0][rows]]} for rows in (slice(3), slice(3, 5))
    ]
    made = [plain(part, scale=0.5) for part in parts]
    sum(one["out"].square().sum() + one["pieces"][0].sum() for one in made).backward()
    with wrapped(make(Nested), microbatches=2) as model:
        got = model(given, scale=0.5)  # by position too
        assert got["note"] == "plain"
        assert torch.equal(got["out"], torch.cat([one["out"] for one in made]))
        assert torch.equal(got["pieces"][0], torch.cat([one["pieces"][0] for one in made]))
        (got["out"].square().sum() + got["pieces"][0].sum()).backward()
        assert_equal(gradients(model), gradients(plain), 1e-6)
        with pytest.raises(DataError, match="batch is empty"):
            model({"x": torch.zeros(0, 4)})


def test_objects_with_attributes_are_joined_like_mappings():
    plain = make(Odd)
    with wrapped(make(Odd), microbatches=3) as model:
        got = model(**batch(rows=6))
        assert torch.equal(
            got.logits, torch.cat([plain(**part).logits for part in parts_of(batch(rows=6), 3)])
        )
        assert torch.allclose(got.loss, plain(**batch(rows=6)).loss)


@pytest.mark.parametrize("home", HOMES)
def test_tied_weights_stay_tied(home: str):
    plain = zoo.build("llama_tied")
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    resident_backward(plain, BATCH, 2)
    reference.step()
    with wrapped(zoo.build("llama_tied"), home=home, microbatches=2) as model:
        optimizer = outsize.AdamW(model)
        streamed_backward(model, BATCH)
        optimizer.step()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_equal(dict(model.state_dict()), plain.state_dict(), 1e-6)


def test_a_frozen_prefix_skips_its_backward():
    plain, model = zoo.build("llama"), zoo.build("llama")
    for one in (plain, model):
        one.model.embed_tokens.requires_grad_(False)
        one.model.layers[0].requires_grad_(False)
        one.model.norm.requires_grad_(
            False
        )  # it belongs to no unit, so any backward might add to its gradient
    with wrapped(model, microbatches=2):
        streamed_backward(model, BATCH)
        resident_backward(plain, BATCH, 2)
        assert_equal(gradients(model), gradients(plain))
        timeline = vars(model)["_outsize_runner"]._engine.take_timeline()
        backwards = {
            str(event.op).split()[1][0] for event in timeline.events if str(event.op).startswith("B ")
        }
        assert backwards == {"2", "3", "4"}


def test_two_wrapped_models_live_in_one_process():
    first, second = zoo.build("llama"), zoo.build("gpt2")
    plain = zoo.build("llama"), zoo.build("gpt2")
    with wrapped(first, microbatches=2), wrapped(second, microbatches=2):
        loss = first(**BATCH).loss + second(**BATCH).loss
        loss.backward()
        want = resident_backward(plain[0], BATCH, 2) + resident_backward(plain[1], BATCH, 2)
        assert torch.equal(loss.detach(), want)
        assert_equal(gradients(first), gradients(plain[0]))
        assert_equal(gradients(second), gradients(plain[1]), 1e-6)  # tied


@pytest.mark.parametrize("settings", [{}, {"home": "disk"}, {"home": "disk", "device": "emulated:1"}])
def test_fp32_stays_fp32_on_every_tier(settings: dict[str, object]):
    """At home, in slots, in accumulators, in what is saved below the device, and in what is handed out."""
    with wrapped(zoo.build("llama"), offload=True, slots=2, **settings) as model:
        optimizer, fine = outsize.AdamW(model, lr=0.0, weight_decay=0.0), torch.tensor(1.0 + 2.0**-23)
        name = "model.layers.1.mlp.up_proj.weight"
        weight = {
            name: fine.expand(model.get_parameter(name).shape)
        }  # its last bit is lost in any other dtype
        model.load_state_dict(weight, strict=False)
        inputs = []
        handle = model.model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
        streamed_backward(model, BATCH)
        handle.remove()
        optimizer.step()
        runner = vars(model)["_outsize_runner"]
        home, units = runner.session.home, runner.split.spec.units
        assert {runner.split.spec.dtype} == runner.split.spec.dtypes == {"fp32"}
        for unit in units:
            for plane in ("weights", "exp_avg", "exp_avg_sq", "gradient"):
                assert home._layout.extent(unit.index, plane).dtype is torch.float32
        assert set(inputs) == {torch.float32}
        assert (
            {p.dtype for p in model.parameters()}
            == {p.grad.dtype for p in model.parameters()}
            == {torch.float32}
        )
        assert dict(model.state_dict())[name].eq(fine).all()
        assert {t.dtype for s in optimizer.state_dict()["state"].values() for t in s.values() if t.dim()} == {
            torch.float32
        }


def test_copies_and_pickles_are_refused_with_a_reason():
    with wrapped(zoo.build("llama")) as model:
        for attempt in (
            lambda: copy.deepcopy(model),
            lambda: copy.copy(model),
            lambda: pickle.dumps(model),
            lambda: torch.save(model, io.BytesIO()),
        ):
            with pytest.raises(ModelError, match="save_pretrained"):
                attempt()
        with pytest.raises(ConfigError, match="wrapped already"):
            outsize.wrap(model)
        for attempt in (model.half, lambda: model.to(torch.bfloat16)):
            with pytest.raises(ConfigError, match=r"before outsize\.wrap"):
                attempt()
        assert model.to("cpu") is model
        assert model.to("cpu", torch.float32) is model


def test_a_module_around_a_wrapped_model_may_be_moved_to_where_it_is():
    """As Lightning and Fabric do with what holds the model."""
    with wrapped(zoo.build("llama")) as model:
        around = nn.Sequential(model, nn.Linear(2, 2))
        where = model.lm_head.weight.data_ptr()
        for same in (around.to("cpu"), around.cpu(), around.float(), around.to(torch.float32)):
            assert same is around
        assert model.lm_head.weight.data_ptr() == where
        with pytest.raises(ConfigError, match="keeps device and dtype"):
            around.half()
        with pytest.raises(ConfigError, match="keeps device and dtype"):
            around.to("meta")


@pytest.mark.parametrize("offload", [False, True])
def test_a_forward_without_a_backward_frees_its_activations(offload: bool):
    with wrapped(zoo.build("llama"), microbatches=2, offload=offload) as model:
        for _ in range(3):
            out = model(**BATCH)
            node = weakref.ref(out.loss.grad_fn)
            del out
        gc.collect()
        assert node() is None
        assert not [o for o in gc.get_objects() if type(o).__name__ == "MicrobatchRun"]
        streamed_backward(model, BATCH)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_saved_off_the_device_has_room_for_one_forward(training: bool):
    with wrapped(zoo.build("llama"), microbatches=2, offload=True) as model:
        model.train(training)
        first = model(**BATCH)
        with pytest.raises(ConfigError, match="room for one forward at a time: run the backward"):
            model(**BATCH)
        first.loss.backward()
        streamed_backward(model, BATCH)


def test_several_forwards_before_their_backwards():
    """As in a preference loss; the first backward is not of the last forward."""
    other = zoo.batch("llama", seed=4, num_sequences=2)
    plain = zoo.build("llama")
    want = plain(**BATCH).logits.square().mean() - plain(**other).logits.mean()
    want.backward()
    with wrapped(zoo.build("llama"), slots=2) as model:
        got = model(**BATCH).logits.square().mean() - model(**other).logits.mean()
        got.backward()
        assert torch.equal(got, want)
        assert_equal(gradients(model), gradients(plain), 1e-7)


@pytest.mark.parametrize("home", HOMES)
def test_gradients_by_name_are_refused_with_the_remedy(home: str):
    with wrapped(zoo.build("llama"), home=home) as model:
        own = next(model.parameters())
        for ask in (
            lambda loss: torch.autograd.grad(loss, [own]),
            lambda loss: torch.autograd.grad(loss, [own], allow_unused=True),
            lambda loss: loss.backward(inputs=[own]),
        ):
            with pytest.raises(
                ConfigError, match=r"use loss.backward\(\), which leaves them in parameter.grad"
            ):
                ask(model(**BATCH).loss)
        assert own.grad is None
        streamed_backward(model, BATCH)
        assert own.grad is not None


def test_a_second_backward_is_refused():
    with wrapped(zoo.build("llama")) as model:
        loss = model(**BATCH).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_after_zero_grad(set_to_none: bool):
    plain = zoo.build("llama")
    resident_backward(plain, BATCH, 1)
    with wrapped(zoo.build("llama")) as model:
        optimizer = outsize.AdamW(model, lr=0.0, weight_decay=0.0)
        for zero in (optimizer.zero_grad, model.zero_grad):
            streamed_backward(model, BATCH)
            optimizer.step()
            zero(set_to_none=set_to_none)
            assert all((p.grad is None) is set_to_none for p in model.parameters())
        streamed_backward(model, BATCH)
        assert_equal(gradients(model), gradients(plain))


def test_a_gradient_of_the_user_s_own_counts():
    plain, mine = zoo.build("llama"), torch.full((97, 32), 0.25)
    plain.lm_head.weight.grad = mine.clone()
    resident_backward(plain, BATCH, 1)
    with wrapped(zoo.build("llama")) as model:
        model.lm_head.weight.grad = mine.clone()
        streamed_backward(model, BATCH)
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_of_the_user_s_own_on_the_logits(count: int):
    ids = BATCH["input_ids"]

    def own(model: nn.Module) -> torch.Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)

    plain = zoo.build("llama")
    want = own(plain)
    want.backward()
    with wrapped(zoo.build("llama"), microbatches=count) as model:
        got = own(model)
        got.backward()
        assert torch.equal(got, want)
        assert_equal(gradients(model), gradients(plain), 0.0 if count == 1 else 1e-7)


def test_a_cache_is_made_for_those_who_ask_and_never_recomputed():
    """A block that appends to a cache in the forward would see its keys twice in the recompute."""
    plain, model = zoo.build("llama"), zoo.build("llama")
    plain.config.use_cache = model.config.use_cache = True
    with wrapped(model, microbatches=2):
        streamed_backward(model, BATCH)
        resident_backward(plain, BATCH, 2)
        assert_equal(gradients(model), gradients(plain))
        with pytest.raises(ConfigError, match="no_grad"):
            model(**BATCH, use_cache=True)
        with torch.no_grad():
            first = model(input_ids=BATCH["input_ids"][:, :7], use_cache=True)
            rest = model(input_ids=BATCH["input_ids"][:, 7:], past_key_values=first.past_key_values)
            whole = plain(input_ids=BATCH["input_ids"]).logits
        assert torch.allclose(torch.cat([first.logits, rest.logits], dim=1), whole, atol=1e-5)


def test_no_grad_gives_the_same_output_and_no_history():
    plain = zoo.build("llama").eval()
    with wrapped(zoo.build("llama"), microbatches=2) as model, torch.no_grad():
        model.eval()
        got = model(**BATCH)
        assert torch.equal(got.logits, torch.cat([plain(**part).logits for part in parts_of(BATCH, 2)]))
        assert not got.logits.requires_grad
        with torch.inference_mode():
            assert torch.equal(model(**BATCH).logits, got.logits)


def test_hooks_on_units_see_their_outputs():
    seen: list[torch.Size] = []
    with wrapped(zoo.build("llama"), microbatches=2) as model:
        layer = model.model.layers[1]
        handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        model(**BATCH)
        handle.remove()
        assert seen == [torch.Size([4, 12, 32])]  # what hooks capture is the batch's, which goes whole for it
        handle = layer.register_forward_hook(lambda module, args, output: output * 0)
        changed = model(**BATCH).logits
        handle.remove()
    plain = zoo.build("llama")
    plain.model.layers[1].register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(changed, plain(**BATCH).logits)


def test_hidden_states_are_joined_and_carry_gradients():
    plain = zoo.build("llama")
    parts = []
    for part in parts_of(BATCH, 2):
        parts.append(plain(**part, output_hidden_states=True).hidden_states)
        parts[-1][2].square().sum().backward()
    with wrapped(zoo.build("llama"), microbatches=2) as model:
        got = model(**BATCH, output_hidden_states=True).hidden_states
        got[2].square().sum().backward()
        assert len(got) == len(parts[0])
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(got, zip(*parts, strict=True), strict=True))
        assert_equal(gradients(model), gradients(plain), 1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"microbatches": 2}, {"activations": "keep"}, {"activations": "offload"}, {"offload": True}],
    ids=str,
)
def test_a_loss_on_layers_in_between_has_the_bits_of_the_plain_model(settings: dict[str, object]):
    """What comes from the loss is added to first, and then each term that comes out of the next unit."""

    def backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        found = model(**batch, output_hidden_states=True)
        total = found.logits.square().sum()
        for hidden in found.hidden_states:
            total = total + hidden.sin().sum()
        total.backward()

    plain = zoo.build("llama")
    for part in parts_of(BATCH, int(str(settings.get("microbatches", 1)))):
        backward(plain, part)
    with wrapped(zoo.build("llama"), **settings) as model:
        streamed_backward(model, BATCH)  # of which inputs may leave the device
        model.zero_grad()
        backward(model, BATCH)
        assert_equal(gradients(model), gradients(plain))


def test_several_workers_return_no_hidden_states():
    with (
        wrapped(zoo.build("llama"), device="emulated:2", microbatches=2) as model,
        pytest.raises(ConfigError, match=r"output_hidden_states: .* use one device"),
    ):
        model(**BATCH, output_hidden_states=True)


def test_a_backward_after_the_weights_have_changed_is_refused():
    with wrapped(zoo.build("llama")) as model:
        optimizer = outsize.AdamW(model)
        streamed_backward(model, BATCH)
        loss = model(**BATCH).loss
        optimizer.step()
        with pytest.raises(ConfigError, match="run it again"):
            loss.backward()
        loss = model(**BATCH).loss
        model.load_state_dict(zoo.build("llama", seed=3).state_dict())
        with pytest.raises(ConfigError, match="run it again"):
            loss.backward()


def test_autocast_reaches_the_model():
    plain = zoo.build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(**BATCH)
    want.loss.backward()
    with wrapped(zoo.build("llama"), slots=2) as model:
        with torch.autocast("cpu", torch.bfloat16):
            got = model(**BATCH)
        got.loss.backward()
        assert got.logits.dtype is torch.bfloat16
        assert torch.equal(got.logits, want.logits)
        assert_equal(gradients(model), gradients(plain), 1e-3)
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_random_numbers_of_the_caller_are_not_disturbed():
    with wrapped(zoo.build("gpt2", dropout=0.1), microbatches=2) as model:
        model(**BATCH)
        torch.manual_seed(0)
        torch.randint(2**62, ())  # the one number that a forward of several microbatches draws
        want = torch.rand(3)
        torch.manual_seed(0)
        streamed_backward(model, BATCH)
        assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "keep"},
        {"activations": "keep-products", "microbatches": 8},
        {"activations": "recompute", "slots": 1},
        {"activations": "recompute", "offload": True, "home": "disk"},
    ],
)
def test_dropout_of_one_microbatch_is_that_of_the_plain_model(settings: dict[str, object]):
    """Losses, gradients, numbers drawn after them; of several forwards before a backward, and without one."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        rows = {key: value[:1] for key, value in BATCH.items()}
        found = [model(**rows).loss]
        found[0].backward()
        if settings.get("offload"):
            found.append(streamed_backward(model, rows))
        else:
            found += [model(**rows).loss, model(**rows).loss]
            (found[1] + found[2]).backward()
        norm = outsize.clip_grad_norm_ if model is not plain else torch.nn.utils.clip_grad_norm_
        norms = norm(model if model is not plain else model.parameters(), float("inf"))
        with torch.no_grad():
            return [*(loss.detach() for loss in found), norms, model(**rows).loss, torch.rand(3)]

    plain = zoo.build("gpt2", dropout=0.3)
    want = run(plain)
    assert want[0] != want[1]
    with wrapped(zoo.build("gpt2", dropout=0.3), **settings) as model:
        for got, one in zip(run(model), want, strict=True):
            assert torch.equal(got, one)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parameters_have_storages_of_their_own(name: str, tmp_path: Path):
    """As `safetensors` asks of weights that are tied, with which accelerate loads what it has saved."""
    plain = zoo.build(name, seed=1)
    save_model(plain, tmp_path / "weights")
    with wrapped(zoo.build(name)) as model:
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
        load_model(model, tmp_path / "weights")
        assert_equal(dict(model.state_dict()), plain.state_dict())
        want = plain.train()(**BATCH).loss
        assert torch.equal(model(**BATCH).loss, want)


def test_gradient_checkpointing_is_the_case_already(caplog):
    with wrapped(zoo.build("llama")) as model, caplog.at_level(logging.INFO, "outsize"):
        model.gradient_checkpointing_enable()
        assert "gradient checkpointing changes nothing" in caplog.text
        streamed_backward(model, BATCH)


def test_a_model_that_names_no_embedding_is_wrapped():
    class Sounds(Odd):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    with wrapped(make(Sounds)) as model:
        model(**batch()).loss.backward()


def test_parameters_replaced_after_wrapping_are_noticed():
    with wrapped(zoo.build("llama")) as model:
        want, former = model(**BATCH).loss, model.lm_head.weight
        model.lm_head.weight = nn.Parameter(torch.zeros(97, 32))
        assert not model(**BATCH).logits.any()
        model.lm_head.weight = former
        assert torch.equal(model(**BATCH).loss, want)


def test_parameters_of_several_dtypes_are_refused():
    model = zoo.build("llama")
    model.lm_head.to(torch.bfloat16)
    with pytest.raises(ModelError, match="one of them for all that train"):
        outsize.wrap(model)


@pytest.mark.parametrize("home", HOMES)
def test_unwrap_gives_the_trained_model_back(home: str):
    model = zoo.build("llama")
    kind = type(model)
    with wrapped(model, home=home):
        optimizer = outsize.AdamW(model)
        streamed_backward(model, BATCH)
        optimizer.step()
        want = {name: value.clone() for name, value in dict(model.state_dict()).items()}
    assert type(model) is kind
    assert_equal(model.state_dict(), want)
    model(**BATCH).loss.backward()
    copy.deepcopy(model)


def fused(model: nn.Module) -> None:
    """Put a forward in as TRL does: it takes the head's weight, and never calls the head."""
    former = model.forward

    def forward(self: nn.Module, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **inputs):
        if not fused_lm_head:
            return former(labels=labels, **inputs)
        hidden = self.model(**{**inputs, "use_cache": False}).last_hidden_state[:, :-1]
        scores = (hidden @ self.get_output_embeddings().weight.T).log_softmax(-1)
        assert labels is not None
        return {"log_probs": scores.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]}

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("head", ["auto", "resident"])
@pytest.mark.parametrize("home", HOMES)
def test_a_forward_that_takes_the_head_s_weight_itself_is_streamed(home: str, head: str):
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), home=home, head=head) as model:
        optimizer = outsize.AdamW(model, lr=1e-2)
        for one in (plain, model):
            fused(one)
            loss = -one(**BATCH, fused_lm_head=True)["log_probs"].mean()
            loss.backward()
        optimizer.step()
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True).step()
        assert_equal(dict(model.state_dict()), plain.state_dict())
        assert torch.equal(model(**BATCH).loss, plain(**BATCH).loss)
        del model.forward


def test_such_a_forward_with_a_streamed_head_is_refused_with_the_remedy():
    with wrapped(zoo.build("llama"), head="streamed") as model:
        fused(model)
        with pytest.raises(ModelError, match=r'head="resident"'):
            model(**BATCH, fused_lm_head=True)
        del model.forward
