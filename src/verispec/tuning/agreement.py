"""How often a view's next token is the full model's, on the model's own text.

One teacher-forced pass per view: each row reads the full model's K/V of the positions before it, as a draft does, and
puts its own into a scratch slot of its own. So the full model's K/V is never overwritten, and one text serves any
number of views.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import FULL_VIEW, Float32, LogprobsWanted, Pass, View, Wanted
from verispec.errors import InputError
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, Sampler
from verispec.tuning.own_text import SEED, Line, Runner, first_free_slot
from verispec.types import SamplingParams

_SAMPLED = SamplingParams(temperature=1.0)


class Agreement(NamedTuple):
    """The share of draws that are the full model's: greedily, and at temperature 1 with the same noise for both."""

    greedy: float
    sampled: float


class _Drawn(NamedTuple):
    """At each row: the most likely token and its log-probability, and the draw at temperature 1."""

    greedy: NDArray[np.int64]
    logprobs: Float32
    sampled: NDArray[np.int64]


class _Chunk(NamedTuple):
    """A pass, and what the full model says at its rows."""

    pass_: Pass
    drawn: _Drawn


class Evaluator:
    """Scores views on lines whose K/V lies in the backend.

    `agreement` is what drafts of that view would meet with. But it counts, and so on a few hundred tokens it sees no
    small difference; `soft_agreement` does, and sets that are searched for with it agree more on other text.
    """

    def __init__(self, runner: Runner, lines: Sequence[Line]) -> None:
        self._runner = runner
        self._known: dict[View, float] = {}
        places = [(line, position) for line in lines for position in range(line.prompt_len, len(line.token_ids))]
        self.num_tokens = len(places)
        scratch, size = first_free_slot(lines), runner.max_rows
        self._chunks = [self._chunk(places[i : i + size], scratch) for i in range(0, len(places), size)]

    def agreement(self, view: View) -> Agreement:
        counts = np.zeros(2, np.int64)
        for chunk in self._chunks:
            drawn = self._draw(chunk.pass_, view)
            counts += (drawn.greedy == chunk.drawn.greedy).sum(), (drawn.sampled == chunk.drawn.sampled).sum()
        return Agreement(*(int(count) / self.num_tokens for count in counts))

    def soft_agreement(self, view: View) -> float:
        """How much of the full model's probability of its best token the view leaves it, at most 1; the mean of that.

        Each view is computed once.
        """
        if view not in self._known:
            left = np.concatenate([self._probability_left(chunk, view) for chunk in self._chunks])
            self._known[view] = float(left.mean())
        return self._known[view]

    def _probability_left(self, chunk: _Chunk, view: View) -> NDArray[np.float64]:
        wanted = chunk.pass_.wanted.draw
        assert wanted is not None
        given = Wanted(logprobs=LogprobsWanted(wanted.rows, chunk.drawn.greedy.astype(np.int32)))
        logprobs = self._runner.backend.submit(replace(chunk.pass_, wanted=given, view=view)).result().logprobs
        assert logprobs is not None
        change = logprobs.astype(np.float64) - chunk.drawn.logprobs
        return np.exp(np.minimum(np.nan_to_num(change, nan=-np.inf, neginf=-np.inf), 0.0))

    def _draw(self, pass_: Pass, view: View) -> _Drawn:
        result = self._runner.backend.submit(replace(pass_, view=view)).result()
        assert result.draw is not None
        assert result.top_k is not None
        return _Drawn(result.top_k.token_ids[:, 0], result.top_k.values[:, 0], result.draw.token_ids)

    def _chunk(self, places: Sequence[tuple[Line, int]], scratch: int) -> _Chunk:
        """Rows that read `table[:position]` and themselves, and draw the token behind, sampled and greedily."""
        builder = PassBuilder()
        for i, (line, position) in enumerate(places):
            self._runner.backend.bind(line.seq_row, Sampler(_SAMPLED, SampleKey(SEED, line.seq_row)))
            row = builder.add_node(line.seq_row, position, line.token_ids[position], (scratch + i,))
            builder.draw.rows.append(row)
            builder.want_top(row, 1)
        pass_ = self._runner.build(builder)
        drawn = self._draw(pass_, FULL_VIEW)
        if (drawn.sampled == NO_TOKEN).any():
            raise InputError("the model gives NaN for its own text; it cannot be tuned")
        return _Chunk(pass_, drawn)
