"""One request's state (one per sample). Its committed tokens only ever grow, by `append`, which only commit calls.

Everything else derives from committed tokens: counts for penalties, text, the finish. Slots are listed by position;
those below `canonical_len` hold K/V from canonical passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from verispec.engine.window import Window
from verispec.kv import Lease
from verispec.sampling.rows import History, SampleKey
from verispec.tree import TreeShape
from verispec.types import (
    Accept,
    Draft,
    DraftTrace,
    FinishReason,
    SampleOutput,
    SamplingParams,
    SequenceStats,
    TextSink,
    TokenEvent,
    TokenLogprob,
    Verdict,
)


class Prompt(NamedTuple):
    """The prompt's tokens, made once for all samples of a request."""

    token_ids: tuple[int, ...]
    distinct_ids: frozenset[int]

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Prompt:
        """From any integers."""
        ids = tuple(map(int, token_ids))
        return cls(ids, frozenset(ids))


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample of a request, from the queue to its last token."""

    sequence_id: int  # from a counter: arrival order
    request_id: int
    sample_key: SampleKey
    params: SamplingParams
    prompt: Prompt
    stopping_ids: frozenset[int]  # tokens that end the request
    max_len: int
    drafter: str
    text_sink: TextSink
    tree: TreeShape | None = None
    accept: Accept = Accept.MATCH
    is_traced: bool = False  # whether events tell of drafts
    stats: SequenceStats = field(default_factory=SequenceStats)
    leader: Sequence | None = None  # sample 0 of the same request, whose prompt K/V this one waits to share

    token_ids: list[int] = field(default_factory=list)
    output: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None

    slots: list[int] = field(default_factory=list)
    canonical_len: int = 0
    store_lens: tuple[int, ...] = ()  # committed tokens with K/V in each store; that of the target's is not used
    synced_len: int = 0  # positions whose slots the backend's table has
    seq_row: int = 0
    epoch: int = 0
    lease: Lease | None = None
    window: Window | None = None  # what regular decoding drafted in the leased slots
    is_in_flight: bool = False  # whether a plan that holds rows of this sequence has not been committed

    _output_counts: Counter[int] = field(default_factory=Counter)
    # What no event carries yet: output entries, the text they released, and the draft they came from.
    _unreported: int = 0
    _unreported_pieces: list[str] = field(default_factory=list)
    _num_accepted: int = 0
    _trace: DraftTrace | None = None
    _rejected_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt.token_ids)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def committed_len(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def computed_len(self) -> int:
        """Tokens whose K/V is computed."""
        return len(self.slots)

    @property
    def uses_probabilities(self) -> bool:
        """Whether drafts are judged by probabilities. At temperature 0 every rule is `match`."""
        return self.accept is not Accept.MATCH and self.params.temperature > 0

    @property
    def scores_only(self) -> bool:
        """Whether the request wants the prompt's log-probabilities and no generation."""
        return self.params.max_tokens == 0

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether prompt tokens still have to be scored, which a cached prefix cannot do."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def num_pending(self) -> int:
        """Committed tokens that still need a row. Scoring needs none for the prompt's last token."""
        return self.committed_len - self.scores_only - self.computed_len

    def history(self) -> History:
        """Committed tokens as penalties see them."""
        return History(self.prompt.distinct_ids, self._output_counts, len(self.output))

    def append(self, entry: TokenLogprob) -> None:
        """Commit one token, and decide whether it is the last. Blocks of tokens come through here one by one."""
        self.token_ids.append(entry.token_id)
        self.output.append(entry)
        self._output_counts[entry.token_id] += 1
        self._unreported += 1
        self._unreported_pieces.append("")
        may_stop = len(self.output) >= self.params.min_tokens
        if may_stop and entry.token_id in self.stopping_ids:
            self.finish(FinishReason.STOP)
            return
        piece = self.text_sink.push(entry.token_id, may_stop=may_stop)
        self._unreported_pieces[-1] += piece.text
        if piece.stopped:
            self.finish(FinishReason.STOP)
        elif self.committed_len >= self.max_len:
            self.finish(FinishReason.LENGTH)

    def decode(self, token_id: int, *, target_len: int, drafter: str) -> None:
        """Add a regularly decoded token to the window, which opens if there is none."""
        if self.window is None:
            self.window = Window.behind(self.text_sink, target_len=target_len, drafter=drafter)
        index = len(self.output) + len(self.window)
        self.window.push(
            token_id,
            stopping_ids=self.stopping_ids,
            may_stop=index + 1 >= self.params.min_tokens,
            is_last=self.prompt_len + index + 1 >= self.max_len,
        )
        self.stats.drafted += token_id >= 0

    def note_draft(self, draft: Draft, path: SequenceOf[int]) -> None:
        """Remember what became of a draft, for the next event and the counters."""
        self.stats.drafted += len(draft)
        self.stats.accepted += len(path)
        self._num_accepted = len(path)
        self._rejected_ids = tuple(t for node, t in enumerate(draft.token_ids) if node not in path)

    def note_trace(self, trace: DraftTrace) -> None:
        """Remember a judged draft for the next event."""
        self._trace = trace

    def note_replay(self, window: Window, verdict: Verdict) -> int:
        """Remember what a replay found, and close the window or cut its front; returns the tokens it confirmed."""
        confirmed, num_committed = window.num_confirmed(verdict), len(verdict.path) + 1
        dropped = window.token_ids[confirmed:] if confirmed < num_committed else []
        self.stats.replays += bool(window.token_ids)
        self.stats.mismatches += bool(dropped)
        self.stats.recomputed += len(dropped)
        self.stats.accepted += confirmed
        self._num_accepted, self._rejected_ids = confirmed, tuple(dropped)
        window.drop_front(confirmed)
        if dropped or not window.token_ids:
            self.window = None
        return confirmed

    def finish(self, reason: FinishReason) -> None:
        """End the sequence and release the text that was held back."""
        self.finish_reason = reason
        try:
            held = self.text_sink.finish()
            if self._unreported_pieces:
                self._unreported_pieces[-1] += held
            elif held:
                self._unreported_pieces.append(held)
        except Exception as error:  # the sink belongs to the request, and so does its failure
            self.fail(f"{type(error).__name__}: {error}")

    def fail(self, error: str) -> None:
        """End the sequence with an error; the tokens committed before it stand."""
        self.finish_reason = FinishReason.ERROR
        self.error = error

    def take_event(self) -> TokenEvent:
        """Everything committed since the last event, and the whole output if the sequence has ended."""
        pieces = tuple(self._unreported_pieces)
        self.text += "".join(pieces)
        event = TokenEvent(
            request_id=self.request_id,
            sample_index=self.sample_key.sample_index,
            logprobs=tuple(self.output[len(self.output) - self._unreported :]),
            pieces=pieces,
            num_accepted=min(self._num_accepted, self._unreported),
            rejected_ids=self._rejected_ids,
            output=self._sample_output(),
            trace=self._trace,
        )
        self._unreported, self._unreported_pieces, self._num_accepted, self._rejected_ids = 0, [], 0, ()
        self._trace = None
        return event

    def _sample_output(self) -> SampleOutput | None:
        if self.finish_reason is None:
            return None
        return SampleOutput(
            sample_index=self.sample_key.sample_index,
            prompt_len=self.prompt_len,
            logprobs=tuple(self.output),
            text=self.text,
            finish_reason=self.finish_reason,
            seed=self.sample_key.seed,
            stats=self.stats,
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            error=self.error,
        )
