"""Shapes of conversations. Words of the assistant begin with A, those of everybody else with Q, each is there once."""

from typing import Any

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def result(text: str, number: int = 1, name: str = "get_weather") -> Message:
    return {"role": "tool", "content": text, "name": name, "tool_call_id": f"call0000{number}"}


def call(number: int = 1, name: str = "get_weather", **arguments: Any) -> Message:
    return {
        "type": "function",
        "id": f"call0000{number}",
        "function": {"name": name, "arguments": arguments},
    }


def _tool(name: str, kind: str) -> Message:
    schema = {
        "type": "object",
        "properties": {"at": {"type": kind, "description": "QTOOL"}},
        "required": ["at"],
    }
    return {"type": "function", "function": {"name": name, "description": "QTOOL", "parameters": schema}}


TOOLS = [_tool("get_weather", "string"), _tool("add", "integer")]
TEXT_CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "get_weather", "arguments": '{"at": "AARG1"}'},
}
SHAPES: dict[str, tuple[list[Message], list[Message] | None]] = {
    "one answer": ([user("QONE"), said("AONE and more")], None),
    "three answers": (
        [user("QONE"), said("AONE"), user("QTWO"), said("ATWO"), user("QTHREE"), said("ATHREE")],
        None,
    ),
    "system": ([system("QSYS"), user("QONE"), said("AONE"), user("QTWO"), said("ATWO")], None),
    "a switch in the system prompt": ([system("QSYS /no_think"), user("QONE"), said("AONE")], None),
    "the user last": ([user("QONE"), said("AONE"), user("QTWO")], None),
    "assistant first": ([said("AONE"), user("QONE"), said("ATWO")], None),
    "assistant twice": ([user("QONE"), said("AONE"), said("ATWO"), user("QTWO"), said("ATHREE")], None),
    "an empty answer": ([user("QONE"), said(""), user("QTWO"), said("ATWO")], None),
    "an empty last answer": ([user("QONE"), said("AONE"), user("QTWO"), said("")], None),
    "an answer of white space": ([user("QONE"), said(" \n"), user("QTWO"), said("ATWO")], None),
    "the same words": ([user("yes"), said("yes"), user("yes"), said("yes")], None),
    "white space at the borders": (
        [user(" QONE\n"), said("\n AONE \n\n"), user("QTWO "), said(" ATWO")],
        None,
    ),
    "punctuation": ([user("???"), said("..."), user("QTWO?!"), said("- ATWO!")], None),
    "tags in the content": (
        [user("<b>QONE</b>"), said("</s> <i>AONE</i>"), user("[INST] QTWO"), said("ATWO </s>")],
        None,
    ),
    "other scripts": (
        [user("你好吗 QONE"), said("很好。AONE 🦊"), user("кто QTWO"), said("ATWO лиса")],
        None,
    ),
    "quotes": (
        [user("\"QONE\" \\ 'q'"), said("\"AONE\"\t\\n 'a'"), user("QTWO"), said('{"ATWO": [1]}')],
        None,
    ),
    "a call": ([user("QONE"), said("", tool_calls=[call(at="AARG1")]), result("QRES1"), said("AONE")], TOOLS),
    "a call with text": (
        [user("QONE"), said("AONE", tool_calls=[call(at="AARG1")]), result("QRES1"), said("ATWO")],
        TOOLS,
    ),
    "a call of numbers": (
        [
            user("QONE"),
            said("", tool_calls=[call(name="add", at=7)]),
            result("QRES1", name="add"),
            said("AONE"),
        ],
        TOOLS,
    ),
    "a call with arguments as text": (
        [user("QONE"), said("", tool_calls=[TEXT_CALL]), result("QRES1"), said("AONE")],
        TOOLS,
    ),
    "two calls": (
        [
            user("QONE"),
            said("", tool_calls=[call(at="AARG1"), call(2, "add", at=7)]),
            result("QRES1"),
            result("QRES2", 2, "add"),
            said("AONE"),
        ],
        TOOLS,
    ),
    "calls in two rounds": (
        [
            system("QSYS"),
            user("QONE"),
            said("", tool_calls=[call(at="AARG1")]),
            result("QRES1"),
            said("AONE"),
            user("QTWO"),
            said("", tool_calls=[call(2, at="AARG2")]),
            result("QRES2", 2),
            said("ATWO"),
        ],
        TOOLS,
    ),
    "a call last": ([user("QONE"), said("", tool_calls=[call(at="AARG1")])], TOOLS),
    "tools that nobody calls": (
        [system("QSYS"), user("QONE"), said("AONE"), user("QTWO"), said("ATWO")],
        TOOLS,
    ),
    "reasoning": ([user("QONE"), said("AONE", reasoning_content="AWHY1")], None),
    "reasoning twice": (
        [
            user("QONE"),
            said("AONE", reasoning_content="AWHY1"),
            user("QTWO"),
            said("ATWO", reasoning_content="AWHY2"),
        ],
        None,
    ),
    "thinking": ([user("QONE"), said("AONE", thinking="AWHY1")], None),
    "think tags": ([user("QONE"), said("<think>\nAWHY1\n</think>\n\nAONE")], None),
    "think tags twice": (
        [
            user("QONE"),
            said("<think>\nAWHY1\n</think>\n\nAONE"),
            user("QTWO"),
            said("<think>\nAWHY2\n</think>\n\nATWO"),
        ],
        None,
    ),
    "reasoning before a call": (
        [
            user("QONE"),
            said("", reasoning_content="AWHY1", tool_calls=[call(at="AARG1")]),
            result("QRES1"),
            said("AONE", reasoning_content="AWHY2"),
        ],
        TOOLS,
    ),
}
