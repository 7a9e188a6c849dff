"""Chat templates: rendered as transformers renders them, within bounds of output and time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from larder.core import ModelError
from larder.models import seed_tokenizer
from larder.session import (
    ChatTemplate,
    PromptEnd,
    TemplateMessage,
    compile_template,
    render_template,
)

TURNS = [
    TemplateMessage("system", "Be brief."),
    TemplateMessage("user", "What is 2 + 2?\nSay it."),
    TemplateMessage("assistant", "  <|4|>  "),
    TemplateMessage("user", "100% sure, {really}?"),
]
MESSAGES = [{"role": turn.role, "content": turn.content} for turn in TURNS]

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MACROS = """
{%- macro header(role, mark='#') -%}{{ mark * 3 ~ ' ' ~ role | upper }}{%- endmacro -%}
{%- set ns = namespace(count=0, found=false) -%}
{%- for message in messages -%}
    {%- if loop.first and message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- set ns.count = ns.count + message.content | length -%}
    {{ header(message.role) }} {{ message.content.split('\\n')[-1].strip().replace('a', 'AA') }}
    {%- if message.role == 'assistant' %}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {%- endif %}
{%- endfor -%}
{{ ns.count }} {{ '%s-%03d' | format('x', 7) }} {{ messages | tojson(indent=2) }}
{{ messages | map(attribute='role') | join(', ') }} {{ 'a{}b'.format(3) }} {{ bos_token }}
{%- if messages[1:] | selectattr('role', 'equalto', 'tool') | list %}tools{% endif -%}
{{ dict(a=1) | tojson }}{{ (range(5) | list)[::-1] }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'a' < 'b' }}
{%- for n in range(10) %}{% if n > 2 %}{% break %}{% endif %}{{ n }}{% endfor %}
"""


def tokenizer(template: str) -> Any:
    own = seed_tokenizer()
    own.chat_template = template
    return own


@pytest.mark.parametrize("template", [None, CHATML, MACROS], ids=["seed", "chatml", "macros"])
@pytest.mark.parametrize("end", PromptEnd)
def test_rendered_text_equals_transformers(template, end) -> None:
    own = tokenizer(template or seed_tokenizer().chat_template)
    expected = own.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=end is PromptEnd.ANSWER
    )
    assert ChatTemplate(own).render(TURNS, end) == expected


HOSTILE = {
    "repeated": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [0] * 10**9 }}",
    "joined to itself": (
        "{% set ns = namespace(t='ab') %}"
        "{% for n in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}"
    ),
    "added to itself": (
        "{% set ns = namespace(t='ab') %}"
        "{% for n in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}"
    ),
    "list of lists": (
        "{% set ns = namespace(t=['ab']) %}"
        "{% for n in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}"
    ),
    "padded": "{{ 'a' | center(10**9) }}",
    "padded by a method": "{{ 'a'.ljust(10**9) }}",
    "a wide field": "{{ '%0999999999d' % 1 }}",
    "a wide field by a filter": "{{ '%*d' | format(999999999, 1) }}",
    "a wide field by a method": "{{ '{:>999999999}'.format(1) }}",
    "a nested field": "{{ '{:>{}}'.format(1, 999999999) }}",
    "replaced": "{% set t = 'a' * 10**6 %}{{ t.replace('a', t) }}",
    "replaced by a filter": "{% set t = 'a' * 10**6 %}{{ t | replace('a', t) }}",
    "joined": "{% set t = 'a' * 10**6 %}{{ range(1000) | list | join(t) }}",
    "joined by a method": "{% set t = 'a' * 10**6 %}{{ t.join(['b'] * 1000) }}",
    "joined lazily": "{% set t = 'a' * 10**6 %}{{ range(1000) | map('string') | join(t) }}",
    "indented": "{% set t = '\\n' * 10**5 %}{{ t | indent(9999) }}",
    "large number": "{{ 10 ** (10 ** 8) }}",
    "long output": "{% for n in range(10**6) %}{{ 'abcdefghij' }}{% endfor %}",
    "long range": "{{ range(10**9) | list }}",
    "loops in loops": (
        "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
    ),
    "lists beside each other, compared": (
        "{% set ns = namespace(a=[1], b=[1]) %}{% for n in range(60) %}"
        "{% set ns.a, ns.b = [ns.a, ns.a], [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
    ),
    "a mapping by a tuple of tuples": (
        "{% set ns = namespace(t=(1,)) %}{% for n in range(60) %}{% set ns.t = (ns.t, ns.t) %}"
        "{% endfor %}{% set d = {ns.t: 1} %}"
    ),
    "mappings in mappings": (
        "{% set ns = namespace(t=1) %}{% for n in range(60) %}{% set ns.t = dict(a=ns.t, b=ns.t) %}"
        "{% endfor %}{{ ns.t == 1 }}"
    ),
    "deep": (
        "{% set ns = namespace(t=(1,)) %}{% for n in range(10**5) %}{% set ns.t = (ns.t,) %}"
        "{% endfor %}{% set d = {ns.t: 1} %}"
    ),
    "lazily made, and listed": "{{ range(10**5) | map('string') | map('center', 9999) | list }}",
    "lazily made, and counted by a loop": (
        "{% for t in range(10**5) | map('string') | map('center', 9999) %}{{ loop.length }}"
        "{% break %}{% endfor %}"
    ),
    "a large block": (
        "{% set t = 'ab' * 10**5 %}{% set u %}{% for n in range(10**4) %}{{ t }}{% endfor %}"
        "{% endset %}"
    ),
    "a large block of constants": (
        "{% set u %}{% for n in range(10**5) %}ABCD{% endfor %}{% endset %}".replace(
            "ABCD", "ab" * 10**4
        )
    ),
    "bytes": "{{ 'a'.encode().center(10**9) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "many wide fields": "{{ ('%(a)9999d' * 60000) % {'a': 1} }}",
    "many wide fields by a method": "{{ ('{0:9999}' * 60000).format(1) }}",
    "wrapped": "{{ ('a' * 5000) | wordwrap(1, true, 'ab' * 10**5) }}",
    "replaced by name": "{{ ('a' * 5000) | replace(new='ab' * 10**5, old='') }}",
    "joined by name": "{{ range(5000) | join(attribute='real', d='ab' * 10**5) }}",
    "a range, joined": "{{ range(5 * 10**5) | join('ab' * 400) }}",
    "indented at other ends of lines": "{{ ('a\\r' * 10**5) | indent(9999) }}",
    "indented JSON": "{{ ([1] * 10**5) | tojson(indent=9999) }}",
    "separated JSON": "{{ ([1] * 10**5) | tojson(separators=('ab' * 10**4, ':')) }}",
    "a sum of lists": "{{ ([[1]] * 10**5) | sum(start=[]) }}",
    "sought from the end": "{{ ('a' * 4 * 10**5).rfind('ab' + 'a' * 2 * 10**5) }}",
    "sought for nothing": (
        "{% set t = 'ab' * 10**5 %}{% for n in range(10**6) if ('c' ~ n) in t %}{% endfor %}"
    ),
    "no end": "{% macro again(n) %}{{ again(n) }}{{ again(n) }}{% endmacro %}{{ again(1) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(name) -> None:
    began = time.thread_time()
    with pytest.raises((ModelError, RecursionError), match="chat template|recursion"):
        render_template(compile_template(HOSTILE[name]), MESSAGES, seconds=0.1)
    assert time.thread_time() - began < 5  # 'a' * 10**9 alone took 64 s with what follows


WORKING = {
    "names of ours": ("{{ '{name} {value}'.format(name='x', value=2) }}", "x 2"),
    "a large default": ("{{ budget | default(131072) }} {{ '%d' % 20000 }}", "131072 20000"),
    "joined": ("{{ ', '.join(['a', 'b']) }} {{ 'abc' | join('-') }}", "a, b a-b-c"),
    "unpacked": ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "x1"),
    "chosen": ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}", "22"),
    "split": ("{{ 'a|b|c'.rsplit('|', 1) | tojson }}", '["a|b", "c"]'),
    "one in many": ("{{ (1, messages | length) in [(1, 4)] }}", "True"),
}


@pytest.mark.parametrize("name", WORKING)
def test_common_template_features_are_allowed(name) -> None:
    template, expected = WORKING[name]
    assert render_template(compile_template(template), MESSAGES) == expected


def test_template_errors_are_explained() -> None:
    with pytest.raises(ModelError, match="more than .* characters.*plain chat template"):
        ChatTemplate(tokenizer("{{ 'a' * 10**9 }}")).render(TURNS, PromptEnd.CLOSED)
    with pytest.raises(ModelError, match="rejects the conversation: ZeroDivisionError"):
        ChatTemplate(tokenizer("{{ 1 / 0 }}")).render(TURNS, PromptEnd.CLOSED)


def test_long_document_is_rendered() -> None:
    text = "word " * 2_000_000
    rendered = ChatTemplate(tokenizer(CHATML)).render(
        [TemplateMessage("user", text)], PromptEnd.ANSWER
    )
    assert len(rendered) > len(text)
