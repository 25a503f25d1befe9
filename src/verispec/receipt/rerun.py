"""Finds out whether what a receipt says is true: the engine runs again, with the recorded tokens as its drafts.

The target checks them in parallel canonical passes and draws its own token at each position, as it would have alone; so
a replay is exact, and much faster than generating. It ends at the first token that differs. Says what is different and
where; what to make of it is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from verispec import __version__
from verispec.engine import Request
from verispec.errors import InputError
from verispec.model.file_digest import ByteRange, FileDigest, differing_ranges
from verispec.receipt.values import BLOCK_LEN, ProfileRecord, Receipt, chain, output_blocks
from verispec.spec.recorded import RecordedDrafter
from verispec.text.detokenizer import TextStream
from verispec.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from verispec.llm import LLM

_MAX_DRAFT = 2**20  # nodes of one draft: what fits into a pass is the planner's to say


class FileDifference(NamedTuple):
    """A file of the model that is not the recorded one, and the bytes in which they differ. None: there is none."""

    recorded: FileDigest | None
    found: FileDigest | None
    ranges: tuple[ByteRange, ...]


class FieldDifference(NamedTuple):
    """A field of the profile whose value here is not the recorded one. None: there is none."""

    name: str
    recorded: str | None
    found: str | None


class TokenDifference(NamedTuple):
    """The first position whose tokens differ. None: the answer had ended there."""

    position: int
    recorded: int | None
    found: int | None


class Positions(NamedTuple):
    """Absolute positions [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay found. `refusal` says why nothing was run, where the receipt or the model made that impossible.

    `logprobs` are the output positions of the first block whose log-probabilities differ; blocks from the first
    differing token on are not compared.
    """

    edited: tuple[str, ...]
    files: tuple[FileDifference, ...]
    profile: tuple[FieldDifference, ...]
    recorded_finish: FinishReason
    found_finish: FinishReason | None = None
    token: TokenDifference | None = None
    logprobs: Positions | None = None
    num_equal: int = 0
    num_passes: int = 0
    error: str | None = None
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_equal(self) -> bool:
        """Whether the answer was generated again, token for token, and ended for the recorded reason."""
        return self.refusal is None and self.token is None and self.found_finish is self.recorded_finish

    @property
    def logprobs_equal(self) -> bool:
        """Whether every log-probability came out bit for bit."""
        return self.tokens_equal and self.logprobs is None

    @property
    def same_profile(self) -> bool:
        """Whether the profile here is the recorded one; only then are equal bits promised."""
        return not self.profile

    @property
    def reproduced(self) -> bool:
        """Whether the receipt is as it was written, and everything in it was found again."""
        return not (self.edited or self.files or self.profile) and self.logprobs_equal

    @property
    def agrees(self) -> bool:
        """Whether nothing contradicts the receipt: reproduced, or, on another profile, the same tokens."""
        return not (self.edited or self.files) and (self.reproduced or (not self.same_profile and self.tokens_equal))


def replay(llm: LLM, receipt: Receipt, prompt_ids: Sequence[int] | None = None) -> ReplayResult:
    """Run the receipt's answer again on this model and compare. A private receipt needs its prompt's ids.

    No stream of the LLM may be open; its prefix cache is empty afterwards. Raises InputError for a prompt that is not
    the receipt's, and for a receipt that this engine cannot run although nothing is wrong with it.
    """
    ids = _prompt_ids(receipt, prompt_ids)
    result = ReplayResult(
        edited=receipt.edited_sections(),
        files=_file_differences(receipt.model.files, llm.identity.files),
        profile=_profile_differences(receipt.profile, ProfileRecord.of(llm.calibration.profile)),
        recorded_finish=receipt.output.finish_reason,
        notes=_notes(llm, receipt),
    )
    try:
        return _compared(result, llm, receipt, ids)
    except InputError as error:
        if result.edited or result.files:
            return replace(result, refusal=str(error))
        raise


def _prompt_ids(receipt: Receipt, given: Sequence[int] | None) -> tuple[int, ...]:
    recorded = receipt.prompt.token_ids
    if given is None:
        if recorded is None:
            raise InputError("the receipt is private: it holds only a hash of its prompt, and the prompt is needed")
        return recorded
    ids = tuple(map(int, given))
    if not all(0 <= token_id < 2**31 for token_id in ids) or not receipt.prompt.matches(ids):
        said = "was edited since it was written" if "prompt" in receipt.edited_sections() else "is another one"
        raise InputError(f"the given prompt is not the receipt's: by its hash, the receipt's {said}")
    return ids


def _notes(llm: LLM, receipt: Receipt) -> tuple[str, ...]:
    notes = []
    if receipt.verispec != __version__:
        notes.append(f"written by verispec {receipt.verispec}; this is {__version__}")
    if receipt.parameters.max_len > llm.longest:
        recorded = receipt.parameters.max_len
        notes.append(f"recorded with a max_len of {recorded}; this engine serves {llm.longest}, enough for this answer")
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
        {**dict(p.fingerprint), "family": ", ".join(map(str, p.family)), "kv_dtype": p.kv_dtype, "hash": p.hash}
        for p in (recorded, found)
    )
    names = [*sorted({*one, *other} - {"hash"}), "hash"]
    return tuple(FieldDifference(n, one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n))


def _compared(result: ReplayResult, llm: LLM, receipt: Receipt, prompt_ids: tuple[int, ...]) -> ReplayResult:
    recorded = receipt.output
    found = _rerun(llm, receipt, prompt_ids)
    index = _first_difference(recorded.token_ids, found.entries, ended=found.finish is not None)
    num_equal = len(recorded.token_ids) if index is None else index
    token = None
    if index is not None:
        ids = [entry.token_id for entry in found.entries]
        token = TokenDifference(len(prompt_ids) + index, *(_at(tokens, index) for tokens in (recorded.token_ids, ids)))
    return replace(
        result,
        found_finish=found.finish,
        token=token,
        logprobs=_first_differing_block(
            recorded.chain, len(prompt_ids), found.entries[:num_equal], whole=token is None
        ),
        num_equal=num_equal,
        num_passes=found.num_passes,
        error=found.error,
    )


class _Found(NamedTuple):
    """What the engine generated, up to the first token that differs or to its own end."""

    entries: list[TokenLogprob]
    finish: FinishReason | None
    num_passes: int
    error: str | None


def _rerun(llm: LLM, receipt: Receipt, prompt_ids: tuple[int, ...]) -> _Found:
    recorded = receipt.output.token_ids
    _check_runnable(llm, receipt, prompt_ids)
    drafter = RecordedDrafter(prompt_ids + recorded)
    max_len = min(receipt.parameters.max_len, llm.longest)
    entries: list[TokenLogprob] = []
    num_steps = 0
    with llm.separate_engine(
        drafters={"recorded": drafter}, max_len=max_len, max_draft=_MAX_DRAFT, prefix_cache=False
    ) as engine:
        engine.add(_request(llm, receipt, prompt_ids))
        while engine.has_work:
            num_steps += 1
            for event in engine.step():
                entries += event.logprobs
                if event.output is not None:
                    return _Found(entries, event.output.finish_reason, event.output.stats.passes, event.output.error)
            if _first_difference(recorded, entries, ended=False) is not None:
                break
    return _Found(entries, None, num_steps, None)


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
    parameters = receipt.parameters
    params = replace(parameters.sampling, n=1, seed=parameters.seed, logprobs=None, prompt_logprobs=None)
    return Request(
        prompt_ids,
        params,
        eos_ids=parameters.eos_ids,
        text=lambda: TextStream(llm.tokenizer, params.stop),
        first_sample=parameters.sample_index,
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


def _first_differing_block(
    recorded: Sequence[str], prompt_len: int, entries: Sequence[TokenLogprob], *, whole: bool
) -> Positions | None:
    """The first block whose link differs. Without the `whole` answer, the block that the entries end in is left out.

    The chain starts at the recorded first value: an edit before the output does not hide where the output differs.
    """
    blocks = list(output_blocks(prompt_len, len(entries)))
    links = chain(bytes.fromhex(recorded[0]), prompt_len=prompt_len, entries=entries)
    if not whole and blocks and blocks[-1][1] % BLOCK_LEN:
        blocks.pop()
    for i, block in enumerate(blocks, start=1):
        if i >= len(recorded) or links[i] != recorded[i]:
            return Positions(*block)
    if whole and len(recorded) != len(links):
        end = prompt_len + len(entries)
        return Positions(end, end + 1)
    return None
