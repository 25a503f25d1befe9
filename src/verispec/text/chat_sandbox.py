"""A Jinja environment for untrusted chat templates, in which every step and every value costs something.

Jinja's immutable sandbox stops a template from reaching Python; it does not stop it from running for ever or filling
the memory. Here each loop turn, call, filter, operator, literal and output is charged to a `Meter`, by its size and
before it happens; a template that spends its budget ends with an error. No signals or threads are involved. Templates
see no clock and no randomness. Knows nothing of chat messages; `chat` does.
"""

import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from functools import wraps
from types import CodeType
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_DEPTH = 64
# Compiling costs up to 0.1 ms per token; 40 KB of dense template have about as many.
MAX_TOKENS = 16_000
_CHARS_PER_STEP = 128  # copying this many characters takes less time than one charged operation
_MAX_INT_BITS = 4096
_MAX_INDENT = 16


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Left out: what repeats or pads text (`center`, `format`, `indent`, ...), what is random, what builds HTML.
_LAZY_FILTERS = _words("map reject rejectattr select selectattr")
_FLAT_FILTERS = _words("abs count d default first float int items last length list reverse safe")
_DEEP_FILTERS = _words("capitalize dictsort e escape join lower max min replace sort string title trim unique upper")
_COMPARING_TESTS = _words("eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in sameas lower upper")
_METHODS = _words(
    "capitalize count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper "
    "items join keys lower lstrip partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split "
    "splitlines startswith strip title upper values"
)
_VIEWS = (KeysView, ValuesView, ItemsView)
_SEQUENCES = (list, tuple, *_VIEWS)
_SIZED = (dict, range, *_SEQUENCES)
_PLAIN = (str, int, float, Undefined, *_SIZED)
_FORBIDDEN = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)


class Meter:
    """Steps left to one rendering."""

    def __init__(self, steps: int) -> None:
        self.steps_left = steps

    def spend(self, steps: int) -> None:
        """Takes `steps` away, or ends the rendering."""
        if steps < 0:  # the charging filters are within a template's reach
            raise SecurityError("negative cost")
        self.steps_left -= steps
        if self.steps_left < 0:
            raise TemplateRuntimeError("the template does too much work for this input")

    def items(self, iterable: Iterable[Any], cost: int = 1) -> Iterator[Any]:
        """The same items, paid for one by one."""
        for item in iterable:
            self.spend(cost)
            yield item

    def measure(self, value: object) -> None:
        """Pays for one layer of a value: its characters or the number of its items."""
        if isinstance(value, str):
            self.spend(1 + len(value) // _CHARS_PER_STEP)
        elif isinstance(value, int):
            self.spend(1 + value.bit_length() // _CHARS_PER_STEP)
        else:
            self.spend(1 + (len(value) if isinstance(value, _SIZED) else 0))

    def weigh(self, value: object, depth: int = 0) -> None:
        """Pays for a whole value, shared parts as often as they occur; only plain data can be weighed."""
        if depth > MAX_DEPTH:
            raise SecurityError(f"a value is nested more than {MAX_DEPTH} deep")
        if value is not None and not isinstance(value, _PLAIN):
            raise SecurityError(f"{type(value).__name__} is not plain data")
        self.measure(value)
        if isinstance(value, dict):
            for key, item in value.items():
                self.weigh(key, depth + 1)
                self.weigh(item, depth + 1)
        elif isinstance(value, _SEQUENCES):
            for item in value:
                self.weigh(item, depth + 1)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment. `meter` is replaced before each rendering, so renderings must not overlap.

    The invariant behind the bound: whoever walks a whole value (printing, joining, comparing, sorting, hashing) pays
    for all of it first, so sharing one value many times buys a template nothing.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, meter: Meter, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=lambda value: self._weighed(None, value),
            cache_size=0,
        )
        self.meter = meter
        known = {name: self.filters[name] for name in _LAZY_FILTERS | _FLAT_FILTERS | _DEEP_FILTERS}
        self.filters = {name: self._metered_filter(name, function) for name, function in known.items()}
        charges: dict[str, Callable[..., Any]] = {"_turns": self._turns, "_tick": self._tick, "_weighed": self._weighed}
        # Jinja evaluates filters of constants while compiling, except those that want the context.
        self.filters |= {name: pass_context(_unbound(function)) for name, function in charges.items()}
        self.filters["tojson"] = self._tojson
        tests: dict[str, Any] = self.tests
        self.tests |= {name: self._metered_test(tests[name]) for name in _COMPARING_TESTS}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": Namespace, **functions}

    def compile_metered(self, source: str) -> CodeType:
        """Refuses what cannot be bounded and compiles the rest with a charge on all that repeats or builds."""
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

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic; sizes are checked before anything is built."""
        if isinstance(left, str) and operator == "%":
            raise SecurityError("% formatting is not allowed in templates")
        if operator == "**" and not _is_small_power(left, right):
            raise SecurityError("power is too large")
        if operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                self.meter.spend(len(sequence) * max(times, 0))
        self.meter.measure(left)
        self.meter.measure(right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_INT_BITS:
            raise SecurityError("number is too large")
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call in a template: the functions given to it, its macros, and harmless methods of plain values."""
        owner = getattr(__obj, "__self__", None)
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, str | list | tuple | dict):
                __self.meter.weigh(arg)
        if isinstance(owner, str | list | tuple | dict):
            args = __self._method_args(owner, __obj.__name__, args)
        elif not (isinstance(__obj, Macro | Undefined) or isinstance(owner, LoopContext) or __self._gave(__obj)):
            raise SecurityError(f"calling {getattr(__obj, '__name__', 'this')!r} is not allowed in templates")
        result = super().call(__context, __obj, *args, **kwargs)
        __self.meter.measure(result)
        return result

    def _gave(self, function: object) -> bool:
        return any(function is given for given in self.globals.values())

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscripts; a slice is a new value."""
        if isinstance(argument, tuple):
            self.meter.weigh(argument)
        result = super().getitem(obj, argument)
        self.meter.measure(result if isinstance(argument, slice) else None)
        return result

    def _method_args(self, owner: object, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pays for a method of a plain value in advance; an iterator to join becomes a list that can be paid for."""
        if name not in _METHODS:
            raise SecurityError(f"method {name!r} is not allowed in templates")
        if not isinstance(owner, dict):
            self.meter.weigh(owner)
        if isinstance(owner, str) and name == "join":
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            self._pay_join(owner, *args)
        if isinstance(owner, str) and name == "replace":
            self._pay_replace(owner, *args)
        return args

    def _pay_join(self, separator: str, parts: object = ()) -> None:
        self.meter.weigh(parts)
        if isinstance(parts, str | list | tuple | dict):
            self.meter.spend(len(parts) * len(separator) // _CHARS_PER_STEP)

    def _pay_replace(self, text: str, old: object = "", new: object = "", *_count: object) -> None:
        self.meter.spend(text.count(str(old)) * len(str(new)) // _CHARS_PER_STEP)

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_implicit = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # also copies the mark that asks for the context or the environment
        def metered(*args: Any, **kwargs: Any) -> Any:
            implicit, value, rest = args[:num_implicit], args[num_implicit], args[num_implicit + 1 :]
            if isinstance(value, (Iterator, range, *_VIEWS)):
                value = list(self.meter.items(value))
            for arg in (*rest, *kwargs.values()):
                self.meter.weigh(arg)
            if name in _DEEP_FILTERS:
                self.meter.weigh(value)
            self.meter.measure(value)
            if name == "join":
                self._pay_join(str([*rest, *kwargs.values(), ""][0]), value)
            if name == "replace":
                self._pay_replace(str(value), *rest, *kwargs.values())
            result = function(*implicit, value, *rest, **kwargs)
            if isinstance(result, Iterator):
                return self.meter.items(result)
            self.meter.measure(result if name not in ("first", "last", "default", "d") else None)
            return result

        return metered

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any) -> Any:
            for arg in args:
                self.meter.weigh(arg)
            return function(*args)

        return metered

    def _tojson(self, value: Any, indent: int | None = None, **options: Any) -> str:
        """JSON as `transformers` writes it: no HTML escapes, characters as they are."""
        self.meter.weigh(value)
        unknown = set(options) - {"ensure_ascii", "separators", "sort_keys"}
        if unknown or (indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_INDENT)):
            raise SecurityError(f"tojson takes indent (up to {_MAX_INDENT}), ensure_ascii, separators and sort_keys")
        if any(len(separator) > _MAX_INDENT for separator in options.get("separators") or ()):
            raise SecurityError("tojson separators are too long")
        text = json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})
        self.meter.measure(text)
        return text

    def _turns(self, _context: Context | None, iterable: Any, cost: int) -> Iterator[Any]:
        return self.meter.items(iterable, cost)

    def _tick(self, _context: Context | None, cost: int) -> None:
        self.meter.spend(cost)

    def _weighed(self, _context: Context | None, value: Any) -> Any:
        if isinstance(value, Iterator):
            value = list(value)  # filters return metered iterators
        self.meter.weigh(value)
        return value


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; rendering a prompt has no use for it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, which `pass_context` can mark."""
    return lambda *args: method(*args)


def _charge(node: nodes.Node) -> int:
    """Puts the charges into a tree, leaves first; returns the steps that one turn through it is worth."""
    cost = 1 + (len(node.data) // _CHARS_PER_STEP if isinstance(node, nodes.TemplateData) else 0)
    for name, value in list(node.iter_fields()):
        children = value if isinstance(value, list) else [value]
        cost += sum(_charge(child) for child in children if isinstance(child, nodes.Node))
        charged = [_charged(child) if isinstance(child, nodes.Node) else child for child in children]
        setattr(node, name, charged if isinstance(value, list) else charged[0])
    if isinstance(node, nodes.For):
        node.iter = _filter(node.iter, "_turns", nodes.Const(cost))
    if isinstance(node, nodes.Macro | nodes.CallBlock):
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(cost, lineno=node.lineno), "_tick"), lineno=node.lineno))
    return cost


def _charged(node: nodes.Node) -> nodes.Node:
    """Literals, `~` and both sides of comparisons: the expressions for which Jinja offers no hook."""
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List([_filter(part, "string") for part in node.nodes], lineno=node.lineno), "join")
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filter(node, "_weighed")
    if isinstance(node, nodes.Compare):
        node.expr = _filter(node.expr, "_weighed")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_weighed")
    return node


def _filter(node: nodes.Node, name: str, *args: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_small_power(base: object, exponent: object) -> bool:
    if not isinstance(base, int) or not isinstance(exponent, int):
        return True
    return base.bit_length() * max(exponent, 0) <= _MAX_INT_BITS
