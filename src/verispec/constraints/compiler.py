"""Schemas, regexes and grammars into constraints. The library is llguidance, which only this package knows.

All limits on what is compiled are counts, none is a time.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from verispec.constraints.dialect import DIALECT, EXACT, LAYOUT, spliced, translated
from verispec.constraints.limits import MAX_CHARS, check_grammar, check_schema
from verispec.constraints.positions import NOTHING, CompiledGrammar, reason, said
from verispec.constraints.schema import endless, find
from verispec.constraints.stack import on_deep_stack
from verispec.errors import ConstraintError, InputError
from verispec.model.tokenizer import Tokenizer
from verispec.types import ConstraintText

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED = 64  # compiled grammars of one model
_MAX_COMPILING = 2  # at the same time
_MAX_TESTS = 256  # of a pattern on a name
_ENDLESS = "can match nothing: it requires itself without end"


def library_version() -> str:
    """What answers depend on beside the text of a constraint."""
    try:
        return f"llguidance {version('llguidance')}, dialect {DIALECT}"
    except PackageNotFoundError:
        return "none"


def json_term(schema: Mapping[str, Any]) -> str:
    """A schema as a term inside a grammar."""
    return "%json " + json.dumps(schema)


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
                mine.set_result(on_deep_stack(lambda: self._compiled(wanted)))
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
            source = translated(source)
            schemas = [source]
        elif kind == "grammar":
            embedded = check_grammar(text)
            source = spliced(text, embedded)
            schemas = [each.schema for each in embedded]
        matcher = self._matcher(kind, source)
        if error := reason(matcher):
            path = ""
            if kind == "schema":
                path, error = find(source, error, self._schema_error)
            raise ConstraintError(kind, said(error), path)
        for schema in schemas:
            if (endless_path := endless(schema, self._tests())) is not None:
                raise ConstraintError(kind, _ENDLESS, endless_path if kind == "schema" else "")
        grammar = CompiledGrammar(matcher, self._tables(), self._textless(), self._vocab_size)
        try:
            first_ids = grammar.first_ids()
        except ConstraintError as found:
            raise ConstraintError(kind, found.reason) from found
        if not len(first_ids):
            raise ConstraintError(kind, NOTHING)
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
        return reason(self._matcher("schema", part))

    def _tests(self) -> Callable[[str, str], bool]:
        """Whether a pattern is found in a text, by the library's own rules, and not too often."""
        counts = itertools.count(1)

        def matches(pattern: str, text: str) -> bool:
            if next(counts) > _MAX_TESTS:
                raise ConstraintError("schema", "too many required properties that patternProperties may match")
            both = {"allOf": [{"const": text}, {"type": "string", "pattern": pattern}]}
            return not reason(self._matcher("schema", both))

        return matches

    def _matcher(self, kind: str, source: Any, before: str = "") -> LLMatcher:
        """`before` is what stands before the text, in Lark's notation."""
        tables = self._tables()
        from llguidance import LLMatcher, LLParserLimits

        if kind == "schema":
            try:
                grammar = LLMatcher.grammar_from_json_schema(source, defaults=LAYOUT, overrides=EXACT)  # type: ignore[arg-type]
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
