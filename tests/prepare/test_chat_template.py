"""The program that renders chat templates: transformers' texts, in a process with jinja2 alone."""

import json
import subprocess
import sys

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nanotrain.prepare import chat_template
from nanotrain.prepare.chat_template import Renderer

TALK = [
    {"role": "system", "content": "be <kind> & é"},
    {"role": "user", "content": " 2 + 2? "},
    {"role": "assistant", "content": "<think>sum</think>4 "},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes", "extra": {"b": [1, None], "a": 0.5}},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
# each as published models have it, shortened
TEMPLATES = {
    "system and tools": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" and not message.tool_calls %}
        {{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "date and macros": """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- macro turn(role, text) -%}
<|{{ role }}|>{{ text | trim }}<|eot|>
{%- endmacro %}
Today: {{ date_string }}
{% for message in messages %}{{ turn(message['role'], message['content']) }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
""",
    "namespace and splits": """
{% set ns = namespace(is_first=true, system='') %}
{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}
{% endfor %}{{ bos_token }}{{ ns.system }}
{% for m in messages %}
{% if m['role'] == 'system' %}{% continue %}{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}
{% set text = m['content'] %}
{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}
{{ '<|' ~ m['role'] ~ '|>' }}{{ text.strip() }}{% if not loop.last %}{{ eos_token }}{% endif %}
{% endfor %}
""",
    "json": """
{%- for m in messages -%}
{{ m | tojson }}{{ m | tojson(indent=2) }}{{ dict(a=1) | tojson(sort_keys=true) }}
{%- endfor -%}
{{ messages | map(attribute='role') | list }}{{ messages[1:] | length }}
""",
    "alternation": """
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% else %}{% set rest = messages %}{% endif %}
{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}
""",
    "marked": """
{% for m in messages %}{% if m.role == 'assistant' %}
<|a|>{% generation %}{{ m.content }}<|end|>
{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}
{% endif %}{% endfor %}
""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name: str) -> None:
    renderer = Renderer(TEMPLATES[name], VARIABLES)
    for messages in (TALK, TALK[1:3], TALK[:2], TALK[1:4]):
        for asks in (False, True):
            (text,), spans = render_jinja_template(
                [messages],
                chat_template=TEMPLATES[name],
                add_generation_prompt=asks,
                return_assistant_tokens_mask=True,
                **VARIABLES,
            )
            request = {"messages": messages, "add_generation_prompt": asks}
            expected = {"text": text, "spans": [list(span) for span in spans[0]]}
            assert json.loads(renderer.reply(request)) == expected
    assert bool(expected["spans"]) == (name == "marked")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% for", "unexpected 'end of template'"),
        ("{{ raise_exception('roles\nalternate') }}", "roles"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ namespace.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{{ namespace(_a=1) }}", "a namespace has no _a"),
        ("{{ dict.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ strftime_now.__globals__.os }}", "attribute '__globals__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ 'x' * 70000000 }}", "a text of more than 67,108,864 characters"),
    ],
)
def test_a_template_that_fails_is_a_reply(template: str, why: str) -> None:
    reply = json.loads(Renderer(template, {}).reply({"messages": TALK}))
    assert why in reply["error"] and "\n" not in reply["error"]


def test_the_process_imports_neither_torch_nor_transformers() -> None:
    probe = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules, sep='\\n')"
    finished = subprocess.run(
        [sys.executable, "-c", probe, chat_template.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(finished.stdout.split())
    assert "jinja2" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "nanotrain"}
