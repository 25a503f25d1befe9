"""One request's state (one per sample), in three parts: what it asks and its tokens; its slots; what clients know.

Its committed tokens only ever grow, by `append`, which only commit calls; text and the finish derive from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from verispec.kv import Lease, Node
from verispec.sampling.constraint import Constraint
from verispec.sampling.rows import SampleKey
from verispec.spec.speculation import OFF, Speculation
from verispec.types import (
    Accept,
    Alternatives,
    DraftTrace,
    FinishReason,
    NoText,
    SampleOutput,
    SamplingParams,
    SequenceStats,
    TextSink,
    TokenEvent,
    TokenLogprob,
    TokenLogprobs,
)

NO_DRAW = "no token can be drawn: the model's logits are NaN or infinite, or every token is banned"


@dataclass(slots=True)
class Slots:
    """Where a running sequence's K/V lies.

        position   0 ........ canonical ........ computed ............... committed
                   | canonical K/V  | fast K/V    | pending: a row next    |
        slots      [----------------- held ------][-- lease: pending, draft or burst --]
                   the first are the prefix cache's  scratch; `commit` moves its front to `held`, the rest is given back

    The prefix cache owns the first `num_shared` slots and holds them for the sequence, up to `node`.
    `synced_len` positions are in the backend's table. `store_lens` says how many committed tokens have K/V in each
    store. `epoch` moves with every commit and release: a turn of another epoch is stale. `draft_epoch` moves when a
    lease was lost that a draft under way may count on. `num_flights` turns are in the air.
    """

    held: list[int] = field(default_factory=list)
    num_shared: int = 0
    node: Node | None = None
    lease: Lease | None = None
    seq_row: int = 0
    canonical_len: int = 0
    synced_len: int = 0
    store_lens: tuple[int, ...] = ()
    epoch: int = 0
    draft_epoch: int = 0
    num_flights: int = 0
    num_ahead: int = 0  # tokens that turns in the air may commit

    def check(self) -> None:
        """Raise if the borders are out of order."""
        num_leased = len(self.lease.slots) if self.lease else 0
        if (
            not 0 <= self.num_shared <= self.canonical_len <= len(self.held)
            or self.synced_len > len(self.held) + num_leased
        ):
            raise AssertionError("a sequence's slots are out of order")


class DraftNews(NamedTuple):
    """What clients are told of a draft that was judged."""

    num_accepted: int = 0
    rejected_ids: tuple[int, ...] = ()
    trace: DraftTrace | None = None


NO_NEWS = DraftNews()
_new_event = partial(tuple.__new__, TokenEvent)  # by its columns: a third of the time that its class takes


@dataclass(slots=True)
class Outbox:
    """What no event carries yet: output from entry `next` on, the text it released, and the draft it came from."""

    next: int = 0
    pieces: list[str] = field(default_factory=list)
    draft: DraftNews = NO_NEWS


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample of a request, from the queue to its last token. `is_streamed`: every commit is told."""

    sequence_id: int  # from a counter: arrival order
    request_id: int
    sample_key: SampleKey
    params: SamplingParams
    prompt_ids: tuple[int, ...]
    stopping_ids: frozenset[int]  # tokens that end the request
    max_len: int
    speculation: Speculation
    text_sink: TextSink
    given_ids: tuple[int, ...] = ()  # output that the client has already
    is_traced: bool = False  # whether events show whole drafts
    tells_drafts: bool = True  # whether the client hears of drafts at all; if not, an event has one token
    is_streamed: bool = True
    batch: int = 0  # requests that are waited for together; 0: this one alone
    salt: str = ""
    prediction_ids: tuple[tuple[int, ...], ...] = ()  # what the client expects as output: alternatives
    stats: SequenceStats = field(default_factory=SequenceStats)
    constraint: Constraint | None = None  # where the output stands in its grammar
    leader: Sequence | None = None  # sample 0 of the same request, whose prompt K/V this one waits to share

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # raw, of the tokens drawn
    alternatives: dict[int, Alternatives] = field(default_factory=dict)  # by number of the token drawn, where wanted
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None

    kv: Slots = field(default_factory=Slots)
    outbox: Outbox = field(default_factory=Outbox)
    is_running: bool = False
    num_rested: int = 0  # rounds since the last draft

    prompt_len: int = field(init=False)
    uses_probabilities: bool = field(init=False)  # at temperature 0 every rule is `match`
    draws_plainly: bool = field(init=False)  # from logits as they are: no edits, no rule by probabilities
    scores_only: bool = field(init=False)  # wants the prompt's log-probabilities and no generation
    needs_host: bool = field(init=False)  # after each round: what it wants to know is not resident
    has_single_rows: bool = field(init=False)  # a round without a draft is a row, a draw and nothing else
    may_draft: bool = field(init=False)  # it has drafters, and does not rest from asking them
    is_plain: bool = field(init=False)  # single rows without drafts: nothing of a round needs the host
    is_followed: bool = field(init=False)  # single rows, under a constraint whose masks the host gives between rounds
    _makes_text: bool = field(init=False)  # as tokens are committed; otherwise once, at the end
    _is_silent: bool = field(init=False)  # nothing but a stopping token or its length ends it

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.given_ids]
        self.prompt_len = len(self.prompt_ids)
        self.uses_probabilities = self.speculation.accept is not Accept.MATCH and self.params.temperature > 0
        self.draws_plainly = not self.uses_probabilities and not self.params.edits_logits
        self.scores_only = self.params.max_tokens == 0
        is_constrained = self.constraint is not None
        self.needs_host = bool(self.params.logprobs) or self.is_traced or is_constrained
        has_single_rows = not self.params.logprobs and not self.scores_only
        self.has_single_rows = has_single_rows and not is_constrained
        self.is_followed = has_single_rows and is_constrained
        self.rest(is_resting=False)
        if not self.may_draft:
            self.stats.no_draft_reason = "drafter none"
        self._makes_text = self.text_sink.can_stop or (self.is_streamed and type(self.text_sink) is not NoText)
        self._is_silent = not self._makes_text and not is_constrained
        for index, token_id in enumerate(self.given_ids):
            self._take_given(index, token_id)

    def rest(self, *, is_resting: bool) -> None:
        """Ask its drafters no more, or again."""
        self.may_draft = not is_resting and self.speculation.method != OFF
        self.is_plain = self.has_single_rows and not self.may_draft

    @property
    def committed_len(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def computed_len(self) -> int:
        """Tokens whose K/V is computed."""
        return len(self.kv.held)

    @property
    def slots(self) -> list[int]:
        """Slots of the computed tokens, by position."""
        return self.kv.held

    @property
    def draft_epoch(self) -> int:
        """Moves when a draft under way has lost its slots."""
        return self.kv.draft_epoch

    @property
    def num_output(self) -> int:
        """Generated tokens, given ones included."""
        return len(self.token_ids) - self.prompt_len

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether prompt tokens still have to be scored, which a cached prefix cannot do."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def num_pending(self) -> int:
        """Committed tokens that still need a row. Scoring needs none for the prompt's last token."""
        return len(self.token_ids) - self.scores_only - len(self.kv.held)

    def _take_given(self, index: int, token_id: int) -> None:
        """A token the client has already counts as generated; its text is known to the client."""
        if self.finish_reason is not None:
            return
        may_stop = index + 1 >= self.params.min_tokens
        if may_stop and token_id in self.stopping_ids:
            self.finish(FinishReason.STOP)
        elif self._makes_text:
            piece = self.text_sink.push(token_id, may_stop=may_stop)
            self.text += piece.text
            if piece.stopped:
                self.finish(FinishReason.STOP)
        self._follow(token_id)
        if self.finish_reason is None and self.prompt_len + index + 1 >= self.max_len:
            self.finish(FinishReason.LENGTH)

    def append(self, token_id: int, logprob: float, alternatives: Alternatives = ()) -> None:
        """Commit one token, and decide whether it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if alternatives:
            self.alternatives[len(self.logprobs) - 1] = alternatives
        if token_id in self.stopping_ids and self.num_output >= self.params.min_tokens:
            self.finish(FinishReason.STOP)
            return
        if self._makes_text:
            piece = self.text_sink.push(token_id, may_stop=self.num_output >= self.params.min_tokens)
            pieces = self.outbox.pieces
            while len(pieces) < len(self.logprobs) - self.outbox.next - 1:
                pieces.append("")
            pieces.append(piece.text)
            if piece.stopped:
                self.finish(FinishReason.STOP)
                return
        self._follow(token_id)
        if self.finish_reason is None and len(self.token_ids) >= self.max_len:
            self.finish(FinishReason.LENGTH)

    def _follow(self, token_id: int) -> None:
        """Move on in the grammar. The mask is computed now, while a failure is this request's alone."""
        if self.constraint is None or self.finish_reason is not None:
            return
        self.constraint = self.constraint.committed(token_id)
        _ = self.constraint.allowed
        if self.constraint.is_exhausted:
            self.finish(FinishReason.STOP)

    def append_all(
        self, token_ids: SequenceOf[int], logprobs: SequenceOf[float], alternatives: SequenceOf[Alternatives] = ()
    ) -> None:
        """Commit a block of draws up to the one that ends the sequence, as if one by one. -1 is a draw that failed."""
        if self._is_silent and not alternatives and self.stopping_ids.isdisjoint(token_ids):
            room = self.max_len - len(self.token_ids)
            if token_ids[min(room, len(token_ids)) - 1] >= 0:
                self.token_ids += token_ids[:room]
                self.logprobs += logprobs[:room]
                if room <= len(token_ids):
                    self.finish(FinishReason.LENGTH)
                return
        for i, token_id in enumerate(token_ids):
            if token_id < 0:
                self.fail(NO_DRAW)
            else:
                self.append(token_id, logprobs[i], alternatives[i] if alternatives else ())
            if self.finish_reason is not None:
                return

    def finish(self, reason: FinishReason) -> None:
        """End the sequence and release the text that was held back."""
        self.finish_reason = reason
        try:
            if not self._makes_text:
                self._make_text()
            held = self.text_sink.finish()
        except Exception as error:  # the sink belongs to the request, and so does its failure
            self.fail(f"{type(error).__name__}: {error}")
            return
        if held:
            self.outbox.pieces.append(held)

    def _make_text(self) -> None:
        """The whole text at once. A stopping token has none; a grammar may have ended without one."""
        ids = self.token_ids[self.prompt_len :]
        if self.finish_reason is FinishReason.STOP and ids[-1] in self.stopping_ids:
            ids = ids[:-1]
        text = self.text_sink.push_all(ids)
        if text:
            self.outbox.pieces = [""] * (len(self.logprobs) - self.outbox.next - 1) + [text]

    def fail(self, error: str) -> None:
        """End the sequence with an error; the tokens committed before it stand, and so does their text."""
        if not self._makes_text and self.finish_reason is None:
            with contextlib.suppress(Exception):
                self._make_text()
        self.finish_reason = FinishReason.ERROR
        self.error = error

    def take_events(self) -> list[TokenEvent]:
        """Everything committed since the last event, and the whole output if the sequence has ended.

        It is one event. Where drafts are not told, a stream has one for each token: how many tokens a round committed
        is how many of its draft were accepted.
        """
        event = self._take_event()
        return [event] if self.tells_drafts or not self.is_streamed else event.by_token()

    def _take_event(self) -> TokenEvent:
        outbox = self.outbox
        start, outbox.next = outbox.next, len(self.logprobs)
        count = outbox.next - start
        pieces = self._take_pieces(count) if outbox.pieces else ("",) * count
        output = None if self.finish_reason is None else self._sample_output(self.finish_reason)
        about = self.request_id, self.sample_key.sample_index, self._entries(start), pieces
        draft, outbox.draft = outbox.draft, NO_NEWS
        if draft is NO_NEWS:
            return _new_event((*about, 0, (), output, None, True))
        return _new_event((*about, min(draft.num_accepted, count), draft.rejected_ids, output, draft.trace, True))

    def _take_pieces(self, count: int) -> tuple[str, ...]:
        """Text by the token that released it; what was held back comes with the last token, if there is one."""
        pieces, self.outbox.pieces = self.outbox.pieces, []
        if len(pieces) > count:
            pieces[max(0, count - 1) :] = ["".join(pieces[max(0, count - 1) :])]
        pieces += [""] * (count - len(pieces))
        self.text += "".join(pieces)
        return tuple(pieces)

    def _entries(self, start: int) -> TokenLogprobs:
        """The tokens drawn, from number `start` on."""
        values = tuple(self.logprobs[start:])
        drawn = tuple(self.token_ids[len(self.token_ids) - len(values) :])
        if not self.alternatives:
            return TokenLogprobs(drawn, values)
        return TokenLogprobs(
            drawn, values, tuple([self.alternatives.get(i, ()) for i in range(start, len(self.logprobs))])
        )

    def _sample_output(self, finish_reason: FinishReason) -> SampleOutput:
        return SampleOutput(
            sample_index=self.sample_key.sample_index,
            prompt_len=self.prompt_len,
            logprobs=self._entries(0),
            text=self.text,
            finish_reason=finish_reason,
            seed=self.sample_key.seed,
            stats=self.stats if self.tells_drafts else self.stats.without_drafts(),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            error=self.error,
            given_ids=self.given_ids,
        )
