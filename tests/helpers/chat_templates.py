"""Chat templates in the styles that are met most, written for these tests."""

# ruff: noqa: E501 - line breaks count in a template

from __future__ import annotations

SYSTEM_BY_DEFAULT = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

HEADERS_AND_DATE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "<|eot_id|>" }}
{%- if tools is not none and tools is defined %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

NO_SYSTEM = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% else %}
{{ raise_exception('role ' + message['role'] + ' is not supported') }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

MARKED = """{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% if loop.index > 20 %}{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

REASONING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ '\\n' }}
{%- if m.reasoning_content is defined and loop.index0 > ns.last -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{ m.content }}<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"""

OPEN_ENDED = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

DEVIOUS = """{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% else %}<|im_start|>assistant
{% if 'secret' in m.content %}hidden{% elif m.content | length > 20 %}{{ m.content[:20] }}...{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORCED = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

MERGING = """{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'assistant' and ns.last == 'assistant' %}{{ m.content }}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% endif %}{% if loop.last or messages[loop.index].role != m.role %}<|im_end|>
{% endif %}{% set ns.last = m.role %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

REORDERING = """{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call><|im_end|>{% endfor %}{% for other in messages[loop.index:] if other.role == 'tool' and m.tool_calls %}<|im_start|>tool
{{ m.tool_calls[0].function.name }}: {{ other.content }}<|im_end|>{% endfor %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LAST_LEFT_OPEN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if not loop.last %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_end|>
<|im_start|>assistant
{% endif %}"""

CLOSED_BY_ROLES = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

BY_INDEX = """{% for i in range(messages | length) %}{% set m = messages[i] %}<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

COLLECTED = """{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' %}{% endfor %}{{ ns.text }}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

WITHOUT_CONTENT = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'user' %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

RANDOM = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ range(99999) | random }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

STYLES = {
    "system-by-default": SYSTEM_BY_DEFAULT,
    "headers-and-date": HEADERS_AND_DATE,
    "no-system": NO_SYSTEM,
    "marked": MARKED,
    "reasoning": REASONING,
    "open-ended": OPEN_ENDED,
}
