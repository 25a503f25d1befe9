"""Token ids to text, one token at a time: whole characters only, and stop strings found wherever they lie.

`TextStream` knows bytes, UTF-8 and stop strings. It does not know why a generation ends otherwise (EOS, length) and
never looks at a token twice.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from verispec.errors import InputError
from verispec.model.tokenizer import Tokenizer
from verispec.types import SamplingParams, TextPiece


class _StopMatcher:
    """Knuth-Morris-Pratt: after each character, how much of the stop string the text's end could be the start of."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched_len = 0
        self._borders = [0] * (len(stop) + 1)  # longest proper border of each prefix
        for end in range(1, len(stop)):
            self._borders[end + 1] = self._extend(self._borders[end], stop[end])

    def _extend(self, matched_len: int, char: str) -> int:
        while matched_len and self.stop[matched_len] != char:
            matched_len = self._borders[matched_len]
        return matched_len + (self.stop[matched_len] == char)

    def advance(self, char: str) -> bool:
        """Takes one character; True where it completes the stop string, which is then behind us."""
        self.matched_len = self._extend(self.matched_len, char)
        completed = self.matched_len == len(self.stop)
        if completed:
            self.matched_len = self._borders[self.matched_len]
        return completed


class TextStream:
    """The text of one generation.

    Text that could still become a stop string is held back. The stop string that completes first wins; of several that
    complete with the same character, the one that starts first. It is left out of the text, unless `keeps_stop`. Of the
    control tokens only `shown_ids` have text. A text that `continues` another keeps a space in front, which tokenizers
    put before a text by itself. The cost of a token does not depend on the text so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        continues: bool = False,
        keeps_stop: bool = False,
        shown_ids: Iterable[int] = (),
    ) -> None:
        if isinstance(stop, str):
            raise InputError("stop must be a sequence of strings, not one string")
        for index, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise InputError(f"stop[{index}] must be a non-empty string")
        self.shown_ids = tuple(shown_ids)
        shown = {token_id: tokenizer.token_text(token_id).encode() for token_id in self.shown_ids}
        self._token_bytes = (lambda i: shown.get(i) or tokenizer.token_bytes(i)) if shown else tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_pending = tokenizer.strips_leading_space and not continues
        self._matchers = [_StopMatcher(text) for text in dict.fromkeys(stop)]
        self._beginnings = frozenset(text[0] for text in stop)
        self._released: list[str] = []
        self._held = ""
        self.keeps_stop = keeps_stop
        self._finished = False
        self.matched_stop: str | None = None

    @property
    def can_stop(self) -> bool:
        return bool(self._matchers)

    @property
    def text(self) -> str:
        return "".join(self._released)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Takes one token. With `may_stop` off, a stop string that completes here is plain text for good.

        After a stop string nothing is released any more.
        """
        if self.matched_stop is not None:
            return TextPiece("", stopped=True)
        if self._finished:
            raise RuntimeError("push after finish")
        return self._take(self._decoded((token_id,)), may_stop=may_stop)

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Takes many tokens at once, where there are no stop strings."""
        if self._matchers or self._finished:
            raise RuntimeError("push_all knows no stop strings, and nothing comes after finish")
        return self._release(self._decoded(token_ids))

    def finish(self) -> str:
        """Releases what was held back; half a character becomes U+FFFD.

        Looks for no stop string: the generation has ended for another reason, at a token already counted.
        """
        if self._finished or self.matched_stop is not None:
            return ""
        self._finished = True
        return self._release(self._held + self._decoder.decode(b"", final=True))

    def _decoded(self, token_ids: Iterable[int]) -> str:
        """The whole characters that these tokens complete, without a leading space of the encoder's own."""
        data = b"".join(map(self._token_bytes, token_ids))
        if self._strip_pending and data:
            data = data.removeprefix(b" ")
            self._strip_pending = False
        return self._decoder.decode(data)

    def _take(self, new: str, *, may_stop: bool) -> TextPiece:
        if not self._held and self._beginnings.isdisjoint(new):  # the usual case: no stop string is near
            return TextPiece(self._release(new), stopped=False)
        window = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            completed = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if completed and may_stop:
                self.matched_stop = max(completed, key=len)
                self._held = ""
                kept_len = end if self.keeps_stop else end - len(self.matched_stop)
                return TextPiece(self._release(window[:kept_len]), stopped=True)
        held_len = max((matcher.matched_len for matcher in self._matchers), default=0)
        cut = len(window) - held_len
        self._held = window[cut:]
        return TextPiece(self._release(window[:cut]), stopped=False)

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text


def answer_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> TextStream:
    """The text of an answer: what it adds to the prompt's. Under a constraint it is a text by itself."""
    continues = params.constraint is None and bool(tokenizer.token_bytes(prompt_ids[-1]))
    return TextStream(tokenizer, params.stop, continues=continues, **options)
