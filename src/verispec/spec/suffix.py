"""Suffix matching: what followed the last tokens the times they were written before.

It looks in the sequence's own text, in what its client predicts, and in what requests of the same salt were answered
lately. The longest match wins; of two that are as long, the one in its own text. Text that quotes, repeats or edits is
drafted well; other text costs a few look-ups. How often such a match was right, by its length and by how far its
occurrences agree, is the drafter's confidence, and what the policy chooses the length of a draft by.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verispec.arguments import check_int
from verispec.config import DEFAULTS, MAX_SIZE
from verispec.spec.drafter import Curve, Level, Refusal
from verispec.spec.rate import Rate
from verispec.spec.texts import Match, Texts
from verispec.spec.tree import TreeShape
from verispec.spec.turn import SequenceView, Turn
from verispec.types import NO_DRAFT, NO_PARENT, Draft

_NOTHING = Refusal("the last token occurred nowhere before")
_LEAD_LEN = 16  # tokens of the prompt that stand before an answer, so that its first token can be matched
_MOST_PREDICTED = 2**15  # tokens of a prediction that are looked at
_PRIOR_WEIGHT, _MEMORY = 4.0, 0.98  # of the running acceptance
_WIDTH = 4  # next tokens that are tried where occurrences disagree
_ONE, _ALL, _MOST, _FEW = range(4)  # votes for the most frequent next token: of the occurrences that there are


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """The most nodes of one draft, the most levels of a tree, and the most tokens of answers that are kept, of all
    salts together. With `shares_history` requests draft from the answers of every salt."""

    max_draft: int = 32
    max_depth: int = 16
    history_len: int = DEFAULTS.history_len
    shares_history: bool = DEFAULTS.shares_history

    def __post_init__(self) -> None:
        for name in ("max_draft", "max_depth", "history_len"):
            check_int(name, getattr(self, name), 0, MAX_SIZE)


class _Key(NamedTuple):
    """What a match is like: how long, how far its occurrences agree, and where; and the tree that is asked for."""

    level: int
    votes: int
    is_own: bool
    tree: TreeShape | None


@dataclass(slots=True)
class _Own:
    """The text of a sequence so far, behind what its client predicts, and the match of its end."""

    texts: Texts
    num_tokens: int = 0
    match: Match | None = None
    key: _Key | Refusal = _NOTHING


class History:
    """Answers by salt. When the newer half of the tokens is full, the older half goes."""

    def __init__(self, num_tokens: int) -> None:
        self._half = num_tokens // 2
        self._newer: dict[str, Texts] = {}
        self._older: dict[str, Texts] = {}
        self._num_newer = 0

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep a text, or the end of it that fits."""
        if not self._half:
            return
        kept = token_ids[max(0, len(token_ids) + 1 - self._half) :]
        if self._num_newer + len(kept) + 1 > self._half:
            self._older, self._newer, self._num_newer = self._newer, {}, 0
        self._num_newer += len(kept) + 1
        texts = self._newer.setdefault(salt, Texts())
        texts.extend(kept)
        texts.close()

    def find(self, salt: str, token_ids: Sequence[int], *, above: int = -1) -> Match | None:
        """The longest match of the end of a text, if it is above a level; of two that are as long, the newer."""
        best = None
        for half in (self._newer, self._older):
            texts = half.get(salt)
            found = texts.find(token_ids, above=above) if texts is not None else None
            if found is not None:
                best, above = found, found.level
        return best


class SuffixDrafter:
    """The text of every live sequence, grown when it is looked at, and that of earlier answers."""

    has_probabilities = False
    has_trees = True
    is_companion = False
    needs_cheap_rows = True

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self._config = config or SuffixConfig()
        self._any_tree = TreeShape.beam(_WIDTH, min(self._config.max_depth, self._config.max_draft))
        self._own: dict[int, _Own] = {}
        self._history = History(self._config.history_len)
        self._rates: dict[tuple[int, int, bool], Rate] = {}
        self.version = 0

    def state(self, sequence: SequenceView) -> _Key | Refusal:
        """What the longest match is like."""
        return self._look_up(sequence).key

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        """Nodes in the order in which a draft grows: along the most frequent path, and where occurrences disagree
        along another."""
        assert isinstance(key, _Key)
        rate, most = self._rate(key).value, self._config.max_draft
        chances = [rate**depth for depth in range(1, most + 1)]
        if key.votes > _ALL:
            chances = sorted(chances + [_other(rate) * rate**depth for depth in range(most)], reverse=True)
        if key.tree is not None:
            most = min(most, key.tree.num_nodes)
        return (Curve(tuple(Level(1, chance) for chance in chances[:most])),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [self._draft(turn.sequence, turn.choice.num_nodes) for turn in turns]

    def _draft(self, sequence: SequenceView, num_nodes: int) -> Draft:
        own = self._look_up(sequence)
        if own.match is None or isinstance(own.key, Refusal):
            return NO_DRAFT
        shape = own.key.tree or self._any_tree
        if own.key.votes <= _ALL or shape.is_chain:
            shape = TreeShape.chain(num_nodes)
            if not sequence.is_traced:
                return Draft.chain(own.match.follow(num_nodes))
        return grown(own.match, num_nodes, shape, self._rate(own.key).value)

    def observe(self, turn: Turn) -> None:
        """Move the acceptance of such matches: that of the most frequent path."""
        own = self._own.get(turn.sequence.sequence_id)
        if own is None or isinstance(own.key, Refusal) or turn.verdict is None or not isinstance(turn.draft, Draft):
            return
        num_nodes, num_accepted = len(turn.draft), len(turn.verdict.path)
        if not turn.draft.is_chain:
            path = _first_path(turn.draft)
            num_nodes, num_accepted = len(path), sum(map(int.__eq__, path, turn.verdict.path))
        rate = self._rate(own.key)
        before = rate.version
        rate.observe_chain(num_accepted, num_nodes)
        self.version += rate.version - before

    def forget(self, sequence: SequenceView) -> None:
        """The answer becomes history, behind the end of its prompt."""
        if self._own.pop(sequence.sequence_id, None) is not None:
            start = max(0, sequence.prompt_len - _LEAD_LEN)
            self._history.add(self._salt(sequence), sequence.token_ids[start:])

    def _look_up(self, sequence: SequenceView) -> _Own:
        tokens = sequence.token_ids
        own = self._own.get(sequence.sequence_id)
        if own is None:
            own = self._own[sequence.sequence_id] = _Own(Texts())
            for row in reversed(sequence.prediction_ids):  # the newest wins where they disagree: that is the first one
                lead = tokens[max(0, sequence.prompt_len - _LEAD_LEN) : sequence.prompt_len]
                own.texts.extend([*lead, *row[:_MOST_PREDICTED]])
                own.texts.close()
        if own.num_tokens < len(tokens):
            own.texts.extend(tokens[own.num_tokens :])
            own.num_tokens = len(tokens)
            own.match = own.texts.find_end()
            if not (self._config.shares_history and sequence.is_traced):
                above = -1 if own.match is None else own.match.level
                own.match = self._history.find(self._salt(sequence), tokens, above=above) or own.match
            own.key = self._key(own, sequence.speculation.tree)
        return own

    def _key(self, own: _Own, tree: TreeShape | None) -> _Key | Refusal:
        match = own.match
        if match is None:
            return _NOTHING
        is_own = match.text is own.texts.text
        if is_own and len(match.positions) == 1:
            return _Key(match.level, _ONE, True, tree)
        children = match.children((), match.positions)
        if not children:
            return _NOTHING
        if len(children) == 1:
            votes = _ALL if len(match.positions) > 1 else _ONE
        else:
            votes = _MOST if 2 * len(children[0][1]) > len(match.positions) else _FEW
        return _Key(match.level, votes, is_own, tree)

    def _salt(self, sequence: SequenceView) -> str:
        return "" if self._config.shares_history else sequence.salt

    def _rate(self, key: _Key) -> Rate:
        found = self._rates.get(key[:3])
        if found is None:
            # Rather too high: what is not drafted is never learned. A single token is seldom followed by the same one.
            prior = (0.55 + 0.04 * key.level if key.level else 0.35) * (0.8 if key.votes > _ALL else 1.0)
            found = self._rates[key[:3]] = Rate.fading(prior, _PRIOR_WEIGHT, _MEMORY)
        return found


def _other(rate: float) -> float:
    """Believed of all next tokens together but the most frequent, where occurrences disagree."""
    return (1 - rate) / 2


def _first_path(draft: Draft) -> list[int]:
    """The first child of the root, its first child, and so on."""
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else NO_PARENT):
            path.append(node)
    return path


class _Offer(NamedTuple):
    """A node that a tree may grow by: the likeliest comes first, of those as likely the one that was offered first."""

    unlikeliness: float
    number: int
    parent: int
    path: tuple[int, ...]
    share: float
    positions: list[int]


def grown(match: Match, num_nodes: int, shape: TreeShape, rate: float) -> Draft:
    """A tree by best-first growth inside a shape: each node is the likeliest to be accepted of those left.

    `rate` is the acceptance of the most frequent next token; the others have their share of half of the rest.
    """
    nodes: list[_Offer] = []
    offers: list[_Offer] = []
    width = [0] * (shape.depth + 1)

    def offer(parent: int, chance: float, path: tuple[int, ...], positions: list[int]) -> None:
        children = match.children(path, positions)
        num_others = len(positions) - len(children[0][1]) if children else 0
        for rank, (token_id, where) in enumerate(children[: shape.branching[len(path)]]):
            likely = chance * (_other(rate) * len(where) / num_others if rank else rate)
            share = len(where) / len(positions)
            heapq.heappush(offers, _Offer(-likely, len(nodes) + rank, parent, (*path, token_id), share, where))

    offer(NO_PARENT, 1.0, (), match.positions)
    while offers and len(nodes) < num_nodes:
        node = heapq.heappop(offers)
        depth = len(node.path)
        if width[depth - 1] < shape.keep[depth - 1]:
            width[depth - 1] += 1
            nodes.append(node)
            if depth < shape.depth:
                offer(len(nodes) - 1, -node.unlikeliness, node.path, node.positions)
    return Draft(
        tuple(node.path[-1] for node in nodes),
        tuple(node.parent for node in nodes),
        tuple(node.share for node in nodes),
    )
