"""Suffix matching: what followed the last tokens the times they were written before.

It looks in the sequence's own text, in what its client predicts, and in what requests of the same salt were answered
lately. The longest match wins; of two that are as long, the one in its own text. Text that quotes, repeats or edits is
drafted well; other text costs a few look-ups. How often such matches came true (`match_rates.py`) is what it promises,
and what the policy chooses the length of a draft by.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verispec.arguments import check_int
from verispec.backends.rounds import LOOKED_UP
from verispec.config import DEFAULTS, MAX_SIZE
from verispec.spec.drafter import Curve, Level, Refusal
from verispec.spec.match_rates import (
    ALL,
    FEW,
    MOST,
    ONE,
    TRAIL_LEN,
    WIDTH,
    Chances,
    MatchKind,
    MatchRates,
    Trail,
    shares,
)
from verispec.spec.speculation import AUTO
from verispec.spec.texts import LENGTHS, History, Match, Texts
from verispec.spec.tree import TreeShape
from verispec.spec.turn import SequenceView, Turn
from verispec.types import NO_DRAFT, NO_PARENT, Draft

_NOTHING = Refusal("the last token occurred nowhere before")
_LEFT = Refusal("its own text has the longest match, and drafter lookup drafts from that without the host")
_LEAD_LEN = 16  # tokens of the prompt that stand before an answer, so that its first token can be matched
_STEPS = 32  # of chances, in keys: matches that promise nearly the same are drafted alike
_LEAST_CHANCE = 0.01  # of a node that is promised


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """The most nodes of one draft, the most levels of a tree, and the most tokens of answers that are kept, of all
    salts together. With `shares_history` requests draft from the answers of every salt. With `leaves_own_text` matches
    in a sequence's own text are left to the backend, which looks them up by itself, if `auto` may choose that."""

    max_draft: int = 32
    max_depth: int = 16
    history_len: int = DEFAULTS.history_len
    shares_history: bool = DEFAULTS.shares_history
    leaves_own_text: bool = False

    def __post_init__(self) -> None:
        for name in ("max_draft", "max_depth", "history_len"):
            check_int(name, getattr(self, name), 0, MAX_SIZE)


class _Key(NamedTuple):
    """What a match promises, in steps; how many next tokens it has, and the tree that is asked for."""

    first: int
    later: int
    other: int
    num_next: int
    tree: TreeShape | None


class _Look(NamedTuple):
    """A match of the end of a sequence's text: what follows, the most frequent first, and how often that comes true."""

    match: Match
    next_ids: list[int]
    rates: MatchRates


@dataclass(slots=True)
class _Own:
    """The text of a sequence so far, behind what its client predicts, and what was found at the last look."""

    texts: Texts
    num_tokens: int = 0
    look: _Look | None = None
    trail: Trail | None = None
    key: _Key | Refusal = _NOTHING

    def learn(self, came: Sequence[int]) -> None:
        """These tokens were committed since the last look."""
        if self.trail is not None and not self.trail.read(came):
            self.trail = None
        look, self.look = self.look, None
        if look is not None and look.rates.learn(look.next_ids, came[0]) and self.trail is None:
            trail = Trail(look.rates.later, look.match.follow(TRAIL_LEN))
            self.trail = trail if trail.read(came[1:]) else None


class SuffixDrafter:
    """The text of every live sequence, grown when it is looked at, and that of earlier answers."""

    has_probabilities = False
    has_trees = True
    is_companion = False
    needs_cheap_rows = True
    version = 0  # a curve is its key's alone

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self._config = config or SuffixConfig()
        self._any_chain = TreeShape.chain(self._config.max_draft)
        self._any_tree = TreeShape.beam(WIDTH, min(self._config.max_depth, self._config.max_draft))
        self._own: dict[int, _Own] = {}
        self._history = History(self._config.history_len)
        self._rates: dict[MatchKind, MatchRates] = {}

    def state(self, sequence: SequenceView) -> _Key | Refusal:
        """What the longest match promises."""
        return self._look_up(sequence).key

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        """Nodes in the order in which a draft grows: along the most frequent path, and where occurrences disagree
        along the others that its shape has room for."""
        assert isinstance(key, _Key)
        shape = self._shape(key)
        if not shape.depth:
            return ()
        first, later, other = (steps / _STEPS for steps in key[:3])
        others = shares(key.num_next - 1)[: min(shape.branching[0], shape.keep[0]) - 1]
        begun = [first, *((1 - first) * other * share for share in others)]
        chances = sorted([chance * later**depth for chance in begun for depth in range(shape.depth)], reverse=True)
        most = min(self._config.max_draft, shape.num_nodes)
        return (Curve(tuple(Level(1, chance) for chance in chances[:most] if chance >= _LEAST_CHANCE)),)

    def _shape(self, key: _Key) -> TreeShape:
        """What drafts grow inside: trees no deeper than the backend can follow them."""
        tree = key.tree
        if tree is None:
            return self._any_tree if key.num_next > 1 else self._any_chain
        return tree if tree.is_chain else tree.within(tree.num_nodes, self._config.max_depth)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [self._draft(turn.sequence, turn.choice.num_nodes) for turn in turns]

    def _draft(self, sequence: SequenceView, num_nodes: int) -> Draft:
        own = self._look_up(sequence)
        if own.look is None or isinstance(own.key, Refusal):
            return NO_DRAFT
        shape = self._shape(own.key)
        if own.key.num_next == 1 or shape.is_chain:
            num_nodes = min(num_nodes, shape.depth)
            if not sequence.is_traced:
                return Draft.chain(own.look.match.follow(num_nodes))
            shape = TreeShape.chain(num_nodes)
        return grown(own.look.match, num_nodes, shape, own.look.rates.chances)

    def observe(self, turn: Turn) -> None:
        """Nothing: the next look reads what became of it in the committed text, as where nothing was drafted."""

    def forget(self, sequence: SequenceView) -> None:
        """The answer becomes history, behind the end of its prompt, whoever drafted it."""
        tokens = sequence.token_ids
        own = self._own.pop(sequence.sequence_id, None)
        if own is not None and own.num_tokens < len(tokens):
            own.learn(tokens[own.num_tokens :])
        if self._config.history_len and len(tokens) > sequence.prompt_len:
            self._history.add(self._salt(sequence), tokens[max(0, sequence.prompt_len - _LEAD_LEN) :])

    def _look_up(self, sequence: SequenceView) -> _Own:
        tokens = sequence.token_ids
        own = self._own.get(sequence.sequence_id)
        if own is None:
            own = self._own[sequence.sequence_id] = _Own(Texts())
            for row in reversed(sequence.prediction_ids):  # the newest wins where they disagree: that is the first one
                lead = tokens[max(0, sequence.prompt_len - _LEAD_LEN) : sequence.prompt_len]
                own.texts.extend([*lead, *row])
                own.texts.close()
        if own.num_tokens < len(tokens):
            came = tokens[own.num_tokens :]
            own.learn(came)
            own.texts.extend(came)
            own.num_tokens = len(tokens)
            own.look = look = self._look(own.texts, sequence)
            own.key = _NOTHING if look is None else _key(look, sequence.speculation.tree)
            if look is not None and look.match.text is own.texts.text and self._leaves(look.match, sequence):
                own.key = _LEFT
        return own

    def _leaves(self, match: Match, sequence: SequenceView) -> bool:
        """Whether the backend finds such a match in the sequence's own text by itself, and can draft from it. What a
        client predicts it does not see, trees it does not make, and where each round needs the host it drafts
        nothing."""
        speculation = sequence.speculation
        if not self._config.leaves_own_text or speculation.method != AUTO or speculation.tree is not None:
            return False
        is_beyond_it = sequence.needs_host or sequence.uses_probabilities or bool(sequence.prediction_ids)
        return LENGTHS[match.level] >= min(LOOKED_UP) and not is_beyond_it

    def _look(self, texts: Texts, sequence: SequenceView) -> _Look | None:
        match = texts.find_end()
        if not (self._config.shares_history and sequence.is_traced):
            above = -1 if match is None else match.level
            match = self._history.find(self._salt(sequence), sequence.token_ids, above=above) or match
        if match is None:
            return None
        children, num_occurrences = match.children((), match.positions), len(match.positions)
        if not children:
            return None
        if len(children) == 1:
            votes = ALL if num_occurrences > 1 else ONE
        else:
            votes = MOST if 2 * len(children[0][1]) > num_occurrences else FEW
        is_own, samples = match.text is texts.text, sequence.params.temperature > 0
        kind = MatchKind(LENGTHS[match.level], votes, is_own, samples)
        rates = self._rates.get(kind)
        if rates is None:
            rates = self._rates[kind] = MatchRates.believed(kind)
        return _Look(match, [token_id for token_id, _ in children], rates)

    def _salt(self, sequence: SequenceView) -> str:
        return "" if self._config.shares_history else sequence.salt


def _key(look: _Look, tree: TreeShape | None) -> _Key:
    rates, num_next = look.rates, min(WIDTH, len(look.next_ids))
    other = round(_STEPS * rates.other.value) if num_next > 1 else 0
    return _Key(round(_STEPS * rates.first.value), round(_STEPS * rates.later.value), other, num_next, tree)


class _Offer(NamedTuple):
    """A node that a tree may grow by: the likeliest comes first, of those as likely the one that was offered first."""

    unlikeliness: float
    number: int
    parent: int
    path: tuple[int, ...]
    share: float
    positions: list[int]


def grown(match: Match, num_nodes: int, shape: TreeShape, chances: Chances) -> Draft:
    """A tree by best-first growth inside a shape: each node is the likeliest to be accepted of those left.

    Behind an accepted node, too, the others have the same part of what the most frequent next token leaves them.
    """
    nodes: list[_Offer] = []
    offers: list[_Offer] = []
    width = [0] * (shape.depth + 1)

    def offer(parent: int, chance: float, path: tuple[int, ...], positions: list[int]) -> None:
        children = match.children(path, positions)[:WIDTH]
        best = chances.later if path else chances.first
        likely = [best, *((1 - best) * chances.other * share for share in shares(len(children) - 1))]
        for rank, (token_id, where) in enumerate(children[: shape.branching[len(path)]]):
            share = len(where) / len(positions)
            node = _Offer(-chance * likely[rank], len(nodes) + rank, parent, (*path, token_id), share, where)
            heapq.heappush(offers, node)

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
