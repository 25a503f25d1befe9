"""Rounds of a burst that probabilities judge, by passes of the host's: `rounds.py` asks here for what is more than rule
`match`. Drafts are drawn with noise of their own, one stream for each parent; what they were drawn from is kept for the
round; and what the rule of `sampling/recursive.py` commits takes the place of the target's own draws, along the path.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import Burst, DistributionHandle, DistributionWanted, Noise, Pass, PassResult
from verispec.backends.resident import Fed, Resident
from verispec.sampling.noise import NODE_STRIDE, Domain, stream
from verispec.sampling.recursive import Distributions, RoundKeys, judge_recursive
from verispec.types import NO_PARENT, Draft, Proposal

Ints = NDArray[np.int64]


def draft_noise(t: Ints, nodes: Ints) -> Noise:
    """Of what is drafted behind these nodes, in rounds that begin behind positions `t`."""
    return Noise(t + 1, stream(Domain.DRAFT) + NODE_STRIDE * (1 + nodes))


class Gathered:
    """Rows of several handles, side by side."""

    def __init__(self, num_drafts: int, width: int) -> None:
        self._rows = np.full((num_drafts, width), -1, np.int64)
        self._offsets: dict[int, int] = {}
        self._values: list[NDArray[np.float32]] = []
        self._num_rows = 0

    def add(self, draft: int, row: Proposal) -> None:
        """The distribution after a node of a draft."""
        key = id(row.handle)
        if key not in self._offsets:
            self._offsets[key] = self._num_rows
            self._values.append(np.asarray(row.handle.probabilities()))
            self._num_rows += len(self._values[-1])
        self._rows[draft, row.node + 1] = self._offsets[key] + row.row

    def build(self) -> Distributions:
        return Distributions(np.concatenate(self._values), self._rows)


class Offered(NamedTuple):
    """A row of a handle: what the children of a place of a sequence were drawn from."""

    sequence: int
    place: int
    handle: DistributionHandle
    row: int


class Weighed(NamedTuple):
    """The sequences of a burst whose drafts of one round probabilities judge, and where they draw.

    Whoever drafted nothing is not among them: the target's own draw is its next token.
    """

    sequences: list[int]
    places: list[Ints]  # of each: those that are nodes
    at: list[Ints]  # of each: its last token's draw, then its nodes', among all of the pass

    @classmethod
    def of(cls, burst: Burst, token_ids: Ints, at: Ints) -> "Weighed":
        """`token_ids` [S, K] were drafted; draw `at[s, 1 + i]` of the pass is that behind place i."""
        named = [s for part in burst.drafts if part.by_probability for s in part.sequences.tolist()]
        sequences = [s for s in sorted(named) if (token_ids[s] >= 0).any()]
        places = [np.flatnonzero(token_ids[s] >= 0) for s in sequences]
        return cls(sequences, places, [at[s, [0, *(1 + own)]] for s, own in zip(sequences, places, strict=True)])

    def asked(self, pass_: Pass) -> Pass:
        """The pass, which also shows the distributions at their rows, behind those that it shows anyway."""
        if not self.sequences:
            return pass_
        assert pass_.wanted.draw is not None
        rows = [_shown_rows(pass_), pass_.wanted.draw.rows[np.concatenate(self.at)]]
        return replace(pass_, wanted=replace(pass_.wanted, distribution=DistributionWanted(np.concatenate(rows))))

    def judge(
        self, resident: Resident, fed: Fed, drafts: tuple[Ints, Ints], offered: Sequence[Offered], pass_: Pass,
        result: PassResult,
    ) -> Ints:  # fmt: skip
        """Writes what is committed over the draws. Returns how much of each draft may be accepted, [S]; handles end,
        but for one that the pass shows to others.

        `drafts` are tokens and places of parents, [S, K] each; `pass_` is the one that `asked` was given.
        """
        most = np.full(len(drafts[0]), drafts[0].shape[1], np.int64)
        if self.sequences:
            self._judge(resident, fed, drafts, offered, pass_, result, most)
        for one in offered:
            one.handle.release()
        return most

    def _judge(
        self, resident: Resident, fed: Fed, drafts: tuple[Ints, Ints], offered: Sequence[Offered], pass_: Pass,
        result: PassResult, most: Ints,
    ) -> None:  # fmt: skip
        token_ids, parents = drafts
        shown, draw, first = result.distribution, result.draw, len(_shown_rows(pass_))
        assert shown is not None
        assert draw is not None
        width = 1 + max(map(len, self.places))
        target, proposal = (Gathered(len(self.sequences), width) for _ in range(2))
        firsts, drafted = list[int](), list[Draft]()
        for i, (s, places) in enumerate(zip(self.sequences, self.places, strict=True)):
            node_of = {NO_PARENT: NO_PARENT} | {place: node for node, place in enumerate(places.tolist())}
            drafted.append(Draft(
                tuple(token_ids[s, places].tolist()), tuple(node_of[p] for p in parents[s, places].tolist())
            ))  # fmt: skip
            for node in node_of.values():
                target.add(i, Proposal(node, shown, first + 1 + node))
            for one in offered:
                if one.sequence == s:
                    proposal.add(i, Proposal(node_of[one.place], one.handle, one.row))
            firsts.append(first)
            first += len(node_of)
        seq_rows = fed.seq_rows[self.sequences]
        keys = RoundKeys(*resident.sample_keys(seq_rows), fed.t[self.sequences] + 1)
        verdicts = judge_recursive(drafted, target.build(), proposal.build(), keys)
        for i, (draft, verdict) in enumerate(zip(drafted, verdicts, strict=True)):
            nodes = 1 + np.array([NO_PARENT, *verdict.path])
            tokens = np.array([*(draft.token_ids[node] for node in verdict.path), verdict.bonus_id])
            at = self.at[i][nodes]
            draw.token_ids[at] = tokens
            draw.logprobs[at] = shown.logprobs(firsts[i] + nodes, np.maximum(0, tokens))
            most[self.sequences[i]] = len(verdict.path)
        if pass_.wanted.distribution is None:
            shown.release()


def _shown_rows(pass_: Pass) -> NDArray[np.int32]:
    shown = pass_.wanted.distribution
    return np.zeros(0, np.int32) if shown is None else shown.rows
