"""How often a view's next token is the full model's, on the model's own text.

One teacher-forced pass per view: each row reads the full model's K/V of the positions before it, as a draft does, and
puts its own into a scratch slot of its own. So the full model's K/V is never overwritten, and one text serves any
number of views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import (
    FULL_VIEW,
    DrawResult,
    DrawWanted,
    LogprobsWanted,
    Rows,
    RowsBuilder,
    View,
    Wanted,
)
from verispec.errors import InputError
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, SamplingRowsBuilder
from verispec.tuning.own_text import NO_HISTORY, SEED, Line, first_free_slot
from verispec.tuning.passes import Runner
from verispec.types import SamplingParams

_GREEDY, _SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


class Agreement(NamedTuple):
    """The share of draws that are the full model's: greedily, and at temperature 1 with the same noise for both."""

    greedy: float
    sampled: float


class _Chunk(NamedTuple):
    """Rows of one pass, and what the full model draws at them: greedily, then at temperature 1."""

    rows: Rows
    wanted: DrawWanted
    drawn: DrawResult

    @property
    def num_tokens(self) -> int:
        """Rows without padding; each draws twice."""
        return len(self.wanted.rows) // 2


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
        """Draw with the view, and compare."""
        counts = np.zeros(2, np.int64)
        for chunk in self._chunks:
            drawn = self._draw(chunk.rows, chunk.wanted, view)
            counts += (drawn.token_ids == chunk.drawn.token_ids).reshape(2, -1).sum(axis=1)
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
        count = chunk.num_tokens
        wanted = LogprobsWanted(chunk.wanted.rows[:count], chunk.drawn.token_ids[:count].astype(np.int32))
        logprobs = self._runner.run(chunk.rows, Wanted(logprobs=wanted), view=view).logprobs
        assert logprobs is not None
        change = logprobs.astype(np.float64) - chunk.drawn.logprobs[:count]
        return np.exp(np.minimum(np.nan_to_num(change, nan=-np.inf, neginf=-np.inf), 0.0))

    def _draw(self, rows: Rows, wanted: DrawWanted, view: View) -> DrawResult:
        drawn = self._runner.run(rows, Wanted(draw=wanted), view=view).draw
        assert drawn is not None
        return drawn

    def _chunk(self, places: Sequence[tuple[Line, int]], scratch: int) -> _Chunk:
        """Rows that read `table[:position]` and themselves, and draw the token behind, once per temperature."""
        builder, sampling = RowsBuilder(), SamplingRowsBuilder()
        for i, (line, position) in enumerate(places):
            builder.add(
                token_id=line.token_ids[position], position=position, slot=scratch + i, seq_row=line.seq_row,
                prefix_len=position, tail=(scratch + i,),
            )  # fmt: skip
        for params in (_GREEDY, _SAMPLED):
            for line, position in places:
                sampling.add(
                    params, SampleKey(SEED, line.seq_row), t=position + 1, history=NO_HISTORY, path_ids=(),
                    stopping_ids=(), vocab_size=self._runner.backend.limits.vocab_size,
                )  # fmt: skip
        rows = self._runner.build(builder)
        wanted = DrawWanted(np.tile(np.arange(len(places), dtype=np.int32), 2), sampling.build())
        drawn = self._draw(rows, wanted, FULL_VIEW)
        if (drawn.token_ids == NO_TOKEN).any():
            raise InputError("the model gives NaN for its own text; it cannot be tuned")
        return _Chunk(rows, wanted, drawn)
