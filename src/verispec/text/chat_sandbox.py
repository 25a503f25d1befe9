"""A Jinja environment for untrusted chat templates: what a rendering makes and how long it works are bounded.

Jinja's immutable sandbox stops a template from reaching Python; it does not stop it from running for ever or filling
the memory. Here every new value is charged to a `Budget`, by its size; what could grow much beyond its operands is
charged before it is made; and every loop turn, call, filter and test looks at the CPU time of this thread. No signals
or threads are involved, and templates see no clock and no randomness. Knows nothing of chat messages; `chat` does.
"""

import json
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from types import CodeType
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_DEPTH = 64
# Compiling costs up to 0.1 ms per token; 40 KB of dense template have about as many.
MAX_TOKENS = 16_000
_ITEM_CHARS = 8  # what a place in a list counts for
_MAX_INT_BITS = 4096
_MAX_INDENT = 16
# Left out: what repeats or pads text (`center`, `format`, `indent`, ...), what is random, what builds HTML.
_FILTERS = frozenset(
    "abs capitalize count d default dictsort e escape first float int items join last length list lower map max min "
    "reject rejectattr replace reverse safe select selectattr sort string title trim unique upper".split()
)
_METHODS = frozenset(
    "capitalize count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper "
    "items join keys lower lstrip partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split "
    "splitlines startswith strip title upper values".split()
)
_SEQUENCES = (list, tuple, KeysView, ValuesView, ItemsView)
_SIZED = (dict, *_SEQUENCES)
_PLAIN = (str, int, float, Undefined, range, *_SIZED)
_FORBIDDEN = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)


class Budget:
    """How much one rendering may still make, in characters, and until when it may work."""

    def __init__(self, chars: int, seconds: float) -> None:
        self.chars_left = chars
        self._end = time.thread_time() + seconds

    def spend(self, chars: int) -> None:
        self.chars_left -= chars
        if self.chars_left < 0 or time.thread_time() > self._end:
            raise TemplateRuntimeError("the template does too much work for this input")

    def measure(self, value: object) -> None:
        """Pays for one layer of a value."""
        if isinstance(value, str):
            self.spend(1 + len(value))
        elif isinstance(value, _SIZED):
            self.spend(1 + _ITEM_CHARS * len(value))
        else:
            self.spend(1)

    def weigh(self, value: object, depth: int = 0) -> None:
        """Pays for a whole value, shared parts as often as they occur; only plain data can be weighed."""
        if depth > MAX_DEPTH:
            raise SecurityError(f"a value is nested more than {MAX_DEPTH} deep")
        if value is not None and not isinstance(value, _PLAIN):
            raise SecurityError(f"{type(value).__name__} is not plain data")
        self.measure(value)
        if isinstance(value, dict):
            self.weigh(list(value), depth)
            self.weigh(list(value.values()), depth)
        elif isinstance(value, _SEQUENCES):
            for item in value:
                self.weigh(item, depth + 1)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs one template. `budget` is replaced for every rendering.

    The invariant behind the bound: wherever one value can be put into another twice (literals, `+`, `*`, arguments) all
    of it is paid for again, so no value is larger than what was paid, and walking one (printing, comparing, sorting,
    hashing) takes a bounded time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=lambda value: self.weighed(list(value) if isinstance(value, Iterator) else value),
            cache_size=0,
        )
        self.budget = budget
        self.filters = {name: self._bounded(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._tojson
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._bounded(name, test) for name, test in tests.items()}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": Namespace, **functions}

    def compile_bounded(self, source: str) -> CodeType:
        """Refuses what cannot be bounded and compiles the rest with a charge on what repeats or builds."""
        for count, _ in enumerate(self.lex(source)):
            if count == MAX_TOKENS:
                raise TemplateSyntaxError(f"more than {MAX_TOKENS} tokens", 1)
        template = self.parse(source)
        for node in template.find_all(_FORBIDDEN):
            raise TemplateSyntaxError(f"{type(node).__name__} is not allowed", node.lineno)
        for loop in template.find_all(nodes.For):
            if loop.recursive:
                raise TemplateSyntaxError("recursive loops are not allowed", loop.lineno)
        _charge(template)
        return self.compile(template)

    def turns(self, iterable: Iterable[Any], cost: int) -> Iterator[Any]:
        """The same items, paid for one by one."""
        for item in iterable:
            self.budget.spend(cost)
            yield item

    def tick(self, cost: int) -> None:
        self.budget.spend(cost)

    def weighed(self, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    def tilde(self, *parts: Any) -> str:
        text = "".join(map(str, map(self.weighed, parts)))
        self.budget.measure(text)
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (isinstance(left, str) and operator == "%"):
            raise SecurityError("powers and % formatting are not allowed in templates")
        if operator == "+":  # the left side is often what has been collected so far, and was paid for then
            self.budget.weigh(right)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.budget.spend(_ITEM_CHARS * len(value) * max(times, 0))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_INT_BITS:
            raise SecurityError("number is too large")
        if operator == "*":
            self.budget.weigh(result)
        self.budget.measure(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call: the functions given to a template, its macros, and harmless methods of plain values."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "this")
        if owner is __self:  # one of the charges that `_charge` put in
            return __obj(*args)
        is_method = isinstance(owner, str | list | tuple | dict)
        is_given = any(__obj is given for given in __self.globals.values())
        if not (is_method or is_given or isinstance(__obj, Macro | Undefined) or isinstance(owner, LoopContext)) or (
            is_method and name not in _METHODS
        ):
            raise SecurityError(f"calling {name!r} is not allowed in templates")
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, _PLAIN):
                __self.budget.weigh(arg)
        if isinstance(owner, str):
            __self._pay_growth(name, owner, *args)
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.measure(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        result = super().getitem(obj, argument)
        self.budget.measure(result if isinstance(argument, slice) else None)
        return result

    def _pay_growth(self, name: str, text: str, first: Any = "", second: Any = "", *_count: Any) -> None:
        """In advance, for the methods of a text whose result can be much longer than all they are given."""
        if name == "join" and isinstance(first, (str, range, *_SIZED)):
            self.budget.spend(len(first) * len(text))
        if name == "replace":
            self.budget.spend(text.count(str(first)) * len(str(second)))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or a test that pays for its arguments and for its result."""
        num_implicit = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # also copies the mark that asks for the context or the environment
        def bounded(*args: Any, **kwargs: Any) -> Any:
            implicit, value, rest = args[:num_implicit], args[num_implicit], args[num_implicit + 1 :]
            more = [*rest, *kwargs.values()]
            for arg in more:
                self.budget.weigh(arg)
            if name == "join":
                value = list(value) if isinstance(value, Iterator) else value
                self._pay_growth(name, str([*more, ""][0]), value)
            if name == "replace":
                self._pay_growth(name, str(value), *more)
            result = function(*implicit, value, *rest, **kwargs)
            if isinstance(result, Iterator):
                return self.turns(result, 1)
            self.budget.measure(result)
            return result

        return bounded

    def _tojson(
        self, value: Any, indent: int | None = None, *, ensure_ascii: bool = False, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        """JSON as `transformers` writes it: no HTML escapes, characters as they are."""
        self.budget.weigh(value)
        if not isinstance(indent or 0, int) or max(indent or 0, *map(len, separators or ("",))) > _MAX_INDENT:
            raise SecurityError(f"tojson takes an indent and separators up to {_MAX_INDENT}")
        text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        self.budget.measure(text)
        return text


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; rendering a prompt has no use for it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _charge(node: nodes.Node) -> None:
    """Puts the charges into a tree, leaves first: what repeats pays for the text in it, what builds for what it is."""
    for name, value in list(node.iter_fields()):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _charge(child)
        charged = [_charged(child) if isinstance(child, nodes.Node) else child for child in children]
        setattr(node, name, charged if isinstance(value, list) else charged[0])
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        cost = nodes.Const(1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData)), lineno=node.lineno)
        if isinstance(node, nodes.For):
            node.iter = _call("turns", node.iter, cost)
        else:
            node.body.insert(0, nodes.ExprStmt(_call("tick", cost), lineno=node.lineno))


def _charged(node: nodes.Node) -> nodes.Node:
    """Literals and `~`: the expressions for which Jinja offers no hook."""
    if isinstance(node, nodes.Concat):
        return _call("tilde", *node.nodes)
    is_literal = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    return _call("weighed", node) if is_literal else node


def _call(name: str, *args: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=args[0].lineno)
    return nodes.Call(function, list(args), [], None, None, lineno=args[0].lineno)
