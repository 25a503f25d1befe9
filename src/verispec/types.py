"""The words every layer shares: sampling parameters, drafts, verdicts, results.

All of them are values. Nothing here knows slots, passes or tensors; a `Draft` is never written into a sequence, and a
`Verdict` is turned into state by one function, the scheduler's `commit`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import repeat
from typing import Any, NamedTuple, Protocol, Self, overload

from verispec.arguments import check_bool, check_int, check_number
from verispec.errors import ConstraintError, InputError
from verispec.strict_json import load_object

MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1
MAX_SEED_BITS = 53  # of seeds that are drawn: a larger one does not survive JSON in JavaScript
MAX_ALTERNATIVES = 64
# Bounds on what one request may cost every step, for all others that run beside it.
MAX_BIASED = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_PREDICTIONS, MAX_PREDICTED = 16, 2**15  # alternatives, and tokens of all together
MAX_SHOWN = 60  # characters of a text in a `repr`
NO_PARENT = -1
CONSTRAINTS = ("schema", "regex", "grammar")


class FinishReason(StrEnum):
    """Why a request ended. The first event in token order decides."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ConstraintText(NamedTuple):
    """What an answer has to look like, in the user's words: one of CONSTRAINTS, and its text."""

    kind: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"{self.kind}\n{self.text}".encode("utf-8", "surrogatepass")).hexdigest()


def _check_bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise InputError("logit_bias must map token ids to numbers")
    if len(pairs) > MAX_BIASED:
        raise InputError(f"logit_bias may name at most {MAX_BIASED} tokens, not {len(pairs)}")
    checked = {}
    for token_id, bias in pairs:
        checked[check_int("logit_bias token id", token_id, 0, MAX_INT)] = check_number("logit_bias", bias, -1e4, 1e4)
    return tuple(sorted(checked.items()))


# Penalties and temperatures divide float32 logits: smaller ones would make them infinite, or 0 / 0.
MIN_TEMPERATURE = 1e-6
_REAL = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request samples and when it ends. Frozen and validated; every error names its field.

    `temperature=0` is greedy. `top_k=0`, `top_p=1`, `min_p=0` and penalties of 1, 0, 0 are off. `max_tokens=None`
    means up to the engine's length limit; `max_tokens=0` is allowed only with `prompt_logprobs`, and scores the
    prompt without generating. `seed=None` draws a random seed, which the result reports. `logprobs` and
    `prompt_logprobs` are the number of alternatives to report beside the token's own log-probability; 0 is not "off",
    None is. At most one of `schema` (JSON Schema), `regex` and `grammar` (Lark) says what the whole answer looks like.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    deterministic: bool = True
    schema: Mapping[str, Any] | str | None = None  # kept as JSON text
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        lowest = 1 if self.prompt_logprobs is None else 0
        highest = MAX_INT if self.max_tokens is None else check_int("max_tokens", self.max_tokens, lowest, MAX_INT)
        whole = {
            "max_tokens": (lowest, MAX_INT),
            "min_tokens": (0, highest),
            "top_k": (0, MAX_INT),
            "n": (1, 1024),
            "seed": (0, MAX_SEED),
            "logprobs": (0, MAX_ALTERNATIVES),
            "prompt_logprobs": (0, MAX_ALTERNATIVES),
        }
        checked: dict[str, Any] = {}
        for name, (low, high) in whole.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                checked[name] = check_int(name, getattr(self, name), low, high)
        for name, (least, most) in _REAL.items():
            checked[name] = check_number(name, getattr(self, name), least, most, low_open=name == "top_p")
        if 0 < checked["temperature"] < MIN_TEMPERATURE:
            raise InputError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, not {self.temperature!r}"
            )
        for name in ("ignore_eos", "deterministic"):
            checked[name] = check_bool(name, getattr(self, name))
        checked["logit_bias"] = _check_bias(self.logit_bias)
        checked["stop"] = _check_stop(self.stop)
        checked["stop_ids"] = _check_stop_ids(self.stop_ids)
        checked["schema"] = _check_schema(self.schema)
        _check_constraint({name: getattr(self, name) for name in CONSTRAINTS}, max_tokens=highest)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def constraint(self) -> ConstraintText | None:
        """What the answer has to look like, if anything."""
        for kind in CONSTRAINTS:
            if (text := getattr(self, kind)) is not None:
                return ConstraintText(kind, text)
        return None

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether penalties, bias or a least length change logits before a draw."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Build from plain data (a JSON line, say); an unknown name is an error."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(repr, set(options) - known))
        if unknown:
            raise InputError(f"unknown sampling parameter {unknown[0]}; known: {', '.join(sorted(known))}")
        return cls(**options)


def _check_schema(value: Any) -> str | None:
    """JSON text in one spelling; the order of keys stays, because answers follow it."""
    if value is None:
        return None
    if isinstance(value, str):
        value = load_object(value.encode("utf-8", "surrogatepass"), name="schema", example='{"type": "object"}')
    if not isinstance(value, Mapping):
        raise ConstraintError("schema", f"must be an object or its JSON text, not {type(value).__name__}")
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError("schema", f"is not JSON: {error}") from error


def _check_constraint(given: Mapping[str, Any], *, max_tokens: int) -> None:
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"{named[1]} and {named[0]} exclude each other")
    for name in named:
        if not isinstance(given[name], Mapping | str):
            raise ConstraintError(name, f"must be text, not {type(given[name]).__name__}")
        if isinstance(given[name], str) and not _is_text(given[name]):
            raise ConstraintError(name, "holds half of a surrogate pair: it is not text")
        if not max_tokens:
            raise ConstraintError(name, "is for generated text, and max_tokens is 0")


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise InputError("stop must be a string that is not empty, or a list of such strings")
    if len(stops) > MAX_STOPS or any(len(s) > MAX_STOP_CHARS for s in stops):
        raise InputError(f"stop may hold at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    if not all(map(_is_text, stops)):
        raise InputError("stop holds half of a surrogate pair: it is not text")
    return tuple(stops)


def _is_text(value: str) -> bool:
    """Whether it can be written at all: Python marks bytes that are no UTF-8 by halves of surrogate pairs."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _check_stop_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise InputError("stop_ids must be a list of token ids")
    if len(value) > MAX_STOPS:
        raise InputError(f"stop_ids may name at most {MAX_STOPS} tokens, not {len(value)}")
    return tuple(check_int("stop_ids", i, 0, MAX_INT) for i in value)


class Accept(StrEnum):
    """Rules that accept drafts. `match`: the target's own draw. The others go by the probabilities of draft and target.

    Under `rejection` (chains) and `recursive` (trees) tokens depend on the drafter, the tree and the load.
    """

    MATCH = "match"
    REJECTION = "rejection"
    RECURSIVE = "recursive"


class Proposal(NamedTuple):
    """Row `row` of a backend's handle: the distribution that the children of `node` were drawn from."""

    node: int
    handle: Any
    row: int


class Stored(NamedTuple):
    """K/V in a drafter's own store: of the first `num_tokens` committed tokens and of these nodes."""

    store: int
    num_tokens: int
    nodes: frozenset[int] = frozenset()


_CHAIN = tuple(range(NO_PARENT, 1024))


def _chain_parents(length: int) -> tuple[int, ...]:
    return _CHAIN[:length] if length <= len(_CHAIN) else tuple(range(NO_PARENT, length - 1))


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess at what comes next: a token tree. `parents[i]` is a node index below i, or NO_PARENT for a root's child.

    A chain is a tree. The empty draft is a draft too. `probabilities` are the drafter's own, where it has any: they are
    shown, and decide nothing. `proposals` are what p/q rules need: the distribution that each node's children were
    drawn from, in the order of their indices. A drafter with a K/V store of its own says in `stored` how many committed
    tokens it has computed, and which nodes.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    stored: Stored | None = None

    @classmethod
    def chain(cls, token_ids: Iterable[int]) -> Draft:
        """The linear tree over `token_ids`."""
        ids = tuple(token_ids)
        return cls(ids, _chain_parents(len(ids)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs under the one before it."""
        return self.parents == _chain_parents(len(self.token_ids))

    @property
    def depth(self) -> int:
        """Nodes on the longest path from the root down."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == NO_PARENT else depths[parent] + 1)
        return max(depths, default=0)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes that nothing hangs under."""
        return tuple(sorted(set(range(len(self.token_ids))).difference(self.parents)))

    def path_to(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`, inclusive; () for NO_PARENT."""
        path: list[int] = []
        while node != NO_PARENT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def is_valid(self, *, vocab_size: int, max_nodes: int) -> bool:
        """Whether the tree is well formed and every token exists: a drafter's output is untrusted input."""
        ids, parents = self.token_ids, self.parents
        if len(parents) != len(ids) or len(ids) > max_nodes or not set(map(type, (*ids, *parents))) <= {int}:
            return False
        in_vocabulary = not ids or (min(ids) >= 0 and max(ids) < vocab_size)
        return in_vocabulary and (self.is_chain or all(NO_PARENT <= p < i for i, p in enumerate(parents)))


NO_DRAFT = Draft()


class Verdict(NamedTuple):
    """What the target made of a draft: accepted nodes from the root down, and the one token it adds itself."""

    path: tuple[int, ...]
    bonus_id: int


class DraftTrace(NamedTuple):
    """A draft, who drafted it, and what became of it: with the target's raw probability of each node's token."""

    draft: Draft
    verdict: Verdict
    target_probabilities: tuple[float, ...]
    drafter: str


class TextPiece(NamedTuple):
    """Text that became final with one token, and whether a stop string completed at that token."""

    text: str
    stopped: bool


class TextSink(Protocol):
    """Turns committed tokens into text; only `commit` pushes into it, so it has nothing to undo.

    One that can stop a request is pushed every token as it is committed; others may get all of them at the end.
    """

    @property
    def can_stop(self) -> bool: ...
    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece: ...
    def finish(self) -> str: ...

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The text of many tokens, which cannot stop."""
        return "".join([self.push(token_id).text for token_id in token_ids])


class NoText(TextSink):
    """The text of a request that has none: for engines run on token ids alone."""

    can_stop = False

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Release nothing."""
        return TextPiece("", stopped=False)

    def finish(self) -> str:
        """Release nothing."""
        return ""

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Release nothing."""
        return ""


Alternatives = tuple[tuple[int, float], ...]


class TokenLogprob(NamedTuple):
    """The log-probability of one token under the raw logits, with the most likely alternatives if asked for."""

    token_id: int
    logprob: float
    alternatives: Alternatives = ()


@dataclass(slots=True, unsafe_hash=True)  # a value; frozen ones are made too slowly for every commit of a stream
class TokenLogprobs(Sequence[TokenLogprob]):
    """A sequence of TokenLogprob kept as columns: entries are made when they are looked at. `all_alternatives` has an
    entry per token, or none at all."""

    token_ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    all_alternatives: tuple[Alternatives, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[TokenLogprob]) -> Self:
        """The columns of entries."""
        entries = tuple(entries)
        alternatives = tuple(e.alternatives for e in entries)
        columns = tuple(e.token_id for e in entries), tuple(e.logprob for e in entries)
        return cls(*columns, alternatives if any(alternatives) else ())

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(TokenLogprob, self.token_ids, self.values, self.all_alternatives or repeat(()))

    @overload
    def __getitem__(self, at: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> TokenLogprob | Self:
        if isinstance(at, slice):
            return type(self)(self.token_ids[at], self.values[at], self.all_alternatives[at])
        return TokenLogprob(self.token_ids[at], self.values[at], *self.all_alternatives[at : at + 1 or None])


NO_LOGPROBS = TokenLogprobs()


@dataclass(slots=True)
class SequenceStats:
    """Counters of one sequence. Reported, never read by a decision.

    `passes` are the canonical passes of the target the sequence took part in, `fast_passes` its fast ones, those that
    fill windows included, `draft_passes` those of a drafter's own model, or of cheaper weights. `replays` are the
    canonical passes that verified windows, on whichever weights these were drawn, `mismatches` those of them that found
    another token, and `recomputed` the tokens dropped for that. `longest_stall` is the longest this sequence, running
    in fast passes, waited for a replay of others, `stall_caused` its share of the time that its replays made such
    sequences wait. `chosen` counts the steps by what was planned for the sequence, `accepted_by` the accepted tokens by
    drafter; `chosen_because` and `no_draft_reason` speak of the last step they apply to.
    `exit_threshold` and `exit_rate` are the state of the adaptive draft exit after the sequence's last draft.
    """

    passes: int = 0
    fast_passes: int = 0
    draft_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    mismatches: int = 0
    recomputed: int = 0
    longest_stall: float = 0.0
    stall_caused: float = 0.0
    chosen: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    chosen_because: str = ""
    no_draft_reason: str = ""
    exit_threshold: float | None = None
    exit_rate: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    arrival_time: float = 0.0
    start_time: float | None = None  # when it had its first slots
    first_token_time: float | None = None
    finish_time: float | None = None
    last_token_time: float | None = None
    gaps: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first committed token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def longest_gap(self) -> float:
        """The longest time between two commits, in seconds."""
        return max(self.gaps, default=0.0)

    def without_drafts(self) -> SequenceStats:
        """Without all that tells how many tokens were drafted or accepted."""
        shown = ("preemptions", "cached_tokens", "arrival_time", "start_time", "first_token_time", "finish_time")
        reason = "not told here: drafts may come from what other keys were answered"
        return SequenceStats(
            no_draft_reason=reason, **{name: getattr(self, name) for name in (*shown, "last_token_time")}
        )

    def record_commit(self, now: float) -> None:
        """Note that tokens became visible at `now`."""
        if self.first_token_time is None:
            self.first_token_time = now
        elif self.last_token_time is not None:
            self.gaps.append(now - self.last_token_time)
        self.last_token_time = now


@dataclass(slots=True)
class Totals:
    """Counters of many sequences together; the names are those of SequenceStats."""

    sequences: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    mismatches: int = 0
    recomputed: int = 0
    preemptions: int = 0
    longest_gap: float = 0.0
    longest_stall: float = 0.0
    stall_caused: float = 0.0

    def add(self, stats: SequenceStats, num_tokens: int) -> None:
        """Count one sequence."""
        self.sequences += 1
        self.committed += num_tokens
        for name in ("drafted", "accepted", "replays", "mismatches", "recomputed", "preemptions", "stall_caused"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        for name in ("longest_gap", "longest_stall"):
            setattr(self, name, max(getattr(self, name), getattr(stats, name)))

    def copy(self) -> Totals:
        """The same counts."""
        return replace(self)

    @property
    def recomputed_fraction(self) -> float:
        """Tokens that replays dropped, of all that were committed or dropped."""
        return self.recomputed / max(1, self.recomputed + self.committed)


@dataclass(frozen=True, slots=True, repr=False)
class SampleOutput:
    """One finished sample. Token ids include the stopping token; text excludes EOS and the stop string.

    Two are equal if they say the same: seed, times and counters are not compared.
    """

    sample_index: int
    prompt_len: int
    logprobs: TokenLogprobs
    text: str
    finish_reason: FinishReason
    seed: int = field(compare=False)
    stats: SequenceStats = field(compare=False)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    given_ids: tuple[int, ...] = ()  # output that came with the request; text has it, log-probabilities have not

    def __repr__(self) -> str:
        return f"SampleOutput({self.summary})"

    @property
    def summary(self) -> str:
        """The beginning of the text, why it ended, and the digest: what stands for it in print."""
        text = self.text if len(self.text) <= MAX_SHOWN else self.text[:MAX_SHOWN] + "..."
        error = "" if self.error is None else f", error={self.error!r}"
        return f"text={text!r}, finish_reason={self.finish_reason.value!r}{error}, digest={self.digest[:16]!r}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output tokens that were drawn."""
        return self.logprobs.token_ids

    @property
    def tokens_per_pass(self) -> float | None:
        """What a pass of the target gave; None if there was none, or drafts are not told, which this would tell of."""
        num_passes = self.stats.passes + self.stats.fast_passes
        return len(self.logprobs) / num_passes if num_passes else None

    @property
    def digest(self) -> str:
        """SHA-256 over the output ids as int32-LE, then the log-probabilities as float32-LE."""
        ids = struct.pack(f"<{len(self.logprobs)}i", *self.token_ids)
        values = struct.pack(f"<{len(self.logprobs)}f", *self.logprobs.values)
        return hashlib.sha256(ids + values).hexdigest()


class TokenEvent(NamedTuple):
    """What one step committed for one sample of one request, or one round of it where rounds drafted; or one token,
    where drafts are not told. A stream is the concatenation of these.

    `pieces` is the text, split by the token that released it. The first `num_accepted` tokens were drafted;
    `rejected_ids` were drafted too, and dropped.
    """

    request_id: int
    sample_index: int
    logprobs: TokenLogprobs = NO_LOGPROBS
    pieces: tuple[str, ...] = ()
    num_accepted: int = 0
    rejected_ids: tuple[int, ...] = ()
    output: SampleOutput | None = None  # everything about the sample, with its last event
    trace: DraftTrace | None = None  # of the draft that was judged, if the request asked for traces
    tells_drafts: bool = True  # False: nothing of them may be seen, not even which tokens were committed together

    @property
    def text(self) -> str:
        """The text that became final."""
        return "".join(self.pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample ended, with its last event."""
        return None if self.output is None else self.output.finish_reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens committed."""
        return self.logprobs.token_ids

    def by_token(self) -> list[TokenEvent]:
        """The same, which tells of no draft, as events of one token each; the output comes with the last of them."""
        last = len(self.logprobs) - 1
        if last < 1:
            return [self._replace(tells_drafts=False)]
        return [
            self._replace(
                tells_drafts=False,
                logprobs=self.logprobs[i : i + 1],
                pieces=self.pieces[i : i + 1],
                output=self.output if i == last else None,
            )
            for i in range(last + 1)
        ]
