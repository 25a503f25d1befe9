"""Bursts whose rounds begin with drafts, on the device alone: what is sent for them, and what comes back.

A round is a pass for each token of chains, and for each level of trees, and one that verifies them all; `chains.cu` and
`trees.cu` have what happens between passes. In passes that verify, every sequence has a row for its last token and one
for each token that it may draft.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.cuda.arrange import MAX_HEAD_ROWS, ROW_SIZES, at_least
from verispec.backends.cuda.graphs import Draw, GraphKey
from verispec.backends.cuda.steps import MAX_OFFERED, MAX_WEIGHED_VOCAB, Parcel, Stage, StepSizes
from verispec.backends.protocol import FROM_STATE, Burst, BurstResult, Drafting, Pass, Rows
from verispec.backends.rounds import no_rounds
from verispec.backends.tree_rounds import Drafts
from verispec.kv import DUMP_SLOT

Int32 = NDArray[np.int32]
_WEIGHED_SIZES = (8, 32, 128, 512)  # each is memory of its own: few, and each at most four times the one before


class _Draft(NamedTuple):
    """A pass that drafts, as it is sent: the place in the chains, or the level; where chains end, and whose they are;
    and of a level what `chains.cuh` says of it."""

    token: int
    least_logprob: int  # bits
    num_sequences: int
    first: int  # of them in the list of all
    children: int = 0
    width: int = 1
    before: int = 0
    place: int = 0
    keep: int = 0
    is_beam: int = 0
    by_probability: int = 0

    @property
    def head_rows(self) -> int:
        """Places for the rows that draw, or whose children are wanted."""
        return at_least(ROW_SIZES, self.num_sequences * self.width)


def _by_passes(burst: Burst) -> list[Drafting]:
    return [part for part in burst.drafts if not part.looks_up]


def _passes(burst: Burst) -> list[tuple[Drafting, _Draft]]:
    """Those of a round that draft, one after the other."""
    found, end = list[tuple[Drafting, _Draft]](), 0
    for part in _by_passes(burst):
        least, count, tree = int(np.float32(part.least_logprob).view(np.int32)), len(part.sequences), part.tree
        width = before = place = 0
        for token in range(int(part.lengths.max()) if tree is None else len(tree.keep)):
            pass_ = _Draft(token, least, count, end)
            pass_ = pass_._replace(by_probability=int(part.by_probability))
            if tree is not None:
                keep = tree.keep[token]
                pass_ = pass_._replace(
                    children=tree.branching[token], width=width or 1, before=before, place=place, keep=keep,
                    is_beam=int(tree.is_beam),
                )  # fmt: skip
                width, before, place = keep, place, place + keep
            found.append((part, pass_))
        end += count
    return found


class Chains(NamedTuple):
    """A burst's sequences as passes that verify have them: row `base` of each, and whose every row is."""

    burst: Burst
    lengths: Int32  # [S], the most that each drafts
    is_tree: NDArray[np.bool_]  # [S]
    base: Int32  # [S]
    owners: Int32  # [R]

    @classmethod
    def of(cls, burst: Burst) -> Chains:
        """Those of a burst with drafts."""
        lengths = burst.draft_lens
        base = np.cumsum(1 + lengths) - 1 - lengths
        is_tree = Drafts.none(len(lengths), 0, burst.drafts).is_tree
        owners = np.repeat(np.arange(len(lengths), dtype=np.int32), 1 + lengths)
        return cls(burst, lengths, is_tree, base.astype(np.int32), owners)

    @property
    def places(self) -> Int32:
        """[R], which of its sequence's rows each is."""
        return (np.arange(len(self.owners)) - self.base[self.owners]).astype(np.int32)

    @property
    def reach(self) -> int:
        """How far behind where it is now any sequence can come."""
        trees = [len(part.tree.keep) for part in self.burst.drafts if part.tree is not None]
        deepest = max(int(self.lengths[~self.is_tree].max(initial=0)), *trees, 0)
        return (1 + self.burst.num_rounds) * (1 + deepest)

    @property
    def looks_up(self) -> bool:
        """Whether some chains are looked up."""
        return any(part.looks_up for part in self.burst.drafts)

    @property
    def weighed(self) -> int:
        """Rows whose distributions are to be kept, for drafts that probabilities judge: so many, or a few more."""
        return at_least(_WEIGHED_SIZES, len(self.owners)) if self.is_weighed else 0

    @property
    def is_weighed(self) -> bool:
        """Whether probabilities judge some drafts."""
        return any(part.by_probability for part in self.burst.drafts)

    def are_all(self, pass_: Pass) -> bool:
        """Whether the pass has no rows but theirs, in their order: then the device can name those of the first round,
        too."""
        assert pass_.wanted.draw is not None
        count = len(self.owners)
        return bool(
            len(pass_.wanted.draw.rows) == count
            and (self.burst.rows == self.base).all()
            and (pass_.rows.slots[count:] == DUMP_SLOT).all()
        )

    def fit(self, pass_: Pass, vocab_size: int) -> bool:
        """Whether the device can do it alone: each row draws, with the target's noise, and all fit the head. It can
        name the first rows of all sequences, or of none."""
        draw = pass_.wanted.draw
        if draw is None or draw.noise is not None or len(self.owners) > MAX_HEAD_ROWS:
            return False
        if self.is_weighed and (len(self.owners) > _WEIGHED_SIZES[-1] or vocab_size > MAX_WEIGHED_VOCAB):
            return False
        if any(p.head_rows > MAX_HEAD_ROWS or p.children * p.head_rows > MAX_OFFERED for _, p in _passes(self.burst)):
            return False
        if (pass_.rows.token_ids[self.burst.rows] == FROM_STATE).any() and not self.are_all(pass_):
            return False
        first = np.searchsorted(draw.rows, self.burst.rows)
        at = first[self.owners] + self.places
        expected = self.burst.rows[self.owners] + self.places
        return int(at.max()) < len(draw.rows) and bool((draw.rows[at] == expected).all())

    def drafting(self, spans: int, draw: Draw) -> list[GraphKey]:
        """The passes that draft in a round, one after the other."""
        found = []
        for part, pass_ in _passes(self.burst):
            stage = Stage.DRAFT if part.tree is None else Stage.LEVEL if pass_.token else Stage.ROOT
            rows = pass_.head_rows * (1 if pass_.token else part.first_rows)
            found.append(GraphKey(
                part.store, part.view, StepSizes(rows, pass_.head_rows), rows, spans, draw, drafts=part.only_drafts,
                stage=stage, children=pass_.children, weighed=self.weighed if part.by_probability else 0,
            ))  # fmt: skip
        return found

    def verifying(self, pass_: Pass, spans: int, draw: Draw) -> GraphKey:
        """The pass that verifies in a further round."""
        rows = at_least(ROW_SIZES, len(self.owners))
        sizes = StepSizes(rows, rows)
        return GraphKey(
            pass_.store, pass_.view, sizes, rows, spans, draw, stage=Stage.VERIFY, looks_up=self.looks_up,
            weighed=self.weighed,
        )  # fmt: skip

    def put(self, parcel: Parcel, rows: Rows, drawn: Int32, extra_at: int) -> int:
        """What the kernels read. Returns the width of what they write: tokens, and the rest from `extra_at` on."""
        burst, at = self.burst, self.burst.rows
        first = np.searchsorted(drawn, at)
        tokens, looks_up, by_probability = np.maximum(rows.token_ids[at], -1), *np.zeros((2, len(at)), np.int32)
        for part in burst.drafts:
            looks_up[part.sequences], by_probability[part.sequences] = part.looks_up, part.by_probability
        parcel.put(
            "chains", rows.seq_rows[at], burst.rounds, tokens, rows.positions[at], self.lengths, first, self.base,
            self.is_tree.astype(np.int32), looks_up, by_probability,
        )  # fmt: skip
        parcel.set("chains", len(at))
        parcel.put("owners", self.owners)
        parcel.set("owners", len(self.owners))
        passes = [pass_ for _, pass_ in _passes(burst)]
        parcel.put("passes", np.array(passes, np.int32).T)
        parcel.set("passes", len(passes))
        parcel.put("drafters", *(part.sequences for part in _by_passes(burst)))
        parcel.set("extra_at", extra_at)
        return extra_at + len(self.owners) + len(at)

    def result(self, words: Int32, extra_at: int) -> BurstResult:
        """From tokens and log-probabilities of all rounds [1 + rounds, 2, width]; behind the tokens are drafts and how
        many of each were accepted, behind the others the places of parents."""
        found, num_rows = no_rounds(self.burst, len(words)), len(self.owners)
        accepted = found.accepted
        accepted[:] = words[:, 0, extra_at + num_rows :][:, : len(self.base)].T
        places = self.places
        drafted = np.flatnonzero(places)
        found.drafts[self.owners[drafted], :, places[drafted] - 1] = words[:, 0, extra_at + drafted].T
        found.parents[self.owners[drafted], :, places[drafted] - 1] = words[:, 1, extra_at + drafted].T
        width = 1 + found.drafts.shape[2]
        end = (len(words) - 1) * width
        token_ids, logprobs = found.token_ids[:, :end], found.logprobs[:, :end]
        num_drawn = np.zeros(len(self.base), np.int64)
        for i, ((tokens, values), count) in enumerate(zip(words[1:], accepted.T[1:], strict=True), 1):
            order = np.tile(np.arange(width), (len(self.base), 1))  # rows of each sequence along its path
            drafts = Drafts(found.drafts[:, i], found.parents[:, i], self.is_tree, [])
            for s in np.flatnonzero(self.is_tree & (count > 0)).tolist():
                path = drafts.accepted(s, tokens[self.base[s] :])
                order[s, 1 : 1 + len(path)] = 1 + np.array(path)
            sequence, column = np.nonzero(np.arange(width) <= count[:, None])
            at, row = num_drawn[sequence] + column, self.base[sequence] + order[sequence, column]
            token_ids[sequence, at] = tokens[row]
            logprobs[sequence, at] = values[row].view(np.float32)
            num_drawn += count + 1
        return found._replace(token_ids=token_ids, logprobs=logprobs)
