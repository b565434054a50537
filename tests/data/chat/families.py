"""Chat templates like those of well-known families, written here, each with marks around what the assistant says.

Without the marks they are what is published for their models, in what matters: where the system prompt and the tools
go, how calls are written, what is dropped, and what ends a turn.
"""

import re

BEGIN, END = "{% generation %}", "{% endgeneration %}"
ALTERNATES = (
    "{% for m in ms %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
SPLIT = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set ms = messages[1:] %}"
    "{% else %}{% set ms = messages %}{% endif %}"
)
CHATML_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
    '{{ \'\n<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{ (f.arguments if f.arguments is string else f.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
)


def chatml(end: str = "<|im_end|>\n", header: str = "<|im_start|>assistant\n", asks: bool = True) -> str:
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{{{{ {header!r} }}}}{BEGIN}{{{{ m.content }}}}{CHATML_CALLS}{{{{ {end!r} }}}}{END}"
        f"{{% else %}}{{{{ '<|im_start|>' + m.role + '\n' + m.content + {end!r} }}}}{{% endif %}}{{% endfor %}}"
        + (f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}" if asks else "")
    )


MISTRAL_CALLS = (
    "{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}"
)
MARKED = {
    "chatml": chatml(),
    "chatml that asks for nothing": chatml(asks=False),
    "chatml that thinks when asked": chatml() + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}",
    "mistral v1": "{{ bos_token }}" + SPLIT + ALTERNATES + "{% for m in ms %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (sys + '\n\n' if sys is defined and loop.first else '') + m.content + ' [/INST]' }}"
    f"{{% else %}}{BEGIN}{{{{ m.content + eos_token }}}}{END}{{% endif %}}{{% endfor %}}",
    "mistral v3": SPLIT + "{% set users = ms | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% for m in ms %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (sys + '\n\n' if sys is defined and m == users[-1] else '') + m.content + '[/INST]' }}"
    f"{{% elif m.role == 'tool' %}}{{{{ '[TOOL_RESULTS] ' + {{'content': m.content}} | tojson + '[/TOOL_RESULTS]' }}}}"
    f"{{% elif m.tool_calls %}}{BEGIN}{MISTRAL_CALLS}{END}"
    f"{{% else %}}{BEGIN}{{{{ ' ' + m.content + eos_token }}}}{END}{{% endif %}}{{% endfor %}}",
    "mistral v7": "{{ bos_token }}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    f"{{% else %}}{BEGIN}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}"
    f"{{{{ eos_token }}}}{END}{{% endif %}}{{% endfor %}}",
    "llama 2": SPLIT + ALTERNATES + "{% for m in ms %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ('<<SYS>>\n' + sys + '\n<</SYS>>\n\n' if sys is defined and loop.first else '') }}"
    "{{ m.content.strip() + ' [/INST]' }}"
    f"{{% else %}}{BEGIN}{{{{ ' ' + m.content.strip() + ' ' + eos_token }}}}{END}{{% endif %}}{{% endfor %}}",
    "llama 3 with a date": "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ 'Today Date: 26 Jul 2024\n\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    f"{BEGIN}{{{{ m.content | trim }}}}{{% for c in m.tool_calls or [] %}}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"parameters\": ' + c.function.arguments | tojson + '}' }}{% endfor %}"
    f"{{{{ '<|eot_id|>' }}}}{END}{{% else %}}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "gemma": SPLIT + ALTERNATES + "{{ bos_token }}{% for m in ms %}{% if m.role == 'user' %}"
    "{{ '<start_of_turn>user\n' + (sys + '\n\n' if sys is defined and loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% else %}{{ '<start_of_turn>model\n' }}"
    f"{BEGIN}{{{{ m.content | trim + '<end_of_turn>\n' }}}}{END}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "phi 4": "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' }}{% if m.role == 'assistant' %}"
    f"{BEGIN}{{{{ m.content + '<|im_end|>' }}}}{END}{{% else %}}{{{{ m.content + '<|im_end|>' }}}}{{% endif %}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    "deepseek r1": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' }}"
    f"{BEGIN}{{{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}}}{END}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    "command r": "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}{% if m.role == 'assistant' %}"
    f"{{{{ '<|CHATBOT_TOKEN|>' }}}}{BEGIN}{{{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}}}{END}{{% else %}}"
    "{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>' }}"
    "{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    f"{BEGIN}{{{{ m.content + eos_token }}}}{END}{{% else %}}{{{{ m.content + eos_token }}}}{{% endif %}}"
    "{{ '\n' }}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}",
    "tulu": "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    f"{BEGIN}{{{{ m.content + eos_token + ('' if loop.last else '\n') }}}}{END}"
    "{% else %}{{ m.content + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "glm 4": "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    f"{BEGIN}{{% if m.tool_calls %}}{{% for c in m.tool_calls %}}"
    "{{ c.function.name + '\n' + c.function.arguments | tojson }}{% endfor %}"
    f"{{% else %}}{{{{ '\n' + m.content }}}}{{% endif %}}{END}"
    "{% else %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "granite": "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}"
    "{% if m.role == 'assistant' %}"
    f"{BEGIN}{{{{ m.content }}}}{{% if m.tool_calls %}}"
    "{{ '<|tool_call|>' + m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
    f"{{{{ '<|end_of_text|>\n' }}}}{END}"
    "{% else %}{{ m.content + '<|end_of_text|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    "hermes": "{% if tools %}{{ '<|im_start|>system\n<tools>' + tools | tojson + '</tools><|im_end|>\n' }}{% endif %}"
    + chatml(),
    "vicuna": "{{ 'A chat between a curious user and an artificial intelligence assistant. ' }}{% for m in messages %}"
    f"{{% if m.role == 'assistant' %}}{{{{ 'ASSISTANT:' }}}}{BEGIN}{{{{ ' ' + m.content + eos_token }}}}{END}"
    "{% else %}{{ ('USER: ' if m.role == 'user' else '') + m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "by number": "{% for i in range(messages | length) %}{% set m = messages[i] %}"
    f"{{{{ '<' + m.role + '>' }}}}{{% if m.role == 'assistant' %}}{BEGIN}{{{{ m['content'] + '</s>' }}}}{END}"
    "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    "smollm 3": "{% set quiet = messages[0].role == 'system' and '/no_think' in messages[0].content %}"
    + chatml(header="<|im_start|>assistant\n").replace(
        BEGIN, BEGIN + "{% if quiet %}{{ '<think>\n\n</think>\n' }}{% endif %}"
    ),
}
_TAG = re.compile(r"{%(-?)\s*(end)?generation\s*(-?)%}")


def without_marks(template: str) -> str:
    """Return a template without its marks, and the same otherwise."""
    return _TAG.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", template)
