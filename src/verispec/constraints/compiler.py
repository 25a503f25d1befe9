"""Schemas, regexes and grammars into constraints. The library is llguidance; this is the only module that runs it.

A constraint is a matcher that nobody moves: one more token is a copy that took it (microseconds). So drafts need no
rollback, and what a rejected draft cost counts against no limit. All limits are counts, none is a time.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.constraints.limits import MAX_CHARS, check_grammar, check_schema
from verispec.constraints.schema import demanding, endless, find
from verispec.errors import ConstraintError, InputError
from verispec.model.tokenizer import Tokenizer
from verispec.types import ConstraintText

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED = 64  # compiled grammars of one model
_MAX_COMPILING = 2  # at the same time
_MAX_TESTS = 256  # of a pattern on a name
# Spelt as `json.dumps` does: where nothing is left to choose, the grammar can be drafted, and no answer drowns in
# white space. A schema may say otherwise for itself, under "x-guidance".
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_EXTENSION = "NoExtension"  # how the library's reasons begin where nothing can follow
_NOTHING = "can match nothing that this model's tokens can write"
_ENDLESS = "can match nothing: it requires itself without end"
_OVERLAPS = "unsupported: a oneOf whose options may overlap; anyOf takes them"
_IN_OUR_WORDS = {"schema is false": "it is false", "anyOf is empty": "there are no options"}
_EXACT = {"lenient": False, "coerce_one_of": False}


def library_version() -> str:
    """What answers depend on beside the text of a constraint."""
    try:
        return f"llguidance {version('llguidance')}"
    except PackageNotFoundError:
        return "none"


def json_term(schema: Mapping[str, Any]) -> str:
    """A schema as a term inside a grammar, where answers are spelt as by the schema alone."""
    own = schema.get("x-guidance")
    options = {**_LAYOUT, **(own if isinstance(own, dict) else {}), **_EXACT}
    return "%json " + json.dumps({**demanding(schema), "x-guidance": options})


class Compiler:
    """Compiles for one model; what was compiled lately is kept. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._library: LLTokenizer | None = None
        self._library_lock = threading.Lock()
        self._lock = threading.Lock()  # of the next two
        self._kept: OrderedDict[ConstraintText, CompiledGrammar] = OrderedDict()
        self._running: dict[ConstraintText, Future[CompiledGrammar]] = {}
        self._places = threading.BoundedSemaphore(_MAX_COMPILING)

    def compile(self, wanted: ConstraintText) -> CompiledGrammar:
        """Raises ConstraintError, one sentence with the place of what is wrong. What is kept waits for nothing."""
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
            other = self._running.get(wanted)
            if other is None:
                mine = self._running[wanted] = Future[CompiledGrammar]()
        if other is not None:
            return other.result()
        try:
            with self._places:
                mine.set_result(self._compiled(wanted))
        except BaseException as error:
            mine.set_exception(error)
        with self._lock:
            del self._running[wanted]
            if mine.exception() is None:
                self._kept[wanted] = mine.result()
            if len(self._kept) > _MAX_CACHED:
                self._kept.popitem(last=False)
        return mine.result()

    def _compiled(self, wanted: ConstraintText) -> CompiledGrammar:
        kind, text = wanted
        if len(text) > MAX_CHARS:
            raise ConstraintError(kind, f"has {len(text)} characters; the limit is {MAX_CHARS}")
        source: Any = text
        schemas: list[Any] = []
        if kind == "schema":
            source = json.loads(text)
            check_schema(source)
            source = demanding(source)
            schemas = [source]
        elif kind == "grammar":
            schemas = check_grammar(text)
        matcher = self._matcher(kind, source)
        if error := _reason(matcher):
            path = ""
            if kind == "schema":
                path, error = find(source, error, self._schema_error)
            raise ConstraintError(kind, _said(error), path)
        for schema in schemas:
            if (endless_path := endless(schema, self._tests())) is not None:
                raise ConstraintError(kind, _ENDLESS, endless_path if kind == "schema" else "")
        grammar = CompiledGrammar(matcher, self._tables(), self._textless(), self._vocab_size)
        try:
            first_ids = grammar.first_ids()
        except ConstraintError as found:
            raise ConstraintError(kind, found.reason) from found
        if not len(first_ids):
            raise ConstraintError(kind, _NOTHING)
        if not self._tokenizer.strips_leading_space:
            return grammar
        # One space at the beginning of the tokens is no part of the text: the model may write it, and must, where the
        # text can begin with a space of its own.
        may_be_text = any(self._tokenizer.token_bytes(i).startswith(b" ") for i in first_ids.tolist())
        matcher = self._matcher(kind, source, before='" "' if may_be_text else '" "?')
        return CompiledGrammar(matcher, self._tables(), self._textless(), self._vocab_size)

    def _schema_error(self, part: Mapping[str, Any]) -> str:
        """What the library says of a part by itself. Its references lead elsewhere then, so it is counted anew."""
        try:
            check_schema(part)
        except ConstraintError:
            return ""
        return _reason(self._matcher("schema", part))

    def _tests(self) -> Callable[[str, str], bool]:
        """Whether a pattern is found in a text, by the library's own rules, and not too often."""
        counts = itertools.count(1)

        def matches(pattern: str, text: str) -> bool:
            if next(counts) > _MAX_TESTS:
                raise ConstraintError("schema", "too many required properties that patternProperties may match")
            both = {"allOf": [{"const": text}, {"type": "string", "pattern": pattern}]}
            return not _reason(self._matcher("schema", both))

        return matches

    def _matcher(self, kind: str, source: Any, before: str = "") -> LLMatcher:
        """`before` is what stands before the text, in Lark's notation."""
        tables = self._tables()
        from llguidance import LLMatcher, LLParserLimits

        if kind == "schema":
            try:
                grammar = LLMatcher.grammar_from_json_schema(source, defaults=_LAYOUT, overrides=_EXACT)  # type: ignore[arg-type]
            except ValueError as error:  # a number of more than 64 bits
                raise ConstraintError(kind, str(error)) from error
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        else:
            grammar = LLMatcher.grammar_from_lark(source)
        if before:
            parts = [{"lark_grammar": grammar}] if kind == "grammar" else json.loads(grammar)["grammars"]
            whole = {"lark_grammar": f"start: {before} @body"}
            grammar = json.dumps({"grammars": [whole, {**parts[0], "name": "body"}, *parts[1:]]})
        limits = LLParserLimits(verbose_errors=False)
        return LLMatcher(tables, grammar, log_level=0, limits=limits)

    def _tables(self) -> LLTokenizer:
        with self._library_lock:
            if self._library is None:
                try:
                    from verispec.constraints.vocabulary import library_tokenizer
                except ImportError as error:
                    raise InputError(
                        "schema, regex and grammar need the extra: pip install 'verispec[structured]'"
                    ) from error
                self._library = library_tokenizer(self._tokenizer, self._vocab_size)
            return self._library

    def _textless(self) -> frozenset[int]:
        table, ends = self._tokenizer.table, (*self._tokenizer.special_ids, *self._tokenizer.eos_ids)
        return frozenset([*ends, *(i for i in range(self._vocab_size) if i >= len(table) or not table[i])])


def _reason(matcher: LLMatcher) -> str:
    """Why nothing can be done with a matcher, without a drawing of the place; "" if it can."""
    return matcher.get_error().partition("\n<state>")[0].strip() if matcher.is_error() else ""


def _said(error: str) -> str:
    """An error of the library in one line, in our words where it has a common reason."""
    if match := re.match(r"Unimplemented keys: \[(.*)\]", error):
        return f"unsupported: {match[1]}"
    if match := re.match(r"Unsatisfiable schema: (.*)", error, re.DOTALL):
        return "can match nothing: " + _IN_OUR_WORDS.get(match[1], match[1])
    if error.startswith("oneOf constraints are not supported"):
        return _OVERLAPS
    if error.startswith(_NO_EXTENSION):
        return _NOTHING
    return " ".join(error.replace("<non-verbose/>", "").split())


class CompiledGrammar:
    """A matcher at its beginning, and what masks are made of."""

    def __init__(self, matcher: LLMatcher, library: LLTokenizer, textless: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._library = library
        self._textless = textless
        self._vocabulary = _bits(range(vocab_size), vocab_size)
        self._vocab_size = vocab_size

    def first_ids(self) -> NDArray[np.int64]:
        """The tokens that an answer can begin with."""
        return np.flatnonzero(np.unpackbits(self.start(()).allowed.view(np.uint8), bitorder="little"))

    def start(self, stop_ids: Iterable[int]) -> Position:
        ends = _bits(self._textless.intersection(stop_ids), self._vocab_size)
        return Position(self._matcher.deep_copy(), Masking(self._library, self._vocabulary, ends))


class Masking(NamedTuple):
    """The library's tokenizer; bits of all tokens, without its own end token; and of those that end an answer."""

    library: LLTokenizer
    vocabulary: NDArray[np.uint32]
    ends: NDArray[np.uint32]


def _bits(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


class Position:
    """A place in a grammar. Its matcher is never moved; masks and what comes next are computed once, when asked for."""

    __slots__ = ("_allowed", "_forced", "_masking", "_matcher", "_next", "is_complete", "is_exhausted")

    def __init__(self, matcher: LLMatcher, masking: Masking) -> None:
        self._matcher = matcher
        self._masking = masking
        self._allowed: NDArray[np.uint32] | None = None
        self._forced: tuple[int, ...] | None = None
        self._next: dict[int, Position | None] = {}
        self.is_complete = matcher.is_accepting()
        self.is_exhausted = matcher.is_stopped()

    @property
    def allowed(self) -> NDArray[np.uint32]:
        if self._allowed is None:
            self._allowed = self._computed()
        return self._allowed

    def _computed(self) -> NDArray[np.uint32]:
        _, vocabulary, ends = self._masking
        if self.is_exhausted:
            return ends
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        error = _reason(self._matcher)
        allowed = words[: len(vocabulary)] & vocabulary
        if not error and allowed.any():
            return allowed | ends if self.is_complete else allowed
        if error and not error.startswith(_NO_EXTENSION):
            raise ConstraintError("the grammar", _said(error))
        if not self.is_complete:
            raise ConstraintError("the grammar", _NOTHING)
        self.is_exhausted = True
        return ends

    @property
    def forced_ids(self) -> tuple[int, ...]:
        if self._forced is None:
            self._forced = () if self.is_exhausted else self._forced_now()
        return self._forced

    def _forced_now(self) -> tuple[int, ...]:
        """The library's, then a cut of the forced text behind them: there the next text may join the last token."""
        library, certain = self._masking.library, self._matcher.compute_ff_tokens()
        rest = self._matcher.compute_ff_bytes()[len(library.decode_bytes(certain)) :]
        return (*certain, *library.tokenize_bytes(rest))

    def after(self, token_id: int) -> Position | None:
        if token_id not in self._next:
            matcher = self._matcher.deep_copy()
            is_taken = not self.is_exhausted and matcher.consume_token(token_id)
            self._next[token_id] = Position(matcher, self._masking) if is_taken else None
        return self._next[token_id]

    def committed(self, token_id: int) -> Position:
        found = self.after(token_id)
        self._next.clear()
        if found is None:
            raise ConstraintError("the grammar", f"does not allow token {token_id} here")
        return found
