"""``outsize serve``: what clients of OpenAI's interface ask for, over HTTP."""

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.command_line import status_of
from outsize.cli.completions import CompletionHandler, Completions, read_request
from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.loopback import LoopbackServer
from patience import PATIENCE_S
from support import make_model_dir

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=256)


@pytest.fixture
def served(model: Path) -> Iterator[tuple[str, Completions]]:
    options = ModelOptions(model=str(model), device="cpu", device_memory="64MiB", home="disk", dtype="fp32")
    with TextWriter(options) as writer:
        completions = Completions(writer, "tiny", 8)
        with LoopbackServer(CompletionHandler, completions) as server:
            yield server.url.removeprefix("http://").rstrip("/"), completions


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
        (CHAT, {"messages": []}, 400, "a list of objects with role and content"),
        (CHAT, {"messages": HELLO, "tools": [{}], "n": 2}, 400, "tools, n: not supported"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content has to be a text"),
        (PLAIN, {"prompt": "x", "temperature": "hot"}, 400, "temperature is 'hot'"),
        (PLAIN, {"prompt": "x", "max_tokens": -1}, 400, "whole number from 1 to"),
        (PLAIN, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        (PLAIN, {"prompt": "x", "max_tokens": True}, 400, "max_tokens is True"),
        (PLAIN, '{"prompt": "x", "temperature": NaN}', 400, "temperature is nan"),
        (PLAIN, {"prompt": "x", "top_k": 2.5}, 400, "top_k is 2.5"),
        (PLAIN, {"prompt": "x", "top_p": -1}, 400, "top_p is -1"),
        (PLAIN, {"prompt": "x", "n": True}, 400, "n: not supported"),
        (PLAIN, {"prompt": ["a", "b"]}, 400, "a list of one text"),
        (PLAIN, {"prompt": [1, 2]}, 400, "a list of one text"),
        (CHAT, {"messages": [{"role": "oracle", "content": "x"}]}, 400, "unknown role 'oracle'"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "a message of the user has no 'content'"),
        (PLAIN, {"prompt": "x", "min_p": 2}, 400, "min_p is 2"),
        (PLAIN, {"prompt": "x", "seed": 2**64}, 400, "seed is 1844"),
        (PLAIN, {"prompt": "x", "min_tokens": 4, "repetition_penalty": 1.2}, 400, "min_tokens, repetition_penalty:"),
        (PLAIN, {"prompt": "x", "stream_options": {"more": True}}, 400, "stream_options is {'more': True}"),
        (CHAT, {"messages": [{"role": "user", "content": "emoji \ud83d"}]}, 400, "unpaired surrogate"),
        (PLAIN, {"prompt": "\ud83d", "stream": True}, 400, "unpaired surrogate"),
        (PLAIN, "[" * 200_000, 400, "not valid JSON"),
        (PLAIN, {"prompt": "x" * 300, "stream": True}, 400, "positions of the model"),
        ("/v1/other", {"prompt": "x"}, 404, '{"error": {"message": "there is nothing at /v1/other'),
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
    {"top_k": -1},
    {"top_p": 0},
    {"prompt": ["once"]},
    {"stream_options": {"include_usage": False}},
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
    asked = read_request(json.dumps({"messages": messages}).encode(), is_chat=True).prompt
    with TextWriter(ModelOptions(model=str(model), device="cpu", home="host")) as writer:
        writer._tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
        )
        assert writer.text_of(asked) == 'user:hello;assistant:{"a": 1};tool:2;'


def test_pages_from_elsewhere_can_ask_nothing(served: tuple[str, Completions]):
    assert ask(served[0], PLAIN, {"prompt": "x"}, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(served[0], PLAIN, {"prompt": "x"}, Host="example.com")[0] == 403


def test_a_server_that_ends_lets_a_text_go(served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch):
    """And its model is whole afterwards."""
    address, completions = served
    began, answers = threading.Event(), []
    write = completions._writer.write

    def slow(texts: list[str], on_text: Any, **choice: Any) -> Any:
        began.set()
        assert ended.wait(PATIENCE_S)
        return write(texts, on_text, **choice)

    ended = threading.Event()
    monkeypatch.setattr(completions._writer, "write", slow)
    client = threading.Thread(
        target=lambda: answers.append(ask(address, PLAIN, {"prompt": "x", "stream": True}))
    )
    client.start()
    assert began.wait(PATIENCE_S)
    completions._ends = True
    ended.set()
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


def test_nothing_is_written_for_a_client_that_has_gone(
    served: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch
):
    address, completions = served
    heard, gone = threading.Event(), threading.Event()
    is_heard, writes = CompletionHandler.is_heard, []

    def looks(handler: CompletionHandler) -> bool:
        heard.set()
        if is_heard(handler):
            return True
        gone.set()
        return False

    monkeypatch.setattr(CompletionHandler, "is_heard", looks)
    monkeypatch.setattr(completions._writer, "write", lambda *_, **__: writes.append(1))
    host, port = address.split(":")
    with completions._turn:
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        connection.request("POST", PLAIN, '{"prompt": "x"}', {"Content-Type": "application/json"})
        assert heard.wait(PATIENCE_S)
        connection.close()
        assert gone.wait(PATIENCE_S)
    assert writes == []


def test_a_text_stops_at_the_token_at_which_its_client_goes(served: tuple[str, Completions]):
    _, completions = served
    left = iter([True, True, True])
    asked = read_request(b'{"prompt": "x", "temperature": 0}', is_chat=False)
    with pytest.raises(ConnectionError):
        completions.write(asked, lambda _: None, lambda: next(left, False))
    assert next(left, None) is None


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
