"""Chat templates: transformers' texts, a sandbox, and an end to those that loop."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from language_models import TEMPLATE
from small_tokenizers import tokenizer

from ftbert.text import ChatTemplate

# As they are built in folders of Llama 3, Qwen and SmolLM: white space cut on one side, macros, namespaces, tojson.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMED = """{{- bos_token }}
{%- set ns = namespace(n=0) %}
{%- macro head(role) %}{{ '[' ~ role ~ ']' }}{% endmacro %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- head(m.role) + m['content'] | trim + ' ' + ({'n': ns.n, 'é': '<'} | tojson) }}
    {% generation %}{% set ns2 = 3 %}{{ eos_token }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " a <b> & \"c\"\n"}],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi, "}],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}],
]


def names(of: Any) -> dict[str, Any]:
    return dict(of.special_tokens_map)


@pytest.mark.parametrize("source", [TEMPLATE, CHATML, TRIMMED])
@pytest.mark.parametrize("chat", CHATS)
def test_texts_are_those_of_transformers(source: str, chat: list[dict[str, Any]]) -> None:
    words = tokenizer("bytes")
    goes_on = chat[-1]["role"] == "assistant"
    want = words.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
    )
    assert ChatTemplate(source, names(words)).render(chat) == want
    assert ChatTemplate(source, names(words)).render(chat, seconds=5) == want


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in 'x' * 9000 %}{% for b in 'x' * 9000 %}{{ '' }}{% endfor %}{% endfor %}",
    ],
)
def test_one_that_loops_ends(source: str) -> None:
    template, began = ChatTemplate(source, {}), time.monotonic()
    with pytest.raises(ValueError, match=r"does not take these messages: TimeoutError: it was not done in 0.1 s"):
        template.render(CHATS[0], seconds=0.1)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in %}", "is not valid"),
        ("{{ raise_exception('only users') }}", "these messages: only users"),
        ("{{ messages[9].content.a }}", "these messages"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
    ],
)
def test_what_it_does_not_take_is_said(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(source, {}).render(CHATS[0], seconds=5)


def test_an_answer_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(ValueError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}", {}).render(CHATS[2])


def test_workers_need_no_torch_for_it() -> None:
    code = "import sys; from ftbert.decoding import Options, Request, TextStream; from ftbert.text import ChatTemplate; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
