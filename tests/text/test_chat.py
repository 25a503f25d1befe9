import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scale import thinned
from verispec.errors import InputError, ModelFileError
from verispec.model.gguf_file import open_gguf
from verispec.text import chat
from verispec.text.chat import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "<think>hm</think>\n\nHello!"},
    {"role": "user", "content": "Bye"},
]

# The idioms of the templates in use: namespaces, slices, backward loops, splits, tool lists, `generation`.
EVERYTHING = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = 'none' %}
    {%- set turns = messages %}
{%- endif %}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in turns[::-1] %}
    {%- set index = (turns | length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and not (message.content.startswith('<tool>')) %}
        {%- set ns.last = index %}
    {%- endif %}
    {%- set ns.seen = ns.seen + [message.role] %}
{%- endfor %}
{%- macro turn(role, text='') %}[{{ role ~ ':' ~ text }}]{% endmacro %}
{{- turn('system', system) }}
{%- if tools is defined and tools is not none %}{{- tools | map(attribute='name') | join(', ') }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}{% endif %}
{%- for message in turns %}
    {%- if message['content'] is string and '</think>' in message.content %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}{% set text = message.content.strip() %}{% endif %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
    {%- if loop.previtem is defined and loop.previtem.role == message.role %}{% continue %}{% endif %}
    {%- generation %}{{ turn(message.role, text) }}{% endgeneration %}
{%- endfor %}
{{- ns.last }}{{ ns.seen | unique | list | length }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- if add_generation_prompt %}{{ '<go>' }}{% endif %}"""


def render(template: str | None, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplate(template).render(messages, special_tokens={"bos_token": "<s>"}, **options)


class TestRendering:
    def test_smollm2(self, smollm2_path: Path) -> None:
        with open_gguf(smollm2_path) as file:
            template = file.metadata["tokenizer.chat_template"]
        assert isinstance(template, str)
        assert render(template) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        )
        assert render(template, TALK[:2], add_generation_prompt=False) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        )

    def test_the_idioms_of_real_templates(self) -> None:
        assert render(EVERYTHING, TALK) == "<s>[system:Be brief.][user:Hi][assistant:Hello!][user:Bye]222<go>"
        tools = [{"name": "add", "about": "<é>"}]
        assert '[system:none]add\n{"name": "add", "about": "<é>"}[user:Hello]011<go>' in render(EVERYTHING, tools=tools)

    def test_a_template_can_be_rendered_again(self) -> None:
        template = ChatTemplate(EVERYTHING)
        texts = {template.render(TALK, special_tokens={}) for _ in range(50)}
        assert len(texts) == 1

    def test_blocks_are_trimmed_and_undefined_is_empty(self) -> None:
        assert render("  {% if true %}\nx\n  {% endif %}\n{{ nothing }}y") == "x\ny"

    def test_tojson(self) -> None:
        assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "Hello"}]'
        assert render("{{ {'b': '<ü>', 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": "<ü>"\n}'

    @given(contents=st.lists(st.text(), min_size=1, max_size=5))
    def test_contents_arrive_unchanged(self, contents: list[str]) -> None:
        messages = [{"role": "user", "content": content} for content in contents]
        template = "{% for m in messages %}{{ m.content }}|{{ m['content'] ~ '|' }}{% endfor %}"
        assert render(template, messages) == "".join(f"{content}|{content}|" for content in contents)

    def test_long_chats_fit_the_budget(self) -> None:
        messages = [{"role": role, "content": "word " * 400} for _ in range(500) for role in ("user", "assistant")]
        assert len(render(EVERYTHING, messages)) > 1_900_000


class TestClock:
    LLAMA = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"

    def test_there_is_none(self) -> None:
        assert render(self.LLAMA) == "26 Jul 2024"
        with pytest.raises(InputError, match="strftime_now"):
            render("{{ strftime_now('%Y') }}")


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "named"),
        [
            ([], "messages"),
            ("hi", "messages"),
            ({"role": "user"}, "messages"),
            (["hi"], r"messages\[0\]"),
            ([*HELLO, {"role": "user"}], r"messages\[1\]\.content"),
            ([*HELLO, {"content": "x"}], r"messages\[1\]\.role"),
            ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
            ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content"),
            ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
            ([*HELLO, {"role": "user", "content": "x", "extra": object()}], r"messages\[1\]: object"),
        ],
    )
    def test_malformed_messages_are_named(self, messages: Any, named: str) -> None:
        with pytest.raises(InputError, match=named):
            render("x", messages)

    @pytest.mark.parametrize("role", ["", "User", "bot", "user<|im_end|>", "x" * 5000])
    def test_unknown_roles_are_named_with_the_known_ones(self, role: str) -> None:
        known = "known roles: system, developer, user, assistant, tool"
        with pytest.raises(InputError, match=rf"messages\[1\]\.role '{re.escape(role[:9])}.*{known}"):
            render("x", [*HELLO, {"role": role, "content": "x"}])

    def test_deep_values_are_refused(self) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(InputError, match=r"tools\[0\].*nested"):
            render("{{ tools | tojson }}", tools=[{"parameters": deep}])

    @pytest.mark.parametrize("template", [None, ""])
    def test_no_template_comes_with_advice(self, template: str | None) -> None:
        with pytest.raises(InputError, match="--raw"):
            render(template)

    def test_the_template_may_refuse(self) -> None:
        with pytest.raises(InputError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")

    def test_messages_are_not_changed(self) -> None:
        for attack in (
            "messages.append(1)",
            "messages[0].update(role='x')",
            "messages.clear()",
            "messages[0].pop('role')",
        ):
            with pytest.raises(InputError):
                render(f"{{{{ {attack} }}}}")
        assert HELLO == [{"role": "user", "content": "Hello"}]


DOUBLING = "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macro doubling": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "caller": "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat list": "{{ 10000000000 * [1] }}",
    "power": "{{ 10**10000000 }}",
    "squares": DOUBLING.format(start="9", step="ns.x * ns.x", end=""),
    "text ~": DOUBLING.format(start="'aaaa'", step="ns.x ~ ns.x", end=""),
    "text +": DOUBLING.format(start="'aaaa'", step="ns.x + ns.x", end=""),
    "list +": DOUBLING.format(start="[1]", step="ns.x + ns.x", end=""),
    "shared lists": DOUBLING.format(start="[1]", step="[ns.x, ns.x]", end="{{ ns.x }}"),
    "shared dicts": DOUBLING.format(start="1", step="dict(a=ns.x, b=ns.x)", end="{{ ns.x | tojson }}"),
    "shared tuples hashed": DOUBLING.format(start="1", step="(ns.x, ns.x)", end="{{ {ns.x: 1}[ns.x] }}"),
    "shared namespaces": DOUBLING.format(start="1", step="namespace(a=ns.x, b=ns.x)", end="{{ ns.x }}"),
    "block": DOUBLING.format(start="'aaaa'", step="[ns.x, ns.x] | join", end=""),
    "join filter": "{{ range(99999) | join('a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join(range(99999) | map('string')) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "center method": "{{ 'a'.center(10000000000) }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "format operator": "{{ '%9999999999d' % 1 }}",
    "json indent": "{{ messages | tojson(indent=999999999) }}",
    "search": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "search by test": "{% set s = range(99999) | list %}{% for i in range(99999) %}{{ -1 is in(s) }}{% endfor %}",
    "sort": "{% for i in range(9999) %}{{ range(99999) | sort | first }}{% endfor %}",
    "refund": "{{ (-99999999) | _tick }}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "refund by map": "{{ [-1000000000000000] | map('_tick') | list }}",
    "much output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
}


class TestBounds:
    @pytest.mark.parametrize("name", thinned(list(ENDLESS)))
    def test_endless_work_ends_with_an_error(self, name: str) -> None:
        start = time.process_time()
        with pytest.raises((InputError, ModelFileError), match="chat template"):
            render(ENDLESS[name])
        assert time.process_time() - start < 2

    @pytest.mark.slow
    def test_control_a_larger_budget_would_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        template = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}done"
        with pytest.raises(InputError, match="too much work"):
            render(template)
        monkeypatch.setattr(chat, "MAX_SECONDS", 60.0)
        assert render(template) == "done"

    def test_output_cap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat, "MAX_PROMPT_CHARS", 10)
        assert render("0123456789") == "0123456789"
        with pytest.raises(InputError, match="more than 10"):
            render("0123456789x")
        with pytest.raises(InputError, match="more than 10"):
            render("x", [{"role": "user", "content": "0123456789x"}])

    @pytest.mark.parametrize(
        "template",
        [
            "{% include 'x' %}",
            "{% import 'x' as y %}",
            "{% from 'x' import y %}",
            "{% extends 'x' %}",
            "{% block x %}{% endblock %}",
            "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
            "{{ [1, 2] | random }}",
            "{{ 'a' | center(9) }}",
            "{% for %}",
            "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
            "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
            "x" * (chat.MAX_TEMPLATE_CHARS + 1),
        ],
        ids=range(12),
    )
    def test_what_cannot_be_bounded_is_not_compiled(self, template: str) -> None:
        with pytest.raises(ModelFileError, match="chat template"):
            ChatTemplate(template)

    @pytest.mark.parametrize(
        "expression",
        [
            "''.__class__.__mro__",
            "messages.__class__.__base__.__subclasses__()",
            "raise_exception.__globals__['json']",
            "(messages | map(attribute='__class__') | list)[0].__name__",
            "cycler.__init__",
            "lipsum(5)",
            "self.__init__",
            "namespace.__init__.__globals__['sys']",
        ],
    )
    def test_there_is_no_way_to_python(self, expression: str) -> None:
        with pytest.raises(InputError):
            render(f"{{{{ {expression} }}}}{{{{ ({expression}).x.y }}}}")

    def test_errors_of_a_template_are_input_errors(self) -> None:
        for expression in ("1 / 0", "none + 'x'", "[1] | sum", "-'x'"):
            with pytest.raises((InputError, ModelFileError)):
                render(f"{{{{ {expression} }}}}")
