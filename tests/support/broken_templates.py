"""Chat templates that are too long, too deep, endless or wrong, inside models that are sound otherwise."""

from collections.abc import Iterator

from tests.support.broken_files import Case
from tests.support.broken_folders import TOKENIZER_CONFIG, dump, sound_folder
from tests.support.broken_gguf import BYTE_LEVEL, FILE, model

MEGABYTE = 1_000_000
# A template may be long and work: 200,000 steps of 128 characters; Jinja's lexer takes 300 bytes per digit of a number.
FLOOR_NBYTES = 48 << 20
LOOP = "{% for a in range(99999) %}"


def _doubling(start: str, step: str, end: str = "") -> str:
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}{end}"


# Each of these must be refused: some cannot be compiled, the others would not end or would fill the memory.
REFUSED = {
    "10 MB of text": "x" * 10 * MEGABYTE,
    "10 MB of code": "{{ x }}" * (10 * MEGABYTE // 7),
    "100 KB of output": "{{ x }}" * 14_000,
    "100 KB of statements": "{% set x = 1 %}" * 6_500,
    "100 KB of comparisons": "{{ " + "<".join(["1"] * 50_000) + " }}",
    "deep parentheses": "{{ " + "(" * 40_000 + ")" * 40_000 + " }}",
    "less deep parentheses": "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
    "deep lists": "{{ " + "[" * 2_000 + "]" * 2_000 + " }}",
    "deep ifs": "{% if x %}" * 1_000 + "{% endif %}" * 1_000,
    "less deep ifs": "{% if x %}" * 150 + "{% endif %}" * 150,
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "deep attributes": "{{ x" + ".y" * 2_000 + " }}",
    "deep filters": "{{ x" + "|e" * 2_000 + " }}",
    "deep sums": "{{ " + "+".join(["1"] * 2_000) + " }}",
    "deep negation": "{{ " + "not " * 2_000 + "x }}",
    "deep minus": "{{ " + "-" * 1_500 + "1 }}",
    "long number": "{{ " + "9" * 100_000 + " }}",
    "never closed": "{{ " * 3_000,
    "comment never closed": "{#" * 60_000,
    "raw never closed": "{% raw %}" * 10_000,
    "unknown tag": "{% x\ny %}",
    "unknown filter": "{{ 'a' | nope }}",
    "includes": "{% include '/etc/passwd' %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "nested loops that print": LOOP + LOOP + "x" + "{% endfor %}" * 2,
    "macro for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro doubling": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated list": "{{ [1] * 10000000000 }}",
    "large power": "{{ 10 ** 10000000 }}",
    "large range": "{{ range(1000000000000000) | list }}",
    "doubled text": _doubling("'aaaa'", "n.x ~ n.x"),
    "doubled list": _doubling("[1]", "n.x + n.x"),
    "shared list": _doubling("[1]", "[n.x, n.x]", "{{ n.x }}"),
    "shared dict": _doubling("1", "dict(a=n.x, b=n.x)", "{{ n.x | tojson }}"),
    "squared number": _doubling("9", "n.x * n.x"),
    "padded text": "{{ 'a'.center(10000000000) }}",
    "formatted text": "{{ '%9999999999d' % 1 }}",
    "joined by long text": "{{ range(99999) | join('a' * 100000) }}",
    "replaced by long text": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "reaching for Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ x.__class__.y.z }}",
    "refusing with line breaks": "{{ raise_exception('a\\nb\\x1b[2Jc\\n' * 100) }}",
    "dividing by zero": "{{ 1 / 0 }}",
    "an undefined call": "{{ nothing() }}",
}
ACCEPTED = {"empty statements": "{% if x %}{% endif %}", "100 KB of text": "x" * 100_000, "blanks": " \n" * 50_000}


def cases() -> Iterator[Case]:
    for name, template in {**REFUSED, **ACCEPTED}.items():
        data = model(BYTE_LEVEL, **{"tokenizer.chat_template": template}).data
        yield Case(
            f"template {name}", FILE, {FILE: data},
            must_fail=name in REFUSED, must_work=name in ACCEPTED, floor_nbytes=FLOOR_NBYTES,
        )  # fmt: skip
    sound = sound_folder().files()
    for name in ("10 MB of text", "10 MB of code", "deep parentheses", "nested loops", "includes"):
        config = {"tokenizer_config.json": dump(TOKENIZER_CONFIG | {"chat_template": REFUSED[name]})}
        yield Case(f"template {name} in a config", ".", {**sound, **config}, must_fail=True)
        own = {"chat_template.jinja": REFUSED[name].encode()}
        yield Case(f"template {name} in a file", ".", {**sound, **own}, must_fail=True)
    yield Case("template not UTF-8", ".", {**sound, "chat_template.jinja": b"\xff" * 100}, must_fail=True)
