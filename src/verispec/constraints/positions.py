"""Places in a compiled grammar: what is allowed there, what is forced, and where a token leads.

A position is a matcher that nobody moves: one more token is a copy that took it (microseconds). So drafts need no
rollback, and what a rejected draft cost counts against no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NO_EXTENSION = "NoExtension"  # how the library's reasons begin where nothing can follow
NOTHING = "can match nothing that this model's tokens can write"
_OVERLAPS = "unsupported: a oneOf whose options may overlap; anyOf takes them"
_IN_OUR_WORDS = {"schema is false": "it is false", "anyOf is empty": "there are no options"}


def reason(matcher: LLMatcher) -> str:
    """Why nothing can be done with a matcher, without a drawing of the place; "" if it can."""
    return matcher.get_error().partition("\n<state>")[0].strip() if matcher.is_error() else ""


def said(error: str) -> str:
    """An error of the library in one line, in our words where it has a common reason."""
    if match := re.match(r"Unimplemented keys: \[(.*)\]", error):
        return f"unsupported: {match[1]}"
    if match := re.match(r"Unsatisfiable schema: (.*)", error, re.DOTALL):
        return "can match nothing: " + _IN_OUR_WORDS.get(match[1], match[1])
    if error.startswith("oneOf constraints are not supported"):
        return _OVERLAPS
    if error.startswith(_NO_EXTENSION):
        return NOTHING
    return " ".join(error.replace("<non-verbose/>", "").split())


class CompiledGrammar:
    """A matcher at its beginning, and what masks are made of."""

    def __init__(self, matcher: LLMatcher, library: LLTokenizer, textless: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._library = library
        self._textless = textless
        self._vocab_size = vocab_size

    def first_ids(self) -> NDArray[np.int64]:
        """The tokens that an answer can begin with."""
        return np.flatnonzero(np.unpackbits(self.start(()).allowed.view(np.uint8), bitorder="little"))

    def start(self, stop_ids: Iterable[int]) -> Position:
        ends = _bits(self._textless.intersection(stop_ids), self._vocab_size)
        masking = Masking(self._library, self._vocab_size % 32, bytes(ends.nbytes), ends)
        return Position(self._matcher.deep_copy(), masking)


class Masking(NamedTuple):
    """What masks are made with. The library's own end token is no part of them: its bit follows the vocabulary's."""

    library: LLTokenizer
    num_last: int  # tokens in a mask's last word, if it is not full: the end token is in it, too
    nothing: bytes  # a mask that allows nothing
    ends: NDArray[np.uint32]  # the tokens that end an answer


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
        """By few operations: they find the caches cold."""
        _, num_last, nothing, ends = self._masking
        if self.is_exhausted:
            return ends
        words = self._matcher.compute_bitmask()
        error = reason(self._matcher)
        allowed = np.frombuffer(words, np.uint32, len(ends))
        if num_last:
            allowed = allowed.copy()
            allowed[-1] &= (1 << num_last) - 1
            words = allowed.tobytes()
        if not error and not words.startswith(nothing):
            return allowed | ends if self.is_complete else allowed
        if error and not error.startswith(_NO_EXTENSION):
            raise ConstraintError("the grammar", said(error))
        if not self.is_complete:
            raise ConstraintError("the grammar", NOTHING)
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
            raise ConstraintError("the grammar", self._refusal(token_id))
        return found

    def _refusal(self, token_id: int) -> str:
        """Why a token that was drawn cannot be followed."""
        if self.allowed[token_id // 32] >> token_id % 32 & 1:  # by its mask it can
            matcher = self._matcher.deep_copy()
            matcher.consume_token(token_id)
            if why := reason(matcher):
                return f"cannot be followed: {said(why)}"
        return f"does not allow token {token_id} here"
