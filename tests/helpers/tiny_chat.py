"""Chat templates in the styles of real models, and tiny models with their special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType

from tiny_gguf import write_tiny_gguf

# A default system prompt; every message between two marks.
CHATML = """\
{%- if not messages or messages[0].role != 'system' -%}
<|im_start|>system
Be of help.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

# Marks are ordinary text, contents are trimmed, the system prompt is part of the first message.
LLAMA_2 = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{ bos_token + '[INST] ' + ns.system + message.content.strip() + ' [/INST]' }}
{%- set ns.system = '' -%}
{%- else -%}
{{ ' ' + message.content.strip() + ' ' + eos_token }}
{%- endif -%}
{%- endfor -%}
"""

# Headers of several special tokens; contents are trimmed.
LLAMA_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

# No system prompts, and roles that must alternate.
GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{ raise_exception('System role not\\nsupported') }}
{%- elif (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{{- message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

# The system prompt is part of the newest message.
MISTRAL = """\
{{- bos_token -}}
{%- set start = 1 if messages[0].role == 'system' else 0 -%}
{%- for message in messages[start:] -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' }}
{%- if start and loop.last -%}
{{ messages[0].content + '\\n\\n' }}
{%- endif -%}
{{ message.content + '[/INST]' }}
{%- else -%}
{{ ' ' + message.content + eos_token }}
{%- endif -%}
{%- endfor -%}
"""

# Reasoning is removed from earlier answers.
THINKING = CHATML.replace(
    "{{ message.content }}", "{{ message.content.split('</think>')[-1].lstrip() }}"
)
# The call for an answer opens the reasoning.
OPENS_THOUGHTS = THINKING.replace("assistant\n{%", "assistant\n<think>\n{%")
# Earlier answers show empty reasoning.
EMPTY_THOUGHTS = CHATML.replace(
    "{{ message.content }}",
    "{{ '<think></think>' if message.role == 'assistant' else '' }}{{ message.content }}",
)

# Tools, calls and results as in Qwen and Hermes.
TOOLS = """\
{%- if tools -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'Be of help.' }}
# Tools
<tools>
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
</tools>
For each call, return a json object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}
<tool_response>
{{ message.content }}
</tool_response>
{{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- elif message.role != 'system' -%}
{{ '<|im_start|>' + message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\n' if message.content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
# Results are JSON with their own header, and tools are in the first message, as in Llama 3.1.
IPYTHON = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
{%- else -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if tools and message.role == 'user' and loop.index0 == (messages[0].role == 'system') | int -%}
{{ (tools | tojson) + '\n\n' }}
{%- endif -%}
{%- if message.tool_calls -%}
{%- set call = message.tool_calls[0].function -%}
{{ '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else -%}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
"""

# Answers have their own marks, which the model samples, before the end of its turn.
RESPONSE = CHATML.replace(
    "{{ message.content }}",
    "{{ '<|start_header_id|>' if message.role == 'assistant' else '' }}{{ message.content }}"
    "{{ '<|end_header_id|>' if message.role == 'assistant' else '' }}",
)

# Earlier turns change with later ones.
COUNTING = "{{ messages | length }} messages\n" + CHATML
LAST_ONLY = CHATML.replace("in messages -%}", "in messages[-1:] -%}")

MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)


def write_chat_gguf(
    path: Path,
    template: str | None,
    *,
    user_defined: Sequence[str] = (),
    seed: int = 4,
    **sizes: Any,
) -> Path:
    """Write a tiny model whose last tokens are `MARKS`.

    Args:
        path: file to write.
        template: chat template.
        user_defined: marks that the tokenizer parses in any text; the others are control tokens.
        seed, sizes: as for `write_tiny_gguf`.
    """
    types = {
        mark: TokenType.USER_DEFINED if mark in user_defined else TokenType.CONTROL
        for mark in MARKS
    }
    return write_tiny_gguf(path, seed=seed, chat_template=template, marks=types, **sizes)
