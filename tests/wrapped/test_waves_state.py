"""Sequences in flight together on models that keep something of what they read, in every place where code can."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import outsize
import zoo
from outsize.wrapped.module import runner_of
from outsize.wrapped.writing.scoring import ScoredText, score

NUM_NEW = 4
PROMPTS = [[5, 6, 7, 8], [60, 61, 62], [30, 41, 22, 13], [9, 50]]
LIST: list[Any] = []
NUMBER = 0.0


@dataclass
class Note:
    seen: Any = None


class OwnCache:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}


class Writer(nn.Embedding):
    """Keeps in ``self.place`` what it has read since a prompt began; one class for each kind of place."""

    shared: ClassVar[list[Any]] = []
    number = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = super().forward(ids)
        begins = ids.shape[1] > 1
        self.keep(ids.float().mean() + (0.0 if begins else 0.5 * self.kept()))
        return hidden

    def keep(self, value: Tensor) -> None:
        raise NotImplementedError

    def kept(self) -> Any:
        raise NotImplementedError


class InTensor(Writer):
    def keep(self, value: Tensor) -> None:
        self.last = value

    def kept(self) -> Any:
        return self.last


class InNumber(InTensor):
    def keep(self, value: Tensor) -> None:
        self.last = float(value)  # type: ignore[assignment]


class InPlace(Writer):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def keep(self, value: Tensor) -> None:
        self.last.copy_(value)

    def kept(self) -> Any:
        return self.last.clone()


class InContainer(Writer):
    """A list, dict, deque, object … made by ``make``, written by ``put``, read by ``get``."""

    make: Callable[[], Any]
    put: Callable[[Any, Any], Any]
    get: Callable[[Any], Any]

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.place = type(self).make()

    def keep(self, value: Tensor) -> None:
        type(self).put(self.place, value)

    def kept(self) -> Any:
        return type(self).get(self.place)


class InGlobalList(Writer):
    def keep(self, value: Tensor) -> None:
        LIST[:] = [value]

    def kept(self) -> Any:
        return LIST[0]


class InGlobalNumber(Writer):
    def keep(self, value: Tensor) -> None:
        global NUMBER
        NUMBER = float(value)

    def kept(self) -> Any:
        return NUMBER


def _note(value: float) -> None:
    global NUMBER
    NUMBER = value


class InHelper(InGlobalNumber):
    def keep(self, value: Tensor) -> None:
        _note(float(value))


class InClassList(Writer):
    def keep(self, value: Tensor) -> None:
        self.shared[:] = [value]

    def kept(self) -> Any:
        return self.shared[0]


class InClassNumber(Writer):
    def keep(self, value: Tensor) -> None:
        type(self).number = float(value)

    def kept(self) -> Any:
        return self.number


class InSubModule(Writer):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.inner = nn.Identity()

    def keep(self, value: Tensor) -> None:
        self.inner.last = value

    def kept(self) -> Any:
        return self.inner.last


def _cell() -> type[Writer]:
    last: Any = 0.0

    class InCell(Writer):
        def keep(self, value: Tensor) -> None:
            nonlocal last
            last = value

        def kept(self) -> Any:
            return last

    return InCell


def _container(make: Any, put: Any, get: Any) -> type[Writer]:
    static = {name: staticmethod(each) for name, each in (("make", make), ("put", put), ("get", get))}
    return type("In" + type(make()).__name__.title(), (InContainer,), static)


def _attribute(name: str) -> tuple[Callable[[Any, Any], None], Callable[[Any], Any]]:
    return lambda place, value: setattr(place, name, value), lambda place: getattr(place, name)


KINDS: list[type[Writer]] = [
    InTensor,
    InNumber,
    InPlace,
    InGlobalList,
    InGlobalNumber,
    InHelper,
    InClassList,
    InClassNumber,
    InSubModule,
    _cell(),
    _container(list, lambda place, value: place.append(value), lambda place: place[-1]),
    _container(lambda: deque(maxlen=2), lambda place, value: place.append(value), lambda place: place[-1]),
    _container(dict, lambda place, value: place.update(last=value), lambda place: place["last"]),
    _container(
        lambda: defaultdict(list),
        lambda place, value: place["last"].append(value),
        lambda place: place["last"][-1],
    ),
    _container(
        lambda: [{"at": SimpleNamespace(last=None)}],
        lambda place, value: setattr(place[0]["at"], "last", value),
        lambda place: place[0]["at"].last,
    ),
    _container(SimpleNamespace, *_attribute("last")),
    _container(Note, *_attribute("seen")),
    _container(
        OwnCache, lambda place, value: place.rows.update(last=value), lambda place: place.rows["last"]
    ),
]


class Reader(LlamaRMSNorm):
    """Behind the blocks: what it gives depends on what has been read before them."""

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = super().forward(hidden)
        return normed * (1 + torch.sin(torch.as_tensor(self.writer.kept())))


def make_model(kind: type[Writer]) -> LlamaForCausalLM:
    model = zoo.build("llama").eval().requires_grad_(False)
    table, norm = model.model.embed_tokens, model.model.norm
    writer = kind(*table.weight.shape)
    reader = Reader(*norm.weight.shape)
    writer.weight, reader.weight = table.weight, norm.weight
    vars(reader)["writer"] = writer
    model.model.embed_tokens, model.model.norm = writer, reader
    return model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_model_keeps_of_a_sequence_is_not_read_by_another(
    kind: type[Writer], caplog: pytest.LogCaptureFixture
):
    model = make_model(kind)
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
        tokens.append(out[0, len(prompt) :].tolist())
        rows = model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(rows.gather(1, ids[0, 1:, None])[:, 0])
    wrapped = outsize.wrap(model, device="cpu", home="disk", device_memory="600KiB")
    try:
        with caplog.at_level("WARNING", logger="outsize"):
            scored = score(wrapped, [ScoredText(prompt, 1) for prompt in PROMPTS], group_tokens=1)
            for got, want in zip(scored, logprobs, strict=True):
                assert torch.allclose(torch.tensor(got.tokens), want, atol=1e-6)
            got = outsize.generate(
                wrapped, PROMPTS, max_new_tokens=NUM_NEW, in_flight=4, do_sample=False, eos_token_id=None
            )
            assert got == tokens
        assert caplog.text.count("one behind the other") == 1
    finally:
        runner_of(wrapped).close()
