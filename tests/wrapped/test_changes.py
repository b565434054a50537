"""Programs that change weights, gradients or optimizer states have the plain model's bits, or are told another way."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

import outsize
import zoo
from outsize.errors import ConfigError, OutsizeError
from outsize.planner.memory.step_bytes import encoded_bytes
from outsize.planner.search import upgrades
from outsize.planner.search.sizing import Knobs, Sizing
from outsize.wrapped.module import runner_of
from wrapped.changes import HOMES, ROWS, Loop, Row
from wrapped.loops import wrapped

BATCH = zoo.batch("llama", num_sequences=2, seq_len=6)
# PEFT asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}
ALONE = [row for row in ROWS if "alone" in row.refused]
EQUAL = [row for row in ROWS if not {"all", "alone"} & row.refused.keys()]
CHUNKS, ROWS_OF_A_PROGRAM = 4, 6


def run(program: Sequence[Row], loop: Loop) -> tuple[list[Any], dict[str, Tensor]]:
    """A step, and each row with a step behind it: what rows return and lose by turns, and the weights at the end."""
    found = [loop.step()]
    for row in program:
        found += [copied(row.do(loop)), loop.step()]
    return found, {name: value.clone() for name, value in loop.model.state_dict().items()}


def copied(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().clone()
    if isinstance(found, dict):
        return {key: copied(value) for key, value in found.items()}
    return [copied(value) for value in found] if isinstance(found, list | tuple) else found


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert torch.equal(got, want)
    elif isinstance(want, np.ndarray):
        assert (got == want).all()
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    else:
        assert got == want


def begin(model: nn.Module, weights: dict[str, Tensor], make: Callable[[], torch.optim.Optimizer]) -> Loop:
    """A loop from the weights of the beginning, whatever was done before."""
    model.zero_grad()
    model.load_state_dict(weights)
    return Loop(model, make(), make, BATCH)


@cache
def run_plain(program: tuple[Row, ...]) -> tuple[list[Any], dict[str, Tensor]]:
    """What a program does to a model that nobody wrapped."""
    plain = zoo.small_llama()
    make = lambda: torch.optim.AdamW(plain.parameters(), **SETTINGS, fused=True)  # noqa: E731
    return run(program, Loop(plain, make(), make, BATCH))


def assert_as_plain(program: tuple[Row, ...], loop: Loop) -> None:
    """What a program returns, loses and leaves is what the plain model has; the error names the row."""
    (got, weights), (want, wanted) = run(program, loop), run_plain(program)
    names = ["the first step", *(name for row in program for name in (row.name, f"a step after {row.name}"))]
    for name, one, other in (*zip(names, got, want, strict=True), ("the end", weights, wanted)):
        try:
            assert_same(one, other)
        except AssertionError as error:
            error.add_note(f"{name}, of {[row.name for row in program]}")
            raise


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_changes_have_the_plain_model_s_bits(chunk: int, home: str):
    """Programs of a few rows, each from the same weights and a fresh optimizer."""
    weights = copy.deepcopy(zoo.small_llama().state_dict())
    rows = [row for row in EQUAL[chunk::CHUNKS] if home not in row.refused]
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        again = lambda: outsize.AdamW(model, **SETTINGS)  # noqa: E731
        for start in range(0, len(rows), ROWS_OF_A_PROGRAM):
            program = tuple(rows[start : start + ROWS_OF_A_PROGRAM])
            assert_as_plain(program, begin(model, weights, again))


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("row", ALONE, ids=lambda row: row.name)
def test_what_cannot_be_undone_has_the_plain_model_s_bits(row: Row, home: str):
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        again = lambda: outsize.AdamW(model, **SETTINGS)  # noqa: E731
        assert_as_plain((row,), Loop(model, again(), again, BATCH))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.refused and row not in ALONE], ids=lambda row: row.name
)
def test_what_cannot_be_is_refused_with_the_way(row: Row):
    for home, settings in HOMES.items():
        words = row.refused.get(home, row.refused.get("all"))
        if words is None:
            continue
        with wrapped(zoo.small_llama(), **settings) as model:
            again = lambda model=model: outsize.AdamW(model, **SETTINGS)  # noqa: E731
            with pytest.raises((OutsizeError, RuntimeError, ValueError), match=words):
                run((row,), Loop(model, again(), again, BATCH))


def test_the_page_on_tests_counts_them():
    ways = Counter(
        "refused" if home in row.refused or "all" in row.refused else "equal"
        for row in ROWS
        for home in HOMES
    )
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    assert (
        f"{len(ROWS)} operations over {len(HOMES)} homes: {ways['equal']} equal, {ways['refused']} refused"
        in page
    )
    assert len(ROWS) == len({row.name for row in ROWS})


@pytest.mark.parametrize("home", HOMES)
def test_a_hook_that_fails_leaves_the_gradients_of_others_with_hooks(home: str):
    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook's own")

    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        table, head = model.get_input_embeddings().weight, model.lm_head.weight
        head.register_hook(lambda gradient: gradient)
        model(**BATCH).loss.backward()
        want = [table.grad.clone(), head.grad.clone()]
        table.register_hook(fail)
        with pytest.raises(ValueError, match="a hook's own"):
            model(**BATCH).loss.backward()
        assert all(torch.equal(p.grad, former) for p, former in zip((table, head), want, strict=True))


@pytest.mark.parametrize("home", HOMES)
def test_what_a_program_holds_outlives_the_wrapping_or_is_refused(home: str):
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        loop = Loop(model, outsize.AdamW(model, **SETTINGS), lambda: loop.optimizer, BATCH)
        loop.step()
        loop.backward()
        held = {
            **model.state_dict(),
            "gradient": model.lm_head.weight.grad,
            "view": model.lm_head.weight.grad[1:],
        }
        moments = loop.optimizer.state[model.lm_head.weight]
        held |= {"exp_avg": moments["exp_avg"], "data": model.lm_head.weight.data}
        want = copied(held)
    gone = held.keys() - {"gradient", "view"} if home == "disk" else set()
    for name in held.keys() - gone:
        assert torch.equal(held[name], want[name]), name
    for name in gone:
        with pytest.raises(OutsizeError, match=r"keep tensor.clone\(\)"):
            held[name].sum()


@pytest.mark.parametrize("home", HOMES)
def test_weights_assigned_and_changed_before_the_backward_are_refused_as_any_others(home: str):
    """Values that are no numbers are like themselves, and no change."""
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        given = torch.full(model.lm_head.weight.shape, 0.01)
        model.lm_head.weight.data = given
        loss = model(**BATCH).loss
        given.mul_(2)
        with pytest.raises(ConfigError, match="weights have changed between this forward and its backward"):
            loss.backward()
        given[3] = torch.nan
        model(**BATCH).loss.backward()
        assert model.lm_head.weight.grad.isnan().any()


@pytest.mark.parametrize("home", HOMES)
def test_a_step_returns_at_once_where_nobody_holds_what_it_changes(home: str):
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        loop = Loop(model, outsize.AdamW(model, **SETTINGS), lambda: loop.optimizer, BATCH)
        handed_out = runner_of(model).parameters.handed_out
        for _ in range(2):
            loop.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loop.optimizer.step()
            assert not handed_out.is_held()
            loop.optimizer.zero_grad()
        held = loop.head.detach()[1:]
        assert handed_out.is_held() == (home != "disk")
        del held
        assert not handed_out.is_held()


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("change", ["mul_", "data", "data =", "state_dict", "foreach", "load"])
def test_half_precision_weights_that_are_changed_are_what_the_next_step_begins_from(change: str, home: str):
    """Masters follow whatever has changed them: the same end as with weights that were so from the start."""

    def halve(model: nn.Module) -> None:
        weight = model.lm_head.weight
        if change == "mul_":
            weight.mul_(0.5)
        elif change == "data":
            weight.data.mul_(0.5)
        elif change == "data =":
            weight.data = weight.data * 0.5
        elif change == "state_dict":
            model.state_dict()["lm_head.weight"].mul_(0.5)
        elif change == "foreach":
            torch._foreach_mul_([weight], 0.5)
        else:
            model.lm_head.load_state_dict({"weight": weight.detach() * 0.5})

    def train(late: bool) -> dict[str, Tensor]:
        plain = zoo.small_llama(torch.bfloat16)
        with torch.no_grad():
            if not late:
                halve(plain)
            with wrapped(plain, home=home) as model:
                optimizer = outsize.AdamW(model, **SETTINGS)
                if late:
                    with torch.enable_grad():
                        model(**BATCH)  # the engine is there
                    halve(model)
                with torch.enable_grad():
                    loop = Loop(model, optimizer, lambda: optimizer, BATCH)
                    loop.step(), loop.step()
                return {name: value.clone() for name, value in model.state_dict().items()}

    assert_same(train(late=True), train(late=False))


class OddBlock(nn.Module):
    """A block whose parameters are a scalar, an empty one, a matrix and a frozen vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(8, 8))
        self.fixed = nn.Parameter(torch.arange(8.0), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * torch.tanh(hidden @ self.turned + self.fixed)


class Odd(nn.Module):
    """A model of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


@pytest.mark.parametrize("home", HOMES)
def test_parameters_of_odd_forms_are_trained_as_any_other(home: str):
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    plain = Odd()
    want = train(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS, fused=True))
    with wrapped(Odd(), **HOMES[home]) as model:
        assert_same(train(model, outsize.AdamW(model, **SETTINGS)), want)


def adapted() -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(zoo.small_llama(), config)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_adapters_are_merged_and_taken_out_again(home: str, tmp_path: Path):
    plain = adapted()
    with wrapped(adapted(), home=home) as model:
        for made in (plain, model):
            loss = made(**BATCH).loss
            loss.backward()
            made.zero_grad()
            made.merge_adapter()
            with torch.no_grad():
                made.merged = made(**BATCH).logits
            made.unmerge_adapter()
            made.save_pretrained(tmp_path / type(made).__mro__[1].__name__)
        assert torch.equal(model.merged, plain.merged)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        with torch.no_grad():  # the adapters are gone, and the home is made anew
            for made in (plain, model):
                made.merge_and_unload()
                made.merged = made(**BATCH).logits
        assert torch.equal(model.merged, plain.merged)
    files = sorted(tmp_path.glob("*/adapter_model.safetensors"))
    assert len(files) == 2
    assert files[0].read_bytes() == files[1].read_bytes()


def test_weights_that_a_codec_has_written_are_rounded_again_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
):
    with wrapped(adapted(), home="host", base_codec="int8") as model:
        weight = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(0.5)
        assert torch.allclose(weight, before * 0.5, atol=1e-3)
        assert "was rounded by the codec" in caplog.text
        assert weight.norm() == weight.detach().clone().norm()


def test_frozen_weights_that_lie_on_the_device_encoded_follow_a_change(monkeypatch: pytest.MonkeyPatch):
    logits = []
    for held in (False, True):

        def encoded(sizing: Sizing, knobs: Knobs, held: bool = held) -> Iterator[Knobs]:
            units = (unit.index for unit in sizing.model.units if held and encoded_bytes(unit))
            yield replace(knobs, encoded=frozenset(units))

        monkeypatch.setattr(upgrades, "HOLDING", (encoded, Sizing.more_staying))
        monkeypatch.setattr(Sizing, "more_decoded", lambda *_: iter(()))
        with wrapped(adapted(), home="host", base_codec="int8", device="emulated:1") as model:
            logits.append(model(**BATCH).logits)
            assert bool(runner_of(model)._plan.layout.encoded) is held
            weight = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
            with torch.no_grad():
                weight.mul_(0.5)
            logits.append(model(**BATCH).logits)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    assert not torch.equal(logits[0], logits[1])
