"""Ask a server of OpenAI's interface by a client of Python, feature by feature: ``clients.py URL CLIENT``.

Needs nothing but the client. The server has the model of `bench_clients.make_model`, which knows three replies by
heart.
The last line is a JSON object: of each feature ``ok``, ``-`` where the client has none, or what went wrong.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
REPLY = "Hello, 世界 😀! One, two, three, four."
SUM: list[Any] = [{"role": "user", "content": "1 + 2?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ARGUMENTS = {"a": 1, "b": 2}
ANSWER = "It is 3."
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)},
}
CALLED: list[Any] = [
    *SUM,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "3"},
]
WILD: list[Any] = [{"role": "user", "content": "anything"}]  # of which the model knows nothing
DRAWN: Mapping[str, Any] = {"temperature": 2.0, "max_tokens": 16}
GREEDY: Mapping[str, Any] = {"temperature": 0}
NO_ROLE: list[Any] = [{"role": "oracle", "content": "x"}]


FORMATS: tuple[Any, ...] = (
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD["function"]["parameters"]}},  # type: ignore[index]
)
CALLS: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "add"}})


def refused(ask: Callable[[], Any], name: str = "oracle") -> None:
    """Have a request refused by what it names, by the exception that the client has for it."""
    try:
        ask()
    except Exception as error:
        said = repr(error)
    else:
        said = "no error"
    assert "Request" in said, said
    assert name in said, said


def drawn(text: Callable[[int], str]) -> None:
    """Have texts by seeds: of one the same, of another another."""
    assert text(1) == text(1) != text(2)


class OpenAI:
    """The client of OpenAI, and those that answer in its shapes."""

    def __init__(self, url: str) -> None:
        import openai

        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self.create: Callable[..., Any] = lambda **choice: client.chat.completions.create(
            model="tiny", **choice
        )

    def whole(self) -> None:
        choice = self.create(messages=HELLO, **GREEDY).choices[0]
        assert (choice.message.content, choice.finish_reason) == (REPLY, "stop"), choice

    def stream(self) -> None:
        chunks = [c.choices[0] for c in self.create(messages=HELLO, stream=True, **GREEDY) if c.choices]
        assert "".join(c.delta.content or "" for c in chunks) == REPLY
        assert len(chunks) > 10
        assert [c.finish_reason for c in chunks if c.finish_reason] == ["stop"]

    def tools(self) -> None:
        choice = self.create(messages=SUM, tools=[ADD], **GREEDY).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", ARGUMENTS)
        assert choice.finish_reason == "tool_calls"
        assert self.create(messages=CALLED, tools=[ADD], **GREEDY).choices[0].message.content == ANSWER

    def tools_in_a_stream(self) -> None:
        chunks = [
            c.choices[0] for c in self.create(messages=SUM, tools=[ADD], stream=True, **GREEDY) if c.choices
        ]
        calls = [call.function for c in chunks for call in c.delta.tool_calls or ()]
        assert [call.name for call in calls if call.name] == ["add"]
        assert json.loads("".join(call.arguments or "" for call in calls)) == ARGUMENTS
        assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]

    def n(self) -> None:
        choices = self.create(messages=WILD, n=3, seed=1, **DRAWN).choices
        assert [c.index for c in choices] == [0, 1, 2]
        assert len({c.message.content for c in choices}) == 3

    def seed(self) -> None:
        drawn(lambda seed: self.create(messages=WILD, seed=seed, **DRAWN).choices[0].message.content)

    def logprobs(self) -> None:
        entries = (
            self.create(messages=HELLO, logprobs=True, top_logprobs=2, **GREEDY).choices[0].logprobs.content
        )
        assert "".join(entry.token for entry in entries).startswith("Hello, ")
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)

    def stop(self) -> None:
        choice = self.create(messages=HELLO, stop=[" three"], **GREEDY).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello, 世界 😀! One, two,", "stop")

    def usage(self) -> None:
        want = self.create(messages=HELLO, **GREEDY).usage
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        told = [c.usage for c in self.create(messages=HELLO, **asked, **GREEDY) if getattr(c, "usage", None)]
        assert told[-1].completion_tokens == want.completion_tokens > 10
        assert told[-1].prompt_tokens == want.prompt_tokens

    def errors(self) -> None:
        refused(lambda: self.create(messages=NO_ROLE))

    def formats(self) -> None:
        for form in FORMATS:
            refused(lambda form=form: self.create(messages=HELLO, response_format=form), "response_format")
        for call in CALLS:
            refused(lambda call=call: self.create(messages=SUM, tools=[ADD], tool_choice=call), "tool_choice")

    def abort(self) -> None:
        stream = self.create(messages=WILD, stream=True, temperature=2.0, max_tokens=2000)
        next(iter(stream))
        (stream.close if hasattr(stream, "close") else stream.completion_stream.close)()
        self.whole()


class LiteLLM(OpenAI):
    """litellm, by its provider for servers of this interface."""

    def __init__(self, url: str) -> None:
        import litellm

        litellm.suppress_debug_info = True
        self.create = lambda **choice: litellm.completion(
            model="openai/tiny", api_base=url, api_key="none", max_retries=0, **choice
        )


class LangChain:
    """langchain-openai's `ChatOpenAI`."""

    def __init__(self, url: str) -> None:
        from langchain_openai import ChatOpenAI

        self.chat: Callable[..., Any] = lambda **choice: ChatOpenAI(
            model="tiny", base_url=url, api_key="none", max_retries=0, **choice
        )
        self.greedy = self.chat(temperature=0)

    def whole(self) -> None:
        message = self.greedy.invoke(HELLO)
        assert (message.content, message.response_metadata["finish_reason"]) == (REPLY, "stop")

    def stream(self) -> None:
        chunks = list(self.greedy.stream(HELLO))
        assert "".join(chunk.content for chunk in chunks) == REPLY
        assert len(chunks) > 10

    def tools(self) -> None:
        offered = self.greedy.bind_tools([ADD])
        (call,) = offered.invoke(SUM).tool_calls
        assert (call["name"], call["args"]) == ("add", ARGUMENTS)
        assert offered.invoke(CALLED).content == ANSWER

    def tools_in_a_stream(self) -> None:
        chunks = list(self.greedy.bind_tools([ADD]).stream(SUM))
        for chunk in chunks[1:]:
            chunks[0] += chunk
        (call,) = chunks[0].tool_calls
        assert (call["name"], call["args"]) == ("add", ARGUMENTS)

    def n(self) -> None:
        from langchain_core.messages import HumanMessage

        (texts,) = self.chat(n=3, seed=1, **DRAWN).generate([[HumanMessage("anything")]]).generations
        assert len({text.text for text in texts}) == 3

    def seed(self) -> None:
        drawn(lambda seed: self.chat(seed=seed, **DRAWN).invoke(WILD).content)

    def logprobs(self) -> None:
        message = self.chat(logprobs=True, top_logprobs=2, **GREEDY).invoke(HELLO)
        entries = message.response_metadata["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries).startswith("Hello, ")

    def stop(self) -> None:
        assert self.greedy.invoke(HELLO, stop=[" three"]).content == "Hello, 世界 😀! One, two,"

    def usage(self) -> None:
        want = self.greedy.invoke(HELLO).usage_metadata["output_tokens"]
        told = [
            c.usage_metadata for c in self.chat(stream_usage=True, **GREEDY).stream(HELLO) if c.usage_metadata
        ]
        assert sum(one["output_tokens"] for one in told) == want > 10

    def errors(self) -> None:
        refused(lambda: self.greedy.invoke(WILD, extra_body={"oracle": 1}))

    def formats(self) -> None:
        schema = {"title": "Sum", "description": "A sum.", **ADD["function"]["parameters"]}  # type: ignore[index]
        for how, name in (
            ("json_schema", "response_format"),
            ("json_mode", "response_format"),
            ("function_calling", "tool_choice"),
        ):
            refused(lambda how=how: self.greedy.with_structured_output(schema, method=how).invoke(SUM), name)
        refused(lambda: self.greedy.bind_tools([ADD], tool_choice="any").invoke(SUM), "tool_choice")

    def abort(self) -> None:
        stream = self.chat(temperature=2.0, max_tokens=2000).stream(WILD)
        next(stream)
        stream.close()
        self.whole()


class Llm:
    """Simon Willison's llm, by a model of its plugin for this interface."""

    def __init__(self, url: str) -> None:
        from llm.default_plugins.openai_models import Chat

        self.model: Any = Chat(
            "tiny", api_base=url, can_stream=True, supports_tools=True, supports_schema=True
        )
        self.model.needs_key = None

    def whole(self) -> None:
        response = self.model.prompt("hello", stream=False, temperature=0)
        assert response.text() == REPLY
        assert response.usage().output > 10

    def stream(self) -> None:
        pieces = list(self.model.prompt("hello", stream=True, temperature=0))
        assert "".join(pieces) == REPLY
        assert len(pieces) > 10

    def tools(self, *, stream: bool = False) -> None:
        from llm import Tool

        parameters = ADD["function"]["parameters"]
        add = Tool(
            name="add",
            description="Add two numbers.",
            input_schema=parameters,
            implementation=lambda a, b: str(a + b),
        )
        chain = self.model.conversation().chain(
            "1 + 2?", tools=[add], stream=stream, options={"temperature": 0}
        )
        assert chain.text().endswith(ANSWER)

    def tools_in_a_stream(self) -> None:
        self.tools(stream=True)

    def seed(self) -> None:
        drawn(lambda seed: self.model.prompt("anything", stream=False, seed=seed, **DRAWN).text())

    def stop(self) -> None:
        assert self.model.prompt("hello", stop=" three", temperature=0).text() == "Hello, 世界 😀! One, two,"

    def usage(self) -> None:
        told = []
        for stream in (False, True):
            response = self.model.prompt("hello", stream=stream, temperature=0)
            assert response.text() == REPLY
            told.append(response.usage().output)
        assert told[0] == told[1] > 10

    def errors(self) -> None:
        try:
            self.model.prompt("hello", stream=False, temperature=-1).text()
        except Exception:
            return
        raise AssertionError("no error")

    def formats(self) -> None:
        schema = ADD["function"]["parameters"]  # type: ignore[index]
        refused(lambda: self.model.prompt("hello", stream=False, schema=schema).text(), "response_format")

    def abort(self) -> None:
        response = iter(self.model.prompt("anything", stream=True, temperature=2.0, max_tokens=2000))
        next(response)
        response.close()
        self.whole()


class Curl:
    """curl, whose body comes in chunks of no length that is told before."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, *flags: str, **body: Any) -> str:
        head = ["-H", "Content-Type: application/json", "-H", "Transfer-Encoding: chunked"]
        command = ["curl", "-sN", *head, *flags, "-d", json.dumps(body), f"{self.url}/chat/completions"]
        return subprocess.run(command, capture_output=True, text=True, check=not flags).stdout

    def whole(self) -> None:
        assert json.loads(self.ask(messages=HELLO, **GREEDY))["choices"][0]["message"]["content"] == REPLY

    def stream(self) -> None:
        *events, end, _ = self.ask(messages=HELLO, stream=True, **GREEDY).split("\n\n")
        assert end == "data: [DONE]"
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == REPLY

    def errors(self) -> None:
        assert "oracle" in json.loads(self.ask(messages=NO_ROLE))["error"]["message"]

    def formats(self) -> None:
        for name, values in (("response_format", FORMATS), ("tool_choice", CALLS)):
            for value in values:
                told = json.loads(self.ask(messages=SUM, tools=[ADD], **{name: value}))["error"]
                assert told["message"].startswith(name), told

    def abort(self) -> None:
        self.ask("--max-time", "0.5", messages=WILD, stream=True, temperature=2.0, max_tokens=2000)
        self.whole()


CLIENTS: Mapping[str, type[Any]] = {
    "openai": OpenAI,
    "litellm": LiteLLM,
    "langchain-openai": LangChain,
    "llm": Llm,
    "curl": Curl,
}
FEATURES = (
    *("whole", "stream", "tools", "tools_in_a_stream", "n", "seed"),
    *("logprobs", "stop", "usage", "errors", "formats", "abort"),
)


def tried(url: str, name: str) -> dict[str, str]:
    """Return what came of each feature of a client."""
    client, results = CLIENTS[name](url), {}
    for feature in FEATURES:
        check = getattr(client, feature, None)
        try:
            results[feature] = "-" if check is None else check() or "ok"
        except Exception as error:
            results[feature] = repr(error)[:300]
    return results


if __name__ == "__main__":
    print(json.dumps(tried(*sys.argv[1:])))
