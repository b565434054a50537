"""``outsize serve``: what clients of OpenAI's interface ask for, over HTTP."""

import asyncio
import http.client
import importlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import trl.chat_template_utils
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import parse_response

from cli.command_line import status_of
from outsize import local_server
from outsize.cli.openai_requests import ChatRequest, read_request
from outsize.cli.openai_server import Completions, make_app
from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.local_server import LocalServer
from outsize.training.run_data import Conversation
from outsize.wrapped.writing.detokenizer import ReplyReader
from patience import PATIENCE_S
from support import make_model_dir, make_tokenizer

PLAIN, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
QWEN_REPLIES = get_response_template(None, SimpleNamespace(config=SimpleNamespace(model_type="qwen3")))
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=256)


@pytest.fixture
def served(model: Path) -> Iterator[tuple[str, Completions]]:
    options = ModelOptions(model=str(model), device="cpu", device_memory="64MiB", home="disk", dtype="fp32")
    with TextWriter(options) as writer:
        completions = Completions(writer, "tiny", 8)
        with LocalServer(make_app(completions)) as server:
            yield server.url.removeprefix("http://").rstrip("/"), completions
            completions.end()


def ask(address: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    content = body if body is None or isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json", **headers}
    connection.request("GET" if body is None else "POST", path, content, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def held(
    completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Have answers begin, and go on when they are let: the events of both."""
    began, goes_on = threading.Event(), threading.Event()
    write = completions._writer.write

    def slow(*prompts: Any, **choice: Any) -> Any:
        began.set()
        assert goes_on.wait(PATIENCE_S)
        return write(*prompts, **choice)

    monkeypatch.setattr(completions._writer, "write", slow)
    return began, goes_on


def write_only(completions: Completions, reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model write one reply, whatever it is asked."""
    write, tokenizer = completions._writer.write, completions._writer._tokenizer
    wanted = tokenizer(reply)["input_ids"]

    def written(prompts: Any, on_text: Any, **choice: Any) -> Any:
        before = completions._writer.num_tokens(prompts[0])

        def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token = wanted[max(ids.shape[1] - before, 0)]  # settings are tried on less
            return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)

        return write(prompts, on_text, **choice, logits_processor=[only])

    monkeypatch.setattr(completions._writer, "write", written)


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def request_of(address: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = [f"POST {PLAIN} HTTP/1.1", f"Host: {address}", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content


def test_a_chat_is_answered_as_a_whole_and_piece_by_piece(served: tuple[str, Completions]):
    address, _ = served
    body = {"model": "any", "messages": HELLO, "temperature": 0, "max_tokens": 5}
    status, text = ask(address, CHAT, body)
    assert status == 200
    found = json.loads(text)
    assert found["object"] == "chat.completion"
    assert found["usage"]["completion_tokens"] == 5
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "length"
    *pieces, last, done = events(ask(address, CHAT, {**body, "stream": True})[1])
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert json.loads(pieces[0])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(json.loads(p)["choices"][0]["delta"]["content"] for p in pieces)
        == choice["message"]["content"]
    )
    silent: list[Any] = [{"role": "assistant"}, {"role": "assistant", "content": None}]
    blank = {"role": "assistant", "content": ""}
    assert (
        len(
            {
                str(json.loads(ask(address, CHAT, {**body, "messages": [one, *HELLO]})[1])["choices"])
                for one in (*silent, blank)
            }
        )
        == 1
    )
    in_parts = [
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    ]
    assert json.loads(ask(address, CHAT, {**body, "messages": in_parts})[1])["choices"] == found["choices"]


def test_a_prompt_is_gone_on_from_as_generate_does(served: tuple[str, Completions]):
    address, completions = served
    greedy = {"do_sample": False, "max_new_tokens": 8, "batch_size": 1}
    (want,), _ = completions._writer.write(["once"], lambda _: None, **greedy)
    found = json.loads(ask(address, PLAIN, {"prompt": "once", "temperature": 0})[1])
    assert found["choices"][0]["text"] == want.text
    drawn = [ask(address, PLAIN, {"prompt": "once", "seed": seed, "top_p": 0.9})[1] for seed in (1, 1, 2)]
    one, again, other = (json.loads(text)["choices"][0]["text"] for text in drawn)
    assert one == again != other
    assert json.loads(ask(address, "/v1/models")[1])["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, "no json", 400, "not valid JSON"),
        (CHAT, {"messages": []}, 400, "messages is []"),
        (CHAT, {"messages": HELLO, "functions": [{}], "best_of": 2}, 400, "functions, best_of: not supported"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content has to be a text"),
        (PLAIN, {"prompt": "x", "temperature": "hot"}, 400, "temperature is 'hot'"),
        (PLAIN, {"prompt": "x", "max_tokens": -1}, 400, "max_tokens is -1"),
        (PLAIN, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        (PLAIN, {"prompt": "x", "max_tokens": True}, 400, "max_tokens is True"),
        (PLAIN, '{"prompt": "x", "temperature": NaN}', 400, "temperature is nan"),
        (PLAIN, {"prompt": "x", "top_k": 2.5}, 400, "top_k is 2.5"),
        (PLAIN, {"prompt": "x", "top_p": -1}, 400, "top_p is -1"),
        (PLAIN, {"prompt": "x", "n": True}, 400, "n is True"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice is 'required'"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "set logprobs to true"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format: not"),
        (PLAIN, {"prompt": "x", "presence_penalty": False}, 400, "presence_penalty: not supported"),
        (PLAIN, {"prompt": []}, 400, "prompt is []"),
        (PLAIN, {"prompt": [1, 2]}, 400, "prompt.0 is 1"),
        (CHAT, {"messages": [{"role": "oracle", "content": "x"}]}, 400, "unknown role 'oracle'"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "a message of the user has no 'content'"),
        (PLAIN, {"prompt": "x", "min_p": 2}, 400, "min_p is 2"),
        (PLAIN, {"prompt": "x", "seed": 2**64}, 400, "seed is 1844"),
        (PLAIN, {"prompt": "x", "min_tokens": 4, "repetition_penalty": 1.2}, 400, "min_tokens, repetition_penalty:"),
        (PLAIN, {"prompt": "x", "stream_options": {"more": True}}, 400, "stream_options.more is True"),
        (CHAT, {"messages": [{"role": "user", "content": "emoji \ud83d"}]}, 400, "unpaired surrogate"),
        (PLAIN, {"prompt": "\ud83d", "stream": True}, 400, "unpaired surrogate"),
        (PLAIN, "[" * 200_000, 400, "not valid JSON"),
        (PLAIN, {"prompt": "x" * 300, "stream": True}, 400, "positions of the model"),
        ("/v1/other", {"prompt": "x"}, 404, "there is nothing at POST /v1/other"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    served: tuple[str, Completions], path: str, body: Any, status: int, message: str
):
    got, text = ask(served[0], path, body)
    assert got == status
    assert message in text


def test_a_setting_that_is_not_done_is_refused_before_the_server_listens(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("signal.pause", lambda: 1 / 0)
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "generation_config.json").write_text(json.dumps({"token_healing": True}))
    assert status_of("serve", copy, "--device", "cpu", "--port", 0) == 2
    assert "generation_config.json: token_healing is True" in capsys.readouterr().err


# What clients send unasked, and what of it changes no answer.
UNASKED: tuple[dict[str, Any], ...] = (
    {"n": 1, "stop": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "logit_bias": {}},
    {"user": "me", "service_tier": "auto", "metadata": {}, "store": False, "frequency_penalty": 0},
    {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "best_of": 1,
        "echo": False,
    },
    {"ignore_eos": False, "continue_final_message": False, "add_generation_prompt": True},
    {"top_k": -1},
    {"top_p": 0},
    {"prompt": ["once"]},
    {"stream_options": {"include_usage": False, "include_obfuscation": False}},
)


@pytest.mark.parametrize("unasked", UNASKED, ids=lambda one: "-".join(one))
def test_what_changes_no_answer_is_taken(served: tuple[str, Completions], unasked: dict[str, Any]):
    body = {"prompt": "once", "temperature": 0}
    answers = [json.loads(ask(served[0], PLAIN, each)[1]) for each in (body, {**body, **unasked})]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_a_stream_ends_with_its_usage_where_that_is_asked(served: tuple[str, Completions]):
    address, _ = served
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 3}
    usage = json.loads(ask(address, CHAT, body)[1])["usage"]
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, done = events(ask(address, CHAT, asked)[1])
    assert (json.loads(last)["choices"], json.loads(last)["usage"], done) == ([], usage, "[DONE]")


def test_a_model_is_told_by_its_name(served: tuple[str, Completions]):
    assert json.loads(ask(served[0], "/v1/models/tiny")[1])["id"] == "tiny"
    status, text = ask(served[0], "/v1/models/other")
    assert status == 404
    assert "there is nothing at /v1/models/other" in json.loads(text)["error"]["message"]


def test_calls_and_results_of_tools_are_part_of_a_conversation(model: Path):
    """Arguments are text in OpenAI's interface, and an object in the templates of most models."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    (asked,) = read_request(json.dumps({"messages": messages}).encode(), ChatRequest).prompts
    with TextWriter(ModelOptions(model=str(model), device="cpu", home="host")) as writer:
        writer._tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
        )
        assert writer.text_of(asked) == 'user:hello;assistant:{"a": 1};tool:2;'


def test_pages_from_elsewhere_can_ask_nothing(served: tuple[str, Completions]):
    assert ask(served[0], PLAIN, {"prompt": "x"}, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(served[0], PLAIN, {"prompt": "x"}, Host="example.com")[0] == 403
    assert ask(served[0], PLAIN, {"prompt": "x"}, Origin="https://example.com")[0] == 403
    assert ask(served[0], MODELS, Origin="http://localhost:3000")[0] == 200


def test_a_server_that_ends_lets_a_text_go(served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch):
    """And its model is whole afterwards."""
    address, completions = served
    answers = []
    write = completions._writer.write
    began, goes_on = held(completions, monkeypatch)
    client = threading.Thread(
        target=lambda: answers.append(ask(address, PLAIN, {"prompt": "x", "stream": True}))
    )
    client.start()
    assert began.wait(PATIENCE_S)
    completions._ends.set()
    goes_on.set()
    completions.end()
    client.join()
    assert answers[0][0] == 503
    assert "the server ends" in answers[0][1]
    (written,), _ = write(["x"], lambda _: None, max_new_tokens=2, batch_size=1)
    assert written.num_tokens == 2


def test_what_is_not_said_is_as_much_as_the_model_takes(served: tuple[str, Completions]):
    address, completions = served
    completions.max_new_tokens = 1000
    body = {"prompt": "x" * 250, "temperature": 1, "user": "me", "n": None}
    status, text = ask(address, PLAIN, body)
    assert status == 200
    found = json.loads(text)
    assert found["usage"]["total_tokens"] == 256
    assert found["choices"][0]["finish_reason"] == "length"
    assert "--max-new-tokens" not in ask(address, PLAIN, {**body, "max_tokens": 256})[1]


def test_requests_past_the_queue_are_told_when_to_come_again(
    served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch
):
    """And those that wait are answered; one whose client goes while it waits writes nothing."""
    address, completions = served
    began, goes_on = held(completions, monkeypatch)
    completions._most_waiting = 2
    body = {"prompt": "x", "max_tokens": 1}
    answers: list[int] = []
    clients = [
        threading.Thread(target=lambda: answers.append(ask(address, PLAIN, body)[0])) for _ in range(2)
    ]
    for client in clients:
        client.start()
    assert began.wait(PATIENCE_S)
    with connect(address) as leaves:
        leaves.sendall(request_of(address, body))
        until(lambda: len(completions.jobs) == 3)
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        connection.request("POST", PLAIN, json.dumps(body), {"Content-Type": "application/json"})
        refused = connection.getresponse()
        assert (refused.status, int(refused.getheader("Retry-After") or 0) >= 1) == (429, True)
        assert json.loads(refused.read())["error"]["code"] == "rate_limit_exceeded"
        connection.close()
    until(lambda: len(completions.jobs) == 2)
    goes_on.set()
    for client in clients:
        client.join()
    assert answers == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_stops_at_the_token_at_which_its_client_goes(
    served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch, stream: bool
):
    address, completions = served
    began, goes_on = held(completions, monkeypatch)
    with connect(address) as leaves:
        leaves.sendall(request_of(address, {"prompt": "x", "max_tokens": 200, "stream": stream}))
        assert began.wait(PATIENCE_S)
    (job,) = completions.jobs
    until(job.is_over.is_set)
    goes_on.set()
    until(lambda: not completions.jobs)
    assert job._events.qsize() < 200


def test_slow_clients_are_hung_up_on(served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch):
    """Whether they trickle the head or the body; others are answered meanwhile."""
    address, _ = served
    monkeypatch.setattr(local_server, "REQUEST_S", 0.3)
    with connect(address) as head, connect(address) as body:
        head.sendall(b"POST /v1/comp")
        body.sendall(request_of(address, {"prompt": "x" * 100})[:-50])
        assert ask(address, MODELS)[0] == 200
        assert b"408" in body.recv(4096)
        assert head.recv(4096) == b""


def test_a_body_is_bounded(served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch):
    """One that is far too long is answered when its client, which writes all of it first, listens."""
    monkeypatch.setattr("outsize.cli.openai_server.MOST_BYTES", 1000)
    for length in (1000, 4 * 2**20):
        assert ask(served[0], PLAIN, {"prompt": "x" * length})[0] == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
    ids=["capitals", "plain", "gzip"],
)
def test_a_body_is_json_as_it_is(served: tuple[str, Completions], headers: dict[str, str], status: int):
    connection = http.client.HTTPConnection(served[0], timeout=PATIENCE_S)
    connection.request("POST", PLAIN, json.dumps({"prompt": "once", "max_tokens": 2}), headers)
    answer = connection.getresponse()
    assert (answer.status, "error" in json.loads(answer.read())) == (status, status != 200)
    connection.close()


def test_a_text_ends_before_a_string_wherever_tokens_divide_it(served: tuple[str, Completions]):
    """The string is of several tokens, so what may begin it waits."""
    address, _ = served
    body = {"prompt": "once", "temperature": 0, "max_tokens": 40}
    whole = json.loads(ask(address, PLAIN, body)[1])["choices"][0]["text"]
    stop = whole[12:16]
    want = whole[: whole.index(stop)]
    stopped = {**body, "stop": [stop, "never said"]}
    answer = json.loads(ask(address, PLAIN, stopped)[1])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (want, "stop")
    assert answer["usage"]["completion_tokens"] < 40
    *pieces, last, _ = events(ask(address, PLAIN, {**stopped, "stream": True})[1])
    assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == want
    assert json.loads(last)["choices"][0]["finish_reason"] == "stop"


def test_tools_are_offered_to_the_template(served: tuple[str, Completions]):
    address, completions = served
    completions._writer._tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}once<|im_start|>assistant{{ '\n' }}"
    )
    completions._writer._tokenizer.response_template = QWEN_REPLIES
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    counts = [
        json.loads(ask(address, CHAT, {"messages": HELLO, "tools": [tool], "max_tokens": 1, **more})[1])[
            "usage"
        ]
        for more in ({}, {"tool_choice": "none"})
    ]
    assert counts[0]["prompt_tokens"] > counts[1]["prompt_tokens"]


def test_tools_of_a_model_whose_calls_nobody_can_read_are_refused(served: tuple[str, Completions]):
    address, completions = served
    completions._writer._tokenizer.chat_template = "{{ tools }}once"
    tools = [{"type": "function", "function": {"name": "add"}}]
    status, text = ask(address, CHAT, {"messages": HELLO, "tools": tools})
    assert (status, "response_template in tokenizer_config.json" in text) == (400, True)
    status, text = ask(address, CHAT, {"messages": HELLO, "tools": [{"type": "custom"}]})
    assert (status, "tools.0 has to be of the type 'function'" in text) == (400, True)


def test_a_reply_is_taken_apart(served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch):
    """Into reasoning, content and calls, as a whole and in a stream, as transformers' own server does."""
    address, completions = served
    tokenizer = completions._writer._tokenizer
    tokenizer.chat_template = "{{ messages[-1].content }}<|im_start|>assistant\n<think>"
    tokenizer.response_template = QWEN_REPLIES
    reply = (
        " the sum \n</think>\n\nI add\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1, "to": "é"}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><eos>'
    )
    write_only(completions, reply, monkeypatch)
    monkeypatch.setattr(completions._writer._model.generation_config, "eos_token_id", 0)
    prompt = completions._writer.text_of(Conversation(HELLO))
    want = tokenizer.parse_response(reply, prefix=prompt)
    calls = [one["function"] for one in want["tool_calls"]]
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
    asked: Any = {"model": "tiny", "messages": HELLO, "tools": tools, "max_tokens": 200}
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert (message.content, message.to_dict()["reasoning_content"]) == (
            "I add",
            want["reasoning_content"],
        )
        told = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]
        assert told == [(one["name"], one["arguments"]) for one in calls]
        assert all(len(one.id) == 9 for one in message.tool_calls or ())
        with client.chat.completions.stream(**asked) as stream:
            end = stream.get_final_completion().choices[0]
        assert end.finish_reason == "tool_calls"
        assert (end.message.content, end.message.to_dict()["reasoning_content"]) == ("I add", "the sum")
        streamed = [
            (one.function.name, json.loads(one.function.arguments)) for one in end.message.tool_calls or ()
        ]
        assert streamed == told
        (one,) = client.chat.completions.create(**asked, parallel_tool_calls=False).choices
        assert [call.function.name for call in one.message.tool_calls or ()] == ["add"]
        again: Any = [*HELLO, message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "2"}]
        assert client.chat.completions.create(**{**asked, "messages": again}).choices


TEMPLATES = {
    "qwen": (
        QWEN_REPLIES,
        'so <tool_call>{"name": "f", "arguments": {"a": [1, "<b>"]}}</tool_call><|im_end|>',
    ),
    "llama": (
        trl.chat_template_utils.llama3_template,
        '{"name": "f", "parameters": {"a": "1"}}<|eot_id|>',
    ),
    "gpt-oss": (
        trl.chat_template_utils.gptoss_template,
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"a": 1}<|call|>',
    ),
    "glm": (
        trl.chat_template_utils.glm4moe_template,
        "<think>so</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|user|>",
    ),
    "qwen 3.5": (
        trl.chat_template_utils.qwen3_5_template,
        "so\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    "lfm2": (
        trl.chat_template_utils.lfm2_2_5_template,
        "so<|tool_call_start|>[f(a='x', b=2), g()",
    ),
    "nothing but text": (QWEN_REPLIES, "two words \n and < more<eos>"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_replies_of_many_kinds_come_apart_as_transformers_has_it(kind: str):
    """Piece by piece: characters, and special tokens as they are, which are nothing of what is shown."""
    template, reply = TEMPLATES[kind]
    tokenizer = make_tokenizer(eot="<|eot_id|>", im="<|im_end|>", user="<|user|>", call="<|call|>")
    prompt = template["start_anchor"]
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    want = parse_response(reply.removesuffix("<eos>"), template, prefix=prompt, tools=[tool])
    reader = ReplyReader(template, tokenizer, prompt, [tool], None)
    pieces = re.findall(r"<\|\w+\|>|.", reply, re.DOTALL)
    parts = [part for piece in pieces for part in reader.put(piece)] + reader.end()
    if kind.startswith("nothing"):
        reader = ReplyReader(template, tokenizer, prompt, [], None)
        parts = [*reader.put("two words"), *reader.put(" \n and < more"), *reader.put("<eos>"), *reader.end()]
    texts = {
        name: "".join(part.text for part in parts if part.kind == name)
        for name in ("content", "reasoning_content")
    }
    assert texts["content"] == want.get("content", "")
    assert texts["reasoning_content"] == (want.get("reasoning_content") or want.get("thinking") or "")
    calls = [(part.name, json.loads(part.text)) for part in parts if part.kind == "tool_calls"]
    assert calls == [
        (one["function"]["name"], one["function"]["arguments"]) for one in want.get("tool_calls") or ()
    ]


def test_a_call_is_one_where_tools_are_offered_and_the_reply_was_not_cut():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    def kinds(reply: str, tools: list[Any], *, is_cut: bool = False) -> list[str]:
        reader = ReplyReader(QWEN_REPLIES, make_tokenizer(), "", tools, None)
        return [part.kind for part in reader.put(reply) + reader.end(is_cut=is_cut)]

    tools = [{"function": {"name": "f"}}]
    assert kinds(call, tools) == ["tool_calls"]
    assert kinds(call, []) == ["content"]
    assert kinds(f"a{call}<tool_call>" + '{"name": "f", "arguments": {"a', tools, is_cut=True) == [
        "content",
        "tool_calls",
    ]


@pytest.mark.parametrize("fails", ["feed", "finalize"])
def test_what_the_parser_gives_up_on_is_shown_as_written(fails: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise ValueError("no call")

    reader = ReplyReader(QWEN_REPLIES, make_tokenizer(), "", [{"function": {"name": "f"}}], None)
    parts = reader.put("a ") + reader.put("<tool_call>") + reader.put("{bad")
    monkeypatch.setattr(reader._parser, fails, fail)
    parts += reader.put(" b") + reader.end()
    assert "".join(part.text for part in parts) == "a<tool_call>{bad b"


@pytest.mark.parametrize("call", ["{bad", '["f"]', '{"arguments": {}}', '"f"'])
def test_a_call_that_is_none_is_shown_as_written(call: str):
    reader = ReplyReader(QWEN_REPLIES, make_tokenizer(), "", [{"function": {"name": "f"}}], None)
    parts = reader.put(f"a <tool_call>{call}</tool_call>") + reader.end()
    assert [part.kind for part in parts] == ["content", "content"]
    assert parts[1].text in (call, json.loads(call) if call == '"f"' else call)


def test_choices_draw_by_seeds_of_their_own(served: tuple[str, Completions]):
    """The first is that of its seed alone, the next that of the next seed; without a seed no two are alike."""
    address, _ = served

    def texts(**more: Any) -> list[str]:
        body = {"messages": HELLO, "max_tokens": 12, "temperature": 1.5, **more}
        return [one["message"]["content"] for one in json.loads(ask(address, CHAT, body)[1])["choices"]]

    assert texts(n=3, seed=5) == [text for seed in (5, 6, 7) for text in texts(seed=seed)]
    assert len({*texts(n=2), *texts()}) == 3


def test_the_client_of_openai_reads_every_answer(served: tuple[str, Completions]):
    address, _ = served
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        check_client(client)


def check_client(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=3, seed=1)
    assert [one.index for one in chat.choices] == [0, 1]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        for token in choice.logprobs.content:  # greedy: the likeliest
            assert token.logprob == token.top_logprobs[0].logprob
    stream = client.chat.completions.create(
        **asked, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == chat.usage
    for index in range(2):
        parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert "".join(one.delta.content or "" for one in parts) == chat.choices[index].message.content
        assert parts[-1].finish_reason == "length"
        assert sum(len(one.logprobs.content or ()) for one in parts if one.logprobs) == 6
    plain = client.completions.create(
        model="tiny", prompt=["once", "upon a"], max_tokens=4, logprobs=2, seed=3
    )
    assert len(plain.choices) == 2
    logprobs = plain.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 4
    with pytest.raises(openai.BadRequestError, match="positions of the model"):
        client.completions.create(model="tiny", prompt="x" * 300)
    with pytest.raises(openai.NotFoundError, match="there is nothing at"):
        client.models.retrieve("other")


def test_many_requests_at_once_are_all_answered(served: tuple[str, Completions]):
    async def many() -> list[Any]:
        url = f"http://{served[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            one: Any = {"model": "tiny", "prompt": "once", "max_tokens": 2}
            return await asyncio.gather(*(client.completions.create(**one) for _ in range(32)))

    assert len({answer.id for answer in asyncio.run(many())}) == 32


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The clients of the bench, and a model that knows by heart what they ask for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
        bench = importlib.import_module("bench_clients")
        return importlib.import_module("clients"), bench.make_model(tmp_path_factory.mktemp("taught"))


@pytest.mark.parametrize("name", ["openai", "litellm", "langchain-openai", "llm", "curl"])
def test_a_client_gets_what_it_asks_for(name: str, taught: tuple[Any, Path]):
    clients, model = taught
    if name == "curl" and shutil.which("curl") is None:
        pytest.skip("no curl is installed")
    if name != "curl":
        pytest.importorskip(name.replace("-", "_"))
    options = ModelOptions(model=str(model), device="cpu", device_memory="8MiB", home="disk", dtype="fp32")
    with TextWriter(options) as writer:
        completions = Completions(writer, "tiny", 256)
        with LocalServer(make_app(completions)) as server:
            results = clients.tried(f"{server.url.rstrip('/')}/v1", name)
            completions.end()
    assert set(results.values()) <= {"ok", "-"}, results


def test_a_stream_sends_a_piece_with_every_token_of_a_text_without_spaces(served: tuple[str, Completions]):
    address, completions = served
    body = {"prompt": "once", "temperature": 0, "max_tokens": 40}
    (want,), _ = completions._writer.write(
        ["once"], lambda _: None, do_sample=False, max_new_tokens=40, batch_size=1
    )
    *pieces, _, _ = events(ask(address, PLAIN, {**body, "stream": True})[1])
    texts = [json.loads(piece)["choices"][0]["text"] for piece in pieces]
    assert "".join(texts) == want.text
    assert len(texts) > 5  # random bytes wait for what they might be
