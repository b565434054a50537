"""Chat templates that nobody publishes and somebody may write, with marks around what the assistant says.

They are written short: see `SHORT`.
"""

from data.chat.families import BEGIN, END
from data.chat.shapes import TOOLS, Message, call, result, said, system, user

SHORT = {
    "[calls]": "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
    "{{ '<call>' + f.name + f.arguments | tojson + '</call>' }}{% endfor %}",
    "[ask]": "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}",
    "[reply]": "{% if m.role == 'assistant' %}",
    "[other]": "{{ '<' + m.role + '>' + m.content + '<end>' }}",
    "[each]": "{% for m in messages %}",
    "[done]": "{% endif %}{% endfor %}",
    "[else]": "{% else %}",
    "[fi]": "{% endif %}",
    "[said]": "{{ m.content }}",
    "[[": BEGIN,
    "]]": END,
}


def _whole(short: str) -> str:
    for name, text in SHORT.items():
        short = short.replace(name, text)
    return short


_UNUSUAL = {
    "end written before the next": (
        "[each]{% if not loop.first %}{% if loop.previtem.role == 'assistant' %}[[{{ '<end>' }}]][else]"
        "{{ '<end>' }}[fi][fi][reply]{{ '<a>' }}[[[said][calls]]][else]{{ '<' + m.role + '>' + m.content }}"
        "[done]{% if add_generation_prompt %}{{ '<end><a>' }}[fi]"
    ),
    "suffix behind the last message before its end": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{{ ' [last]' if loop.last }}{{ '<end>' }}]][else]"
        "{{ '<' + m.role + '>' + m.content + (' [last]' if loop.last else '') + '<end>' }}[done][ask]"
    ),
    "a note behind all": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else][other][done]{{ '[that was all]' }}[ask]"
    ),
    "header repeats the question": (
        "[each][reply]{{ '<a re=' + (loop.previtem.content if loop.previtem else '') + '>' }}[[[said][calls]"
        "{{ '<end>' }}]][else][other][done][ask]"
    ),
    "turns merged": (
        "[each]{% set same = loop.previtem and loop.previtem.role == m.role %}{% if not same %}"
        "{{ '<' + m.role + '>' }}[fi][reply][[{{ ('\n' if same else '') + m.content }}[calls]"
        "{% if not loop.nextitem or loop.nextitem.role != m.role %}{{ '<end>' }}[fi]]][else]"
        "{{ ('\n' if same else '') + m.content }}{% if not loop.nextitem or loop.nextitem.role != m.role %}"
        "{{ '<end>' }}[fi][done]{% if add_generation_prompt %}{{ '<assistant>' }}[fi]"
    ),
    "trimmed and upper-cased": (
        "[each][reply]{{ '<a>' }}[[{{ m.content | trim | upper }}[calls]{{ '<end>' }}]][else]"
        "{{ '<' + m.role + '>' + m.content | trim | upper + '<end>' }}[done][ask]"
    ),
    "contents as json": (
        "[each][reply]{{ '<a>' }}[[{{ m.content | tojson }}[calls]{{ '<end>' }}]][else]"
        "{{ '<' + m.role + '>' + m.content | tojson + '<end>' }}[done][ask]"
    ),
    "escaped": (
        "[each][reply]{{ '<a>' }}[[{{ m.content | e }}[calls]{{ '<end>' }}]][else]{{ '<' + m.role + '>' }}"
        "{{ m.content | e }}{{ '<end>' }}[done][ask]"
    ),
    "results within user turns": (
        "[each]{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<user>' }}[fi]"
        "{{ '<res>' + m.content + '</res>' }}{% if not loop.nextitem or loop.nextitem.role != 'tool' %}"
        "{{ '<end>' }}[fi]{% elif m.role == 'assistant' %}{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else]"
        "[other][done][ask]"
    ),
    "system within the first user turn": (
        "{% set ns = namespace(s='') %}[each]{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% elif m.role == 'assistant' %}{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else]"
        "{{ '<' + m.role + '>' + (ns.s + '\n' if ns.s else '') + m.content + '<end>' }}{% set ns.s = '' %}"
        "[done][ask]"
    ),
    "system behind the last user turn": (
        "{% set ns = namespace(s='') %}[each]{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% elif m.role == 'assistant' %}{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else]"
        "{{ '<' + m.role + '>' + m.content + (' (' + ns.s + ')' if ns.s and m == (messages | selectattr('role"
        "', 'equalto', 'user') | list)[-1] else '') + '<end>' }}[done][ask]"
    ),
    "prompt with an empty think block": (
        "[each][reply]{{ '<a>' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}[fi][[[said][calls]"
        "{{ '<end>' }}]][else][other][done]{% if add_generation_prompt %}{{ '<a><think>\n\n</think>\n\n' }}[fi]"
    ),
    "prompt opens a think block": (
        "[each][reply]{{ '<a>' }}[[{{ '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}"
        "[calls]{{ '<end>' }}]][else][other][done]{% if add_generation_prompt %}{{ '<a><think>' }}[fi]"
    ),
    "reasoning of the last turn only": (
        "[each][reply]{{ '<a>' }}[[{% if m.reasoning_content and loop.last %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}[fi]{{ m.content.split('</think>')[-1].strip() }}"
        "[calls]{{ '<end>' }}]][else][other][done][ask]"
    ),
    "eos only at the end": (
        "[each][reply]{{ 'Assistant: ' }}[[[said][calls]{{ eos_token if loop.last else '\n' }}]][else]"
        "{{ m.role | capitalize + ': ' + m.content + '\n' }}[done]{% if add_generation_prompt %}"
        "{{ 'Assistant: ' }}[fi]"
    ),
    "eos outside the loop": (
        "[each][reply]{{ 'Assistant: ' }}[[[said][calls]{{ '\n' }}]][else]"
        "{{ m.role | capitalize + ': ' + m.content + '\n' }}[done]{% if add_generation_prompt %}"
        "{{ 'Assistant: ' }}{% elif messages[-1].role == 'assistant' %}[[{{ eos_token }}]][else]"
        "{{ eos_token }}[fi]"
    ),
    "numbered turns": (
        "[each][reply]{{ '[' ~ loop.index ~ '] assistant: ' }}[[[said][calls]{{ '<end>' }}]][else]"
        "{{ '[' ~ loop.index ~ '] ' + m.role + ': ' + m.content + '<end>' }}[done]"
        "{% if add_generation_prompt %}{{ '[' ~ (messages | length + 1) ~ '] assistant: ' }}[fi]"
    ),
    "number of turns first": (
        "{{ messages | length ~ ' turns\n' }}[each][reply]{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else]"
        "[other][done][ask]"
    ),
    "ends numbered": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{{ '<end ' ~ loop.index ~ '>' }}]][else]"
        "{{ '<' + m.role + '>' + m.content + '<end ' ~ loop.index ~ '>' }}[done][ask]"
    ),
    "the last question again at the end": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else][other][done]{{ '(asked: ' + messages[0]"
        ".content + ')' }}[ask]"
    ),
    "newest first": (
        "{% for m in messages | reverse %}[reply]{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else][other][done]"
        "[ask]"
    ),
    "calls in a turn of their own": (
        "[each][reply]{% if m.content %}{{ '<a>' }}[[{{ m.content + '<end>' }}]][fi]{% if m.tool_calls %}"
        "{{ '<a call>' }}[[[calls]{{ '<end>' }}]][fi]{% if not m.content and not m.tool_calls %}{{ '<a>' }}"
        "[[{{ '<end>' }}]][fi][else][other][done][ask]"
    ),
    "nothing but newlines": ("[each][reply][[[said][calls]{{ '\n' }}]][else]{{ m.content + '\n' }}[done]"),
    "end mark of the call differs": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{{ '<eom>' if m.tool_calls else '<eot>' }}]][else]"
        "{{ '<' + m.role + '>' + m.content + '<eot>' }}[done][ask]"
    ),
    "call's end, last said otherwise": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{% if loop.last %}{{ '[done]' }}[fi]{{ '<end>' }}]]"
        "{% elif m.role == 'tool' %}{{ '<res>' + m.content + '<end>' }}[else][other][done][ask]"
    ),
    "a reminder in front of the last reply": (
        "[each]{% if loop.last and m.role == 'assistant' %}{{ '<system>be brief<end>' }}[fi][reply]"
        "{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else][other][done]{% if add_generation_prompt %}"
        "{{ '<system>be brief<end><a>' }}[fi]"
    ),
    "asks for one more reply behind all": (
        "{% if tools %}{{ '<system>' + tools | tojson + '<end>' }}[fi][each][reply]{{ '<a>' }}[[[said][calls]"
        "{{ '<end>' }}]][else][other][done]{{ '<a>' }}"
    ),
    "asks behind all, replies in a tag of their own": (
        "[each]{{ '<turn>' }}[reply]{{ '<a>' }}[[{{ '<text>' + m.content + '</text>' }}[calls]{{ '<end>' }}]]"
        "[else][other][done]{{ '<turn><a>' }}"
    ),
    "replies end where a user follows": (
        "[each]{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'assistant' %}[[{{ '<end>' }}]]"
        "[fi][reply]{% if not loop.previtem or loop.previtem.role != 'assistant' %}{{ '<a>' }}[fi][[[said]]]"
        "[else]{{ '<' + m.role + '>' + m.content + '</' + m.role + '>' }}[done][ask]"
    ),
    "an instruction behind all": (
        "[each][reply]{{ '<a>' }}[[[said][calls]{{ '<end>' }}]][else][other][done]"
        "{{ '<system>Answer in one line.<end>' }}[ask]"
    ),
}
UNUSUAL = {name: _whole(short) for name, short in _UNUSUAL.items()}
MORE: dict[str, tuple[list[Message], list[Message] | None]] = {
    "two users": ([user("QONE"), user("QTWO"), said("AONE"), user("QTHREE"), said("ATWO")], None),
    "system in the middle": ([user("QONE"), said("AONE"), system("QSYS"), user("QTWO"), said("ATWO")], None),
    "developer": ([{"role": "developer", "content": "QSYS"}, user("QONE"), said("AONE")], None),
    "assistant alone": ([said("AONE")], None),
    "a call without a result": (
        [user("QONE"), said("", tool_calls=[call(at="AARG1")]), user("QTWO"), said("AONE")],
        TOOLS,
    ),
    "a call with text without a result": (
        [user("QONE"), said("AONE", tool_calls=[call(at="AARG1")]), user("QTWO"), said("ATWO")],
        TOOLS,
    ),
    "call without arguments": (
        [user("QONE"), said("", tool_calls=[call()]), result("QRES1"), said("AONE")],
        TOOLS,
    ),
    "call after call": (
        [
            user("QONE"),
            said("", tool_calls=[call(at="AARG1")]),
            result("QRES1"),
            said("", tool_calls=[call(2, at="AARG2")]),
            result("QRES2", 2),
            said("AONE"),
        ],
        TOOLS,
    ),
    "text call after call, last a call": (
        [
            user("QONE"),
            said("AONE", tool_calls=[call(at="AARG1")]),
            result("QRES1"),
            said("ATWO", tool_calls=[call(2, at="AARG2")]),
        ],
        TOOLS,
    ),
    "empty question": ([user(""), said("AONE"), user("QTWO"), said("ATWO")], None),
    "empty result": (
        [user("QONE"), said("", tool_calls=[call(at="AARG1")]), result(""), said("AONE")],
        TOOLS,
    ),
    "reply as the header": (
        [user("assistant QONE <a>"), said("assistant: AONE <a>"), user("QTWO"), said("ATWO <end>")],
        None,
    ),
    "result same as the reply": (
        [user("QONE"), said("", tool_calls=[call(at="AARG1")]), result("same"), said("same AONE")],
        TOOLS,
    ),
}
