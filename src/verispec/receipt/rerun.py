"""Finds out whether what a receipt says is true: the engine runs again, with the recorded tokens as its drafts.

The target checks them in parallel canonical passes and draws its own token at each position, as it would have alone; so
a replay misses nothing, and is much faster than generating. It ends at the first token that differs. Says what is
different and where; what to make of it is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from verispec import __version__
from verispec.constraints import library_version
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.model.fields import quoted
from verispec.model.file_digest import ByteRange, FileDigest, differing_ranges
from verispec.receipt.values import BLOCK_LEN, FieldDifference, ProfileRecord, Receipt, in_order, logprob_digests
from verispec.sampling.weights import SAMPLING
from verispec.spec.recorded import RecordedDrafter
from verispec.text.detokenizer import answer_text
from verispec.types import FinishReason, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from verispec.llm import LLM

_MAX_DRAFT = 2**20  # nodes of one draft: what fits into a pass is the policy's to say


class FileDifference(NamedTuple):
    """A file of the model that is not the recorded one, and the bytes in which they differ. None: there is none."""

    recorded: FileDigest | None
    found: FileDigest | None
    ranges: tuple[ByteRange, ...]


class TokenDifference(NamedTuple):
    """The first position whose tokens differ. None: the answer had ended there."""

    position: int
    recorded: int | None
    found: int | None


class Positions(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay found. `refusal` says why nothing was run, where the receipt or the model made that impossible.

    `is_edited`: it is not what was written, going by its digest. `fields` are those that cannot be true together with
    the others or with the model here. `logprobs` are the output positions of the first block whose log-probabilities
    differ; blocks from the first differing token on are not compared.
    """

    model: str  # what it is called here
    is_edited: bool
    fields: tuple[FieldDifference, ...]
    files: tuple[FileDifference, ...]
    profile: tuple[FieldDifference, ...]
    recorded_finish: FinishReason
    found_finish: FinishReason | None = None
    token: TokenDifference | None = None
    logprobs: Positions | None = None
    num_equal: int = 0
    num_checked: int | None = None  # so many of the tokens that were drawn; None: the whole answer
    num_passes: int = 0
    error: str | None = None
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_equal(self) -> bool:
        """Whether what was to be checked was generated again, token for token, and ended for the recorded reason."""
        is_ended = self.num_checked is not None or self.found_finish is self.recorded_finish
        return self.refusal is None and self.token is None and is_ended

    @property
    def logprobs_equal(self) -> bool:
        """Whether every log-probability came out bit for bit."""
        return self.tokens_equal and self.logprobs is None

    @property
    def same_profile(self) -> bool:
        """Whether the profile here is the recorded one; only then are equal bits promised."""
        return not self.profile

    @property
    def is_sound(self) -> bool:
        """Whether nothing that was found without running it contradicts the receipt."""
        return not (self.is_edited or self.fields or self.files)

    @property
    def reproduced(self) -> bool:
        """Whether the receipt is as it was written, and everything in it that was to be checked was found again."""
        return self.is_sound and self.same_profile and self.logprobs_equal

    @property
    def agrees(self) -> bool:
        """Whether nothing contradicts the receipt: reproduced, or, on another profile, the same tokens."""
        return self.reproduced or (self.is_sound and not self.same_profile and self.tokens_equal)


def replay(
    llm: LLM, receipt: Receipt, prompt_ids: Sequence[int] | None = None, *,
    first: int | None = None, progress: Callable[[int], None] = lambda num_tokens: None,
) -> ReplayResult:  # fmt: skip
    """Run the receipt's answer again on this model and compare. A private receipt needs its prompt's ids.

    It has the engine alone, and leaves its prefix cache empty. `first` is how many tokens to check (default: all, and
    how the answer ended); `progress` is told how many were found, now and then. Raises InputError for a prompt that is
    not the receipt's, and for a receipt that this engine cannot run although nothing is wrong with it.
    """
    result = _without_running(llm, receipt)
    ids = known_prompt(receipt, prompt_ids)
    try:
        if first is not None and first < len(receipt.output.drawn_ids):
            result, receipt = replace(result, num_checked=first), _beginning(receipt, first)
        _check_runnable(llm, receipt, ids)
        watch = _Watch(receipt.output.drawn_ids, result.num_checked is not None, progress)
        return _compared(result, _rerun(llm, receipt, ids, watch), receipt, ids)
    except InputError as error:
        return _refused(result, error)


class Redrawing:
    """A replay that is drawn token by token among the requests of others: slower, and it disturbs nobody.

    Give `take` every event of `request`, if there is one, until it says that it is over. What `replay` raises is raised
    here at once.
    """

    def __init__(self, llm: LLM, receipt: Receipt, prompt_ids: Sequence[int] | None = None, *, salt: str) -> None:
        self._receipt = receipt
        self._result = _without_running(llm, receipt)
        self._ids = known_prompt(receipt, prompt_ids)
        watch = _Watch(receipt.output.drawn_ids, is_partial=False, progress=lambda num_tokens: None)
        self._following = _Following(watch, _limit(receipt, self._ids))
        self.request: Request | None = None
        try:
            _check_runnable(llm, receipt, self._ids)
            request = drawn_request(llm, receipt, self._ids, salt=salt)
            llm.thread.engine.validate(request)
            self.request = request
        except InputError as error:
            self._result = _refused(self._result, error)

    def take(self, event: TokenEvent) -> bool:
        """Whether it has shown what it can."""
        return self._following.take(event)

    @property
    def result(self) -> ReplayResult:
        """What was found by now."""
        if self.request is None:
            return self._result
        return _compared(self._result, self._following.found, self._receipt, self._ids)


def _without_running(llm: LLM, receipt: Receipt) -> ReplayResult:
    """What can be said before anything is run."""
    _check_sampling(receipt.profile)
    return ReplayResult(
        model=llm.identity.name,
        is_edited=receipt.is_edited,
        fields=receipt.contradictions() + _model_contradictions(llm, receipt),
        files=_file_differences(receipt.model.files, llm.identity.files),
        profile=_profile_differences(receipt.profile, ProfileRecord.of(llm.calibration.profile))
        + _library_differences(receipt),
        recorded_finish=receipt.output.finish_reason,
        notes=_notes(llm, receipt),
    )


def _refused(result: ReplayResult, error: InputError) -> ReplayResult:
    """Why it cannot be run. Raises that where nothing else is wrong."""
    if result.is_sound:
        raise error
    return replace(result, refusal=str(error))


def _beginning(receipt: Receipt, num_drawn: int) -> Receipt:
    """The receipt as if its answer had been that short."""
    output = receipt.output
    return replace(receipt, output=replace(output, token_ids=output.token_ids[: output.num_given + num_drawn]))


def expected_seconds(llm: LLM, receipts: Iterable[Receipt], first: int | None = None) -> float:
    """How long replays will take: prompts and recorded tokens as rows, at what such passes were measured to cost."""
    cost, total = llm.calibration.cost, 0.0
    for receipt in receipts:
        num_drawn = len(receipt.output.drawn_ids)
        num_rows = len(receipt.prompt.token_ids or ()) + receipt.output.num_given + min(num_drawn, first or num_drawn)
        shape = min(num_rows, llm.row_budget)
        total += cost.seconds(shape, shape * num_rows // 2) * num_rows / max(1, shape)
    return total


class _Watch(NamedTuple):
    """What a run is compared with while it goes on."""

    recorded: tuple[int, ...]
    is_partial: bool  # the answer goes on behind it
    progress: Callable[[int], None]

    def is_over(self, entries: Sequence[TokenLogprob]) -> bool:
        """Whether the run has shown what it can."""
        self.progress(min(len(entries), len(self.recorded)))
        is_reached = self.is_partial and len(entries) >= len(self.recorded)
        return is_reached or _first_difference(self.recorded, entries, ended=False) is not None


def _check_sampling(profile: ProfileRecord) -> None:
    recorded = dict(profile.fingerprint).get("sampling", "1")
    if recorded != SAMPLING:
        raise InputError(
            f"the receipt was made by version {recorded} of the sampling rules and this verispec has {SAMPLING}, "
            "which gives other log-probabilities; replay it with the verispec that wrote it"
        )


def known_prompt(receipt: Receipt, given: Sequence[int] | None) -> tuple[int, ...]:
    """The receipt's own prompt, or the given one, if it is that."""
    recorded = receipt.prompt.token_ids
    if given is None:
        if recorded is None:
            raise InputError("the receipt is private: it holds only a hash of its prompt, and the prompt is needed")
        return recorded
    ids = tuple(map(int, given))
    if not all(0 <= token_id < 2**31 for token_id in ids) or not receipt.prompt.matches(ids):
        edited = "; the receipt was edited" if receipt.is_edited else ""
        raise InputError(f"the given prompt is not the receipt's: it has another hash{edited}")
    return ids


def _model_contradictions(llm: LLM, receipt: Receipt) -> tuple[FieldDifference, ...]:
    """The parameters that no request to this model can have."""
    recorded, found = receipt.parameters, []
    if recorded.eos_ids != (eos_ids := in_order(llm.tokenizer.eos_ids)):
        found.append(FieldDifference("parameters.eos_ids", quoted([*recorded.eos_ids]), quoted([*eos_ids])))
    if recorded.max_len > (context_len := llm.architecture.context_len):
        found.append(FieldDifference("parameters.max_len", str(recorded.max_len), f"at most {context_len}"))
    return tuple(found)


def _notes(llm: LLM, receipt: Receipt) -> tuple[str, ...]:
    notes = []
    if receipt.verispec != __version__:
        notes.append(f"written by verispec {receipt.verispec}; this is {__version__}")
    if receipt.model.name != llm.identity.name:
        notes.append(f"the receipt calls its model {receipt.model.name}; here it is {llm.identity.name}")
    if receipt.parameters.max_len > llm.longest:
        recorded = receipt.parameters.max_len
        notes.append(f"recorded with a max_len of {recorded}; this engine serves {llm.longest}, enough for this answer")
    if receipt.output.num_given:
        notes.append(
            f"the first {receipt.output.num_given} tokens of the answer came with the request, and were not drawn"
        )
    return tuple(notes)


def _file_differences(recorded: Sequence[FileDigest], found: Sequence[FileDigest]) -> tuple[FileDifference, ...]:
    """Files are compared in their order, which is fixed; what they are called does not matter."""
    differences = []
    for one, other in zip_longest(recorded, found):
        if one is None or other is None:
            differences.append(FileDifference(one, other, ()))
        elif not one.has_same_bytes(other):
            differences.append(FileDifference(one, other, tuple(differing_ranges(one, other))))
    return tuple(differences)


def _profile_differences(recorded: ProfileRecord, found: ProfileRecord) -> tuple[FieldDifference, ...]:
    one, other = (
        {
            **dict(p.fingerprint),
            "family": ", ".join(map(str, p.family)),
            "weights_version": str(p.weights_version),
            "hash": p.hash,
        }
        for p in (recorded, found)
    )
    names = [*sorted({*one, *other} - {"hash"}), "hash"]
    return tuple(FieldDifference(n, one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n))


def _library_differences(receipt: Receipt) -> tuple[FieldDifference, ...]:
    """Another version of the library that follows constraints may allow other tokens."""
    if receipt.constraint is None or receipt.constraint.library == (found := library_version()):
        return ()
    return (FieldDifference("constraint.library", receipt.constraint.library, found),)


def _compared(result: ReplayResult, found: _Found, receipt: Receipt, prompt_ids: tuple[int, ...]) -> ReplayResult:
    recorded, num_given = receipt.output, receipt.output.num_given
    drawn_ids, first = recorded.drawn_ids, len(prompt_ids) + num_given
    token, num_equal = None, len(drawn_ids)
    entries = found.entries[: result.num_checked]
    index = _first_difference(drawn_ids, entries, ended=found.finish is not None)
    if index is not None:
        ids = [entry.token_id for entry in entries]
        token = TokenDifference(first + index, *(_at(tokens, index) for tokens in (drawn_ids, ids)))
        num_equal = index
    is_whole = token is None and result.num_checked is None
    block = _first_differing_block(recorded.logprob_digests, entries[:num_equal], whole=is_whole)
    start = first + (block or 0) * BLOCK_LEN
    return replace(
        result,
        found_finish=found.finish,
        token=token,
        logprobs=None if block is None else Positions(start, min(start + BLOCK_LEN, first + num_equal)),
        num_equal=num_given + num_equal,
        num_passes=found.num_passes,
        error=found.error,
    )


class _Found(NamedTuple):
    """What the engine generated, up to the first token that differs or to its own end. Without it, `finish` is None."""

    entries: list[TokenLogprob]
    finish: FinishReason | None
    num_passes: int
    error: str | None


def _rerun(llm: LLM, receipt: Receipt, prompt_ids: tuple[int, ...], watch: _Watch) -> _Found:
    """The answer as it comes of an engine of its own, which drafts what was recorded."""
    drafter = RecordedDrafter(prompt_ids + receipt.output.token_ids)
    max_len = min(receipt.parameters.max_len, llm.longest)
    with llm.separate_engine(
        drafters={"recorded": drafter}, max_len=max_len, max_draft=_MAX_DRAFT, prefix_cache=False
    ) as engine:
        engine.add(_request(llm, receipt, prompt_ids))
        following = _Following(watch, _limit(receipt, prompt_ids))
        for event in _events(engine):
            if following.take(event):
                break
        return following.found


def _events(engine: Engine) -> Iterator[TokenEvent]:
    while engine.has_work:
        yield from engine.step()


class _Following:
    """What the engine gives, up to its end or until enough was seen."""

    def __init__(self, watch: _Watch, limit: int) -> None:
        self._watch = watch
        self._limit = limit
        self.found = _Found([], None, 0, None)

    def take(self, event: TokenEvent) -> bool:
        """Whether nothing more has to be seen."""
        entries = self.found.entries
        entries += event.logprobs
        if (output := event.output) is not None:
            # The room here may have ended an answer that would have gone on.
            total_len = output.prompt_len + len(output.given_ids) + len(entries)
            is_cut_off = output.finish_reason is FinishReason.LENGTH and total_len < self._limit
            finish = None if is_cut_off else output.finish_reason
            self.found = _Found(entries, finish, output.stats.passes, output.error)
            return True
        self.found = self.found._replace(num_passes=self.found.num_passes + 1)
        return self._watch.is_over(entries)


def drawn_request(llm: LLM, receipt: Receipt, prompt_ids: tuple[int, ...], *, salt: str) -> Request:
    """The request as it was, for the engine that all share; the recorded length limit becomes one of tokens."""
    request = _request(llm, receipt, prompt_ids)
    max_tokens = min(_limit(receipt, prompt_ids), llm.max_len) - len(prompt_ids)
    min_tokens = min(request.params.min_tokens, max_tokens)
    params = replace(request.params, max_tokens=max_tokens, min_tokens=min_tokens)
    return replace(request, params=params, salt=salt)


def _limit(receipt: Receipt, prompt_ids: tuple[int, ...]) -> int:
    """The most positions that the answer could have had."""
    max_tokens, max_len = receipt.parameters.sampling.max_tokens, receipt.parameters.max_len
    return max_len if max_tokens is None else min(max_len, len(prompt_ids) + max_tokens)


def _check_runnable(llm: LLM, receipt: Receipt, prompt_ids: tuple[int, ...]) -> None:
    for name, ids in (("prompt.token_ids", prompt_ids), ("output.token_ids", receipt.output.token_ids)):
        if max(ids, default=0) >= llm.vocab_size:
            raise InputError(f"{name} holds {max(ids)}, which is not in the vocabulary of {llm.vocab_size}")
    total_len = len(prompt_ids) + len(receipt.output.token_ids)
    if total_len > llm.longest:
        raise InputError(
            f"the answer takes {total_len} positions of a max_len of {receipt.parameters.max_len}; at most "
            f"{llm.longest} fit here (the model's context, or the K/V slots)"
        )


def _request(llm: LLM, receipt: Receipt, prompt_ids: tuple[int, ...]) -> Request:
    """The request as it was, for the recorded sample alone: the noise goes by its number, not by those before it."""
    params = replace(receipt.parameters.sampling, n=1, logprobs=None, prompt_logprobs=None)
    return Request(
        prompt_ids,
        params,
        eos_ids=llm.tokenizer.eos_ids,
        text=partial(answer_text, llm.tokenizer, prompt_ids, params),
        first_sample=receipt.parameters.sample_index,
        committed_ids=[given_ids] if (given_ids := receipt.output.given_ids) else (),
        grammar=llm.grammar(params),
    )


def _first_difference(recorded: Sequence[int], found: Sequence[TokenLogprob], *, ended: bool) -> int | None:
    """The index of the first output token that differs; where one answer ends and the other goes on counts as well."""
    for i, (token_id, entry) in enumerate(zip(recorded, found, strict=False)):
        if token_id != entry.token_id:
            return i
    goes_on = len(found) > len(recorded) or (ended and len(found) < len(recorded))
    return min(len(recorded), len(found)) if goes_on else None


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _first_differing_block(recorded: Sequence[str], entries: Sequence[TokenLogprob], *, whole: bool) -> int | None:
    """The first block whose digest differs. Of an answer that is not `whole`, only full blocks count."""
    pairs = list(zip_longest(recorded, logprob_digests(entries)))
    compared = pairs if whole else pairs[: len(entries) // BLOCK_LEN]
    return next((i for i, (one, other) in enumerate(compared) if one != other), None)
