"""What a caller asks of the engine; and what it can never serve, refused before it is queued with what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import count
from numbers import Integral
from typing import Any

from verispec.arguments import kind_of
from verispec.backends.protocol import BackendLimits
from verispec.config import EngineConfig
from verispec.errors import ConstraintError, DeterminismError, InputError
from verispec.sampling.constraint import Grammar
from verispec.spec.drafter import DrafterSkills
from verispec.spec.speculation import AUTO, Speculation
from verispec.types import MAX_PREDICTED, MAX_PREDICTIONS, Accept, Draft, NoText, SamplingParams, TextSink

Predicted = Sequence[int] | Sequence[Sequence[int]] | Draft
new_batch = count(1).__next__


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for. `text` makes one sink per sample; without it the request is about token ids alone.

    `speculation` says how it is drafted and judged (None: the engine's default). Events of a request that `is_traced`
    tell of its drafts; one that is not `is_streamed` has a single event per sample, its last. The `params.n` samples
    are those from number `first_sample` on. `committed_ids` is output that the client has already, a list per sample:
    it counts as generated, and generation goes on behind it, to the bit as if it had never stopped. Cached prefixes are
    shared among requests of the same `salt` only. `grammar` is what `params` wants the answer to look like, compiled.
    `prediction_ids` is what the client expects as output: drafters may try it, which changes no token. It is a row of
    tokens, or several, which are alternatives, the likeliest first; or a Draft, each path of which down to a leaf is
    one. Requests of the same `batch` (`new_batch()`) are waited for together: drafts are made for when the last of them
    ends. 0: for itself.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation | None = None
    is_traced: bool = False
    is_streamed: bool = True
    eos_ids: Iterable[int] = ()
    text: Callable[[], TextSink] = NoText
    first_sample: int = 0
    committed_ids: Sequence[Sequence[int]] = ()
    salt: str = ""
    grammar: Grammar | None = None
    prediction_ids: Predicted = ()
    batch: int = 0

    @property
    def predictions(self) -> tuple[tuple[int, ...], ...]:
        """The alternatives of `prediction_ids`, which must be valid; empty ones predict nothing."""
        given = self.prediction_ids
        if isinstance(given, Draft):
            return tuple(tuple(given.token_ids[node] for node in given.path_to(leaf)) for leaf in given.leaves)
        return tuple(tuple(map(int, row)) for row in _rows(given) if len(row))

    @property
    def stopping_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset(self.params.stop_ids) | frozenset(() if self.params.ignore_eos else self.eos_ids)

    @property
    def can_continue(self) -> bool:
        """Whether it can have `committed_ids`: not under rules by which tokens depend on the drafter."""
        return self.speculation is None or self.speculation.accept is Accept.MATCH

    def rest(self, drawn: Sequence[Sequence[int]]) -> Request:
        """What is left of it when these tokens were drawn, a list per sample."""
        if not any(drawn):
            return self
        given = self.committed_ids or [()] * self.params.n
        return replace(self, committed_ids=[(*a, *b) for a, b in zip(given, drawn, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChecks:
    """A value, so that who has no engine can check requests for one. `default` is the speculation of requests that name
    none; `no_family_reason` says why none can be deterministic.
    """

    limits: BackendLimits
    config: EngineConfig
    skills: DrafterSkills
    default: Speculation
    max_len: int
    no_family_reason: str

    def validate(self, request: Request) -> None:
        """Raise InputError, naming what is wrong, if this engine can never serve the request."""
        vocab_size, num_prompt = self.limits.vocab_size, len(request.prompt_ids)
        if not num_prompt:
            raise InputError("the prompt is empty; it needs at least one token")
        _check_ids("", request.prompt_ids, vocab_size)
        room = self.max_len if request.params.max_tokens == 0 else self.max_len - 1
        if num_prompt > room:
            raise InputError(f"the prompt has {num_prompt} tokens; at most {room} fit into a length of {self.max_len}")
        if request.params.max_tokens == 0 and num_prompt < 2:
            raise InputError("scoring needs at least two tokens: the first has no log-probability")
        for token_id, _ in request.params.logit_bias:
            if token_id >= vocab_size:
                raise InputError(f"logit_bias names token {token_id}; the vocabulary has {vocab_size}")
        for token_id in request.params.stop_ids:
            if token_id >= vocab_size:
                raise InputError(f"stop_ids names token {token_id}; the vocabulary has {vocab_size}")
        try:
            _check_prediction(request, vocab_size)
        except (TypeError, KeyError):
            given = kind_of(request.prediction_ids)
            raise InputError(f"prediction_ids must be token ids, rows of them or a Draft, not {given}") from None
        self._check_constraint(request)
        self._check_speculation(request)
        self._check_committed(request)
        if request.params.deterministic and self.no_family_reason:
            raise DeterminismError(
                f"deterministic requests cannot be served here: {self.no_family_reason}; "
                "a request with deterministic=False can"
            )
        if request.params.n > self.config.max_waiting:
            raise InputError(f"n = {request.params.n} exceeds the queue's {self.config.max_waiting} places")

    def _check_constraint(self, request: Request) -> None:
        wanted = request.params.constraint
        if wanted is None:
            return
        if request.grammar is None:
            raise InputError(f"{wanted.kind} was not compiled: requests are made by `LLM.request`")
        if self.limits.num_masks <= self.config.max_running:
            raise InputError(f"{wanted.kind} needs a mask for each sequence that runs, and this backend has too few")
        try:
            _ = request.grammar.start(request.stopping_ids).allowed  # later ones are made where they fail alone
        except ConstraintError as error:
            raise ConstraintError(wanted.kind, f"cannot be followed: {error.reason}") from error

    def _check_committed(self, request: Request) -> None:
        """Refuse output so far that this request cannot have had."""
        committed, params = request.committed_ids, request.params
        if not committed:
            return
        if len(committed) != params.n:
            raise InputError(f"committed_ids has {len(committed)} lists for n = {params.n} samples")
        if not request.can_continue:
            accept = (request.speculation or self.default).accept
            raise InputError(f"committed_ids cannot be continued under accept {accept}")
        most = self.max_len - len(request.prompt_ids) if params.max_tokens is None else params.max_tokens
        for ids in committed:
            _check_ids("committed_ids: ", ids, self.limits.vocab_size)
            if len(ids) > most:
                raise InputError(f"committed_ids has {len(ids)} tokens; the request can have {most}")
            self._check_followed(request, ids)

    def _check_followed(self, request: Request, committed_ids: Sequence[int]) -> None:
        """Refuse output so far that breaks the request's constraint."""
        place = None if request.grammar is None else request.grammar.start(request.stopping_ids)
        for index, token_id in enumerate(committed_ids):
            if place is None or token_id in request.stopping_ids:
                return
            place = place.after(int(token_id))
            if place is None:
                raise InputError(f"committed_ids breaks the request's constraint at token {index}")

    def _check_speculation(self, request: Request) -> None:
        """Refuse a drafter, a tree or a rule that cannot be had here, or not by a deterministic request."""
        speculation = request.speculation or self.default
        method, tree, accept = speculation.method, speculation.tree, speculation.accept
        if method not in self.skills.names:
            raise InputError(f"unknown drafter {method!r}; known: {', '.join(self.skills.names)}")
        if tree is not None and method not in self.skills.with_trees:
            raise InputError(f"tree {tree} needs a drafter of trees (suffix, skip, model, auto), not {method!r}")
        if accept is Accept.MATCH:
            return
        if request.params.deterministic:
            raise InputError(
                f"accept {accept} lets tokens depend on the drafter, the tree and the load, so it needs "
                "deterministic=False"
            )
        if method == AUTO or method not in self.skills.with_probabilities:
            raise InputError(f"accept {accept} needs the probabilities of drafter skip or model, not {method!r}")
        if accept is Accept.REJECTION and tree is not None and not tree.is_chain:
            raise InputError(f"accept rejection is for chains; tree {tree} needs accept recursive")


def _rows(given: Any) -> Sequence[Sequence[int]]:
    """One row of tokens as several are given."""
    return (given,) if not len(given) or isinstance(given[0], Integral) else given


def _check_prediction(request: Request, vocab_size: int) -> None:
    """Refuse alternatives that are no tokens, or more than a drafter should have to read."""
    given = request.prediction_ids
    if isinstance(given, Draft):
        if not given.is_valid(vocab_size=vocab_size, max_nodes=MAX_PREDICTED):
            most = f"at most {MAX_PREDICTED} tokens of a vocabulary of {vocab_size}"
            raise InputError(f"prediction_ids must be a Draft that is a tree of {most}")
        num_rows = len(given.leaves)
    else:
        rows = _rows(given)
        num_rows = len(rows)
        for i, row in enumerate(rows):
            where = "prediction_ids" if row is given else f"prediction_ids[{i}]"
            if not isinstance(row, Sized):
                raise InputError(f"{where} must be a row of token ids, not {kind_of(row)}")
            if len(row):
                _check_ids(f"{where}: ", row, vocab_size)
    if num_rows > MAX_PREDICTIONS:
        raise InputError(f"prediction_ids has {num_rows} alternatives; at most {MAX_PREDICTIONS} are possible")
    if (num_tokens := sum(map(len, request.predictions))) > MAX_PREDICTED:
        raise InputError(f"prediction_ids has {num_tokens} tokens; at most {MAX_PREDICTED} are possible")


def _check_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < vocab_size:
            raise InputError(f"{where}token id {token_id!r} is not in the vocabulary of {vocab_size}")
