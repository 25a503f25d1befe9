"""What followed the last few tokens before in the same text, looked up by the backend itself.

Every round of a burst looks up anew (`rounds.looked_up`), without the host and without a pass. Whether anything will be
found nobody knows beforehand; so what is promised is what came true in the sequence's rounds so far, those that found
nothing included, and what would have come true in those that did not look up: the answer tells, and nothing has to be
tried for it. At its beginning it is believed to be like the last ones. That is never nothing: where rows cost little,
going on in bursts is worth more than a plain round with the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from verispec.backends.pass_builder import LOOK_UP
from verispec.backends.rounds import LOOKED_UP
from verispec.spec.drafter import Curve, Level, NotYet, Refusal
from verispec.spec.rate import Rate
from verispec.spec.texts import characters
from verispec.spec.turn import Recipe, SequenceView, Turn
from verispec.types import NO_DRAFT, Draft

NO_LOOK_UP = "this backend does not look drafts up by itself; drafter suffix does it on the host"
_NEEDS_HOST = Refusal("what the request wants to know needs the host after each round; drafter suffix drafts there")
_NOT_COMPUTED = NotYet("the prompt is not computed yet")
# Believed before anything was looked up: how often anything is found, how often a round's first token comes true, and
# each behind an accepted one. As if in so many tries, that fade with each answer.
_PRIORS = (0.35, 0.15, 0.7)
_TRIES, _ANSWERS_MEMORY = 64.0, 0.9
_WEIGHT, _MEMORY = 2.0, 0.9  # of a sequence's own running rates
_MOST_READ = 16  # tokens of an answer that are read at once: the newest
_STEPS = 32  # of rates, in keys: sequences that are nearly alike draft alike


@dataclass(slots=True)
class _Counts:
    """Rounds of one answer: those that found something, those whose first token came true, and tokens behind it."""

    rounds: int = 0
    found: int = 0
    first: int = 0
    later: int = 0
    later_tried: int = 0


class _Answers:
    """What those that have ended were like."""

    def __init__(self) -> None:
        self.found, self.first, self.later = (Rate.fading(prior, _TRIES, _ANSWERS_MEMORY) for prior in _PRIORS)

    def learn(self, counts: _Counts) -> None:
        if counts.rounds:
            self.found.observe(counts.found, counts.rounds)
            self.first.observe(counts.first, counts.rounds)
        if counts.later_tried:
            self.later.observe(counts.later, counts.later_tried)

    @property
    def priors(self) -> list[float]:
        """Of the next one: no more than is believed anyway, because reading it soon tells that it quotes, and most do
        not where some do."""
        return [
            min(prior, rate.value) for prior, rate in zip(_PRIORS, (self.found, self.first, self.later), strict=True)
        ]


class _Seen:
    """How far a sequence's text was read, the text, if any answer was, and what came true in it."""

    def __init__(self, num_tokens: int, answers: _Answers) -> None:
        self.num_tokens, self.text, self.counts, self.answers = num_tokens, "", _Counts(), answers
        self.found, self.first, self.later = (Rate(prior, _WEIGHT, _MEMORY) for prior in answers.priors)

    def learn(self, num_found: int, num_accepted: int, num_nodes: int) -> None:
        """A chain that was shorter than it might have been missed the next token."""
        counts = self.counts
        counts.rounds += 1
        counts.found += num_found > 0
        counts.first += num_accepted > 0
        self.found.observe(num_found > 0)
        self.first.observe(num_accepted > 0)
        if num_accepted:
            tried = min(num_nodes, num_accepted + 1) - 1
            counts.later += num_accepted - 1
            counts.later_tried += tried
            self.later.observe(num_accepted - 1, tried)

    def read(self, token_ids: Sequence[int], max_draft: int) -> None:
        """Learn from rounds that others might have been."""
        start = max(self.num_tokens, len(token_ids) - _MOST_READ)
        self.text += characters(token_ids[len(self.text) :])
        self.num_tokens = len(token_ids)
        while start < len(self.text):
            followed = self.text[start : start + max_draft]
            found = found_behind(self.text, start)
            num_accepted = sum(takewhile(bool, map(str.__eq__, found, followed)))
            self.learn(len(found), num_accepted, len(followed))
            start += num_accepted + 1


def found_behind(text: str, end: int) -> str:
    """What `rounds.looked_up` finds behind so many tokens."""
    found = ""
    for count in sorted(LOOKED_UP):
        at = text.rfind(text[end - count : end], 0, end - 1) if count < end else -1
        if at < 0:
            break
        found = text[at + count : end]
    return found


class _Key(NamedTuple):
    """Believed of a look-up, its first token and later ones, in steps."""

    found: int
    first: int
    later: int


class LookupDrafter:
    """Chains of up to `max_draft` tokens, for sequences that need nothing of the host."""

    has_probabilities = False
    has_trees = False
    is_companion = False
    needs_cheap_rows = True
    version = 0  # a curve is its key's alone

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._seen: dict[int, _Seen] = {}
        self._answers = _Answers(), _Answers()  # greedily and sampled

    def state(self, sequence: SequenceView) -> _Key | Refusal:
        if sequence.needs_host or sequence.uses_probabilities:
            return _NEEDS_HOST
        tokens = sequence.token_ids
        if sequence.computed_len + 1 != len(tokens):
            return _NOT_COMPUTED
        seen = self._seen.get(sequence.sequence_id)
        if seen is None:  # what it has answered by now is read, too
            answers = self._answers[sequence.params.temperature > 0]
            seen = self._seen[sequence.sequence_id] = _Seen(sequence.prompt_len, answers)
        if seen.num_tokens < len(tokens):
            seen.read(tokens, self._max_draft)
        return _Key(*(max(1, round(_STEPS * rate.value)) for rate in (seen.found, seen.first, seen.later)))

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        assert isinstance(key, _Key)
        share, first, later = (max(key.found, key.first) / _STEPS, key.first / _STEPS, key.later / _STEPS)
        levels = tuple(Level(1, first * later**depth, share) for depth in range(self._max_draft))
        return (Curve(levels, by_backend=True),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Recipe]:
        return [Recipe(turn.choice.num_nodes, LOOK_UP) if turn.is_resident else NO_DRAFT for turn in turns]

    def observe(self, turn: Turn) -> None:
        """One round of a burst."""
        seen = self._seen.get(turn.sequence.sequence_id)
        if seen is not None and turn.verdict is not None and turn.choice.num_nodes:
            seen.learn(len(turn.draft), len(turn.verdict.path), turn.choice.num_nodes)
            seen.num_tokens = len(turn.sequence.token_ids)

    def forget(self, sequence: SequenceView) -> None:
        """What came true in it is believed of the next ones."""
        seen = self._seen.pop(sequence.sequence_id, None)
        if seen is not None:
            seen.answers.learn(seen.counts)
