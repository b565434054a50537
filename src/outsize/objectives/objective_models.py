"""Models of a run by a trainer, the trained and the frozen one, both streamed; and records of preferences.

The frozen model is wrapped as well, and its forward goes through the device once per step; nothing is computed before
the first step, and nothing has to be kept for a resume. What a run may hold is shared out between the two: host memory
and disk as their states are large, and a third of the device to the frozen one, which keeps nothing for a backward.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from outsize.accelerators import Devices
from outsize.choices import OBJECTIVES_OF
from outsize.config import Config, MemoryConfig
from outsize.data.reading.conversations import (
    PARTIAL_FLAGS,
    Message,
    Roles,
    as_messages,
    holds_messages,
    is_conversation,
    listed,
    pop_trained,
    read_messages,
    read_tools,
    system_field,
    with_system,
)
from outsize.data.reading.formats import CONVERSATIONS, alpaca_prompt
from outsize.data.reading.text_records import Record
from outsize.errors import ConfigError, DataError
from outsize.model.adapters import peft_config
from outsize.model.build import build_skeleton, load_hf_config
from outsize.objectives.recipes import Recipe, teacher_logits_of
from outsize.session.job.machine import describe_machine, home_file
from outsize.streamed.spec import BlockSettings, choose_dtype
from outsize.wrapped.api import Built, open_wrapped
from outsize.wrapped.arguments import WrapSettings, transport_of
from outsize.wrapped.module import is_wrapped, runner_of

_FROZEN_DEVICE_SHARE = 3
# Of a parameter that trains: gradient and two moments, and a master beside weights of half the bytes.
_STATE_BYTES = {"fp32": 4 + 12, "bf16": 2 + 12 + 4}
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run.

    Attributes:
        trained: wrapped, or PEFT's model around the wrapped one.
        frozen: what that is compared with, wrapped; None where it is not, or with itself.
        adapters: PEFT's configuration of those that train; None where the model itself does.
    """

    trained: nn.Module
    frozen: nn.Module | None
    adapters: Any

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (role, model) of each wrapped model; role is ``trained`` or ``frozen``."""
        for name, model in (("trained", streamed(self.trained)), ("frozen", self.frozen)):
            if model is not None and is_wrapped(model):
                yield name, model


def store_of(config: Config, run_dir: Path) -> Path:
    """Return the directory of a run's homes on disk, which nobody else uses."""
    return home_file(config.memory, run_dir).with_suffix("")


def streamed(model: Any) -> nn.Module:
    """Return the model that is wrapped: what adapters were put around, where they were."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def open_models(
    stack: ExitStack,
    config: Config,
    devices: Devices,
    recipe: Recipe,
    changes: Mapping[str, Any],
    run_dir: Path,
    *,
    empty: bool = False,
) -> Models:
    """Open the models of a run, their weights at home.

    Args:
        stack: gives their memory back.
        config: of the run.
        devices: that compute.
        recipe: of its objective.
        changes: what the config of the trained one says otherwise than its checkpoint's.
        run_dir: see `store_of`.
        empty: leave the weights as they are, zeros, for a plan alone.

    Raises:
        OutsizeError: one cannot be opened, or does not fit.
    """
    lora = config.train.method == "lora"
    other = config.train.teacher if config.train.objective in OBJECTIVES_OF["teacher"] else None
    other = None if teacher_logits_of(config) else other
    if recipe.compares and not lora:
        other = config.model.path
    memory, frozen_memory = (
        (config.memory,) * 2 if other is None else _shared(config, devices, recipe.auto, other, run_dir)
    )
    codecs = (config.lora.base_codec, config.lora.table_codec) if lora else ("raw", "raw")
    settings = WrapSettings(
        memory=memory,
        microbatches=config.microbatches,
        store_dir=store_of(config, run_dir),
        codecs=codecs,
        head="resident" if recipe.takes_head else "auto",
        transport=transport_of(config.transport.model_dump()),
        moments=config.optimizer.state,
        blocks=BlockSettings.of(config),
    )
    model, adapters = config.model, _adapters(config, recipe) if lora else None
    dtype = choose_dtype(model.dtype, devices, scaled=False)
    built = Built(dtype, model.attention, model.trust_remote_code, recipe.auto, empty=empty)
    frozen = None
    if other is not None:
        plain = replace(settings, memory=frozen_memory, codecs=("raw", "raw"))
        frozen = _opened(stack, other, plain, replace(built, frozen=True)).eval()
    built = replace(
        built,
        frozen=lora,
        lora=adapters,
        freeze=model.freeze,
        changes=changes,
        may_lack=recipe.task in ("SEQ_CLS", "FEATURE_EXTRACTION"),  # a head, a pooler
    )
    return Models(_opened(stack, model.path, settings, built), frozen, adapters)


def _opened(stack: ExitStack, name: str, settings: WrapSettings, built: Built) -> nn.Module:
    wrapper = open_wrapped(name, settings, built)
    if is_wrapped(streamed(wrapper)):
        stack.callback(runner_of(streamed(wrapper)).close)
    return wrapper


def _adapters(config: Config, recipe: Recipe) -> Any:
    adapter_config = peft_config(config.lora.for_peft(), config.model.path, causal=recipe.task == "CAUSAL_LM")
    adapter_config.task_type = recipe.task
    return adapter_config


def _shared(
    config: Config, devices: Devices, auto: str, other: str, run_dir: Path
) -> tuple[MemoryConfig, MemoryConfig]:
    """Return what the trained and the frozen model may hold of a run's memory."""
    memory, trust = config.memory, config.model.trust_remote_code
    dtype = choose_dtype(config.model.dtype, devices, scaled=False)
    sizes, vocabularies = [], []
    for name in (config.model.path, other):
        hf_config = load_hf_config(name, trust)
        vocabularies.append(hf_config.get_text_config().vocab_size)
        skeleton = build_skeleton(hf_config, dtype, config.model.attention, trust, auto, frozen=True)
        sizes.append(sum(parameter.numel() for parameter in skeleton.parameters()))
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"train.teacher: {other} has a vocabulary of {vocabularies[1]:,} tokens, and {config.model.path} one of "
            f"{vocabularies[0]:,}; predictions can be compared over the same tokens alone"
        )
    states = sizes[0] * _STATE_BYTES[dtype], sizes[1] * _WEIGHT_BYTES[dtype]
    machine = describe_machine(memory, devices, sum(states), store_of(config, run_dir))

    def part(parameters: int, device_bytes: int) -> MemoryConfig:
        budgets = {
            f"{tier}_memory": tier_bytes * parameters // sum(states)
            for tier, tier_bytes in (("host", machine.host_bytes), ("disk", machine.disk_bytes))
        }
        return memory.model_copy(update={"home": machine.home, "device_memory": device_bytes, **budgets})

    frozen_bytes = machine.device_bytes // _FROZEN_DEVICE_SHARE
    return part(states[0], machine.device_bytes - frozen_bytes), part(states[1], frozen_bytes)


Row = dict[str, Any]
_ALPACA = ("instruction", "input", "history")
# Names of a prompt that nothing reads.
_OTHER_PROMPTS = ("question", "query", "input", "problem", "context")


def has_messages(record: Record, answers: Sequence[str]) -> bool:
    """Return whether a prompt or an answer of a record is messages, and not a text."""
    return any(holds_messages(record.get(name)) for name in ("prompt", *answers)) or any(
        record.get(name) for name in CONVERSATIONS
    )


def asks_as_chat(record: Record) -> bool:
    """Return whether a record has what only a conversation has room for: a system prompt, an instruction."""
    return bool(system_field(record) or record.get("instruction"))


def texts_row(record: Record, answers: Sequence[str], where: str) -> Row:
    """Return prompt and answers that are texts.

    Raises:
        DataError: one is no text, an answer is empty, or the prompt has another name.
    """
    prompt = record.get("prompt")
    _check_prompt_is_read(record, answers, where)
    row = {"prompt": prompt, **{name: record[name] for name in answers}}
    for name, value in row.items():
        if not isinstance(value, str) and (name != "prompt" or value is not None):
            raise DataError(
                f"{where}: field {name!r} must be a string or a list of messages, found {type(value).__name__}"
            )
        if name in answers and not str(value).strip():
            raise DataError(
                f"{where}: field {name!r} is empty; leave such records out, or raise data.max_bad_records"
            )
    return {name: value for name, value in row.items() if value is not None}


def _check_prompt_is_read(record: Record, answers: Sequence[str], where: str) -> None:
    """Refuse texts that are answers to nothing, since their prompt has a name that nothing reads."""
    if record.get("prompt") is not None or not all(isinstance(record.get(name), str) for name in answers):
        return
    other = next((name for name in _OTHER_PROMPTS if record.get(name)), None) or next(
        (name for name, value in record.items() if name not in answers and is_conversation(value)), None
    )
    if other is not None:
        raise DataError(
            f"{where}: {listed(answers)} are texts without a prompt, and field {other!r} would be left out; set "
            f"data.columns: {{prompt: {other}}}"
        )


def messages_row(
    record: Record, answers: Sequence[str], roles: Roles, where: str, *, alone: bool
) -> tuple[Row, set[str]]:
    """Return prompt, answers and tools of a conversation, and the names of the fields that were read for it.

    The prompt is `prompt`, or a conversation, or what an Alpaca record asks, or what the answers have in common;
    answers that may stand ``alone`` are conversations of their own where nothing else is the prompt.

    Raises:
        DataError: a field is of the wrong kind, an answer is empty, or does not begin where the prompt ends.
    """
    read = {*answers, "tools", "functions", system_field(record) or ""}
    held = next((name for name in CONVERSATIONS if record.get(name)), None)
    given = {
        name: as_messages(record, name, "assistant", where, roles) for name in answers if record.get(name)
    }
    prompt: list[Message] | None = None
    if record.get("prompt"):
        prompt = as_messages(record, "prompt", "user", where, roles)
        read.add("prompt")
    elif held is not None:
        prompt = read_messages(record, held, where, roles)
        read.add(held)
        if not given:
            prompt, given = prompt[:-1], {answers[0]: prompt[-1:]}
        elif prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: field {held!r} ends with a message of the assistant, and the answers come after it; leave "
                "that message out, or name the prompt 'prompt'"
            )
    elif record.get("instruction"):
        prompt = alpaca_prompt(record, where)
        read.update(_ALPACA)
    if not prompt:
        _check_prompt_is_read(record, answers, where)
    if not prompt and not alone:
        prompt, given = _split_off(given, where)
    if prompt:
        prompt = with_system(prompt, record, where)
    else:
        given = {name: with_system(messages, record, where) for name, messages in given.items()}
    row = {name: _answer(given.get(name, []), prompt, name, where) for name in answers}
    if prompt:
        row = {"prompt": prompt, **row}
    for messages in row.values():
        _without_marks(messages, where)
    tools = read_tools(record, where)
    return {**row, **({} if tools is None else {"tools": json.dumps(tools)})}, read


def _split_off(given: dict[str, list[Message]], where: str) -> tuple[list[Message], dict[str, list[Message]]]:
    """Return what two answers begin with alike, and what is left of each, as TRL's ``extract_prompt``."""
    chosen, *_, rejected = [*given.values()] * 2
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)) - 1)
    if not length:
        raise DataError(
            f"{where}: {listed(given)} have no message in common that would be the prompt; name it 'prompt'"
        )
    return chosen[:length], {name: messages[length:] for name, messages in given.items()}


def _answer(messages: list[Message], prompt: list[Message] | None, name: str, where: str) -> list[Message]:
    """Return an answer without the prompt, which data sets put before it once more."""
    turns = [message for message in prompt or () if message["role"] != "system"]
    for before in (prompt, turns):
        if before and [_said(message) for message in messages[: len(before)]] == [
            _said(message) for message in before
        ]:
            messages = messages[len(before) :]
            break
    if not messages or not any(
        message["content"].strip() or message.get("tool_calls") for message in messages
    ):
        raise DataError(
            f"{where}: field {name!r} is empty; leave such records out, or raise data.max_bad_records"
        )
    if prompt and messages[0]["role"] != "assistant":
        raise DataError(
            f"{where}: field {name!r} begins with a message of the {messages[0]['role']} that does not end the "
            "prompt; an answer is the assistant's"
        )
    return messages


def _said(message: Message) -> tuple[Any, Any]:
    return message["role"], message["content"]


def _without_marks(messages: list[Message], where: str) -> None:
    """Take out of messages what says that they are trained, which an answer is, and refuse what says otherwise."""
    for message in messages:
        refused = [name for name in PARTIAL_FLAGS if message.get(name) is not None]
        if pop_trained(message, where) is False and message["role"] == "assistant":
            refused.append("a mark that it is not to be trained")
        if refused:
            raise DataError(
                f"{where}: a message has {', '.join(refused)}, and answers are compared as they are; take it out, or "
                "leave such records out"
            )
