"""What a replay found, in words and as a JSON object. Pure functions of results."""

from collections.abc import Callable
from typing import Any

from verispec.receipt import Receipt, ReplayResult
from verispec.receipt.rerun import FileDifference
from verispec.receipt.values import BLOCK_LEN

_MAX_RANGES = 8


def as_text(result: ReplayResult, receipt: Receipt, token_text: Callable[[int], str]) -> str:
    """The verdict on one line, and what it rests on in indented lines."""
    return "\n  ".join([_verdict(result, receipt, token_text), *_details(result)])


def as_object(result: ReplayResult, receipt: Receipt) -> dict[str, Any]:
    """The same as plain data."""
    token, block = result.token, result.logprobs
    return {
        "reproduced": result.reproduced,
        "agrees": result.agrees,
        "same_profile": result.same_profile,
        "tokens_equal": result.tokens_equal,
        "logprobs_equal": result.logprobs_equal,
        "edited": result.is_edited,
        "field_differences": [difference._asdict() for difference in result.fields],
        "model_differences": [_file_object(difference) for difference in result.files],
        "profile_differences": [difference._asdict() for difference in result.profile],
        "first_token_difference": None if token is None else token._asdict(),
        "first_logprob_difference": None if block is None else block._asdict(),
        "recorded_finish": str(result.recorded_finish),
        "found_finish": None if result.found_finish is None else str(result.found_finish),
        "num_tokens": len(receipt.output.token_ids),
        "num_equal": result.num_equal,
        "num_checked": result.num_checked,
        "passes": result.num_passes,
        "profile": receipt.profile.hash,
        "error": result.error or result.refusal,
        "notes": list(result.notes),
    }


def _verdict(result: ReplayResult, receipt: Receipt, token_text: Callable[[int], str]) -> str:
    if result.reproduced:
        passes = _count(result.num_passes, "pass")
        return (
            f"reproduced: {_checked(result, receipt)}, in {passes}, "
            f"model {result.model}, profile {receipt.profile.hash}"
        )
    if result.agrees:
        return f"checked on another profile: tokens equal, {_logprobs(result)}"
    return f"NOT reproduced: {_reason(result, token_text)}"


def _checked(result: ReplayResult, receipt: Receipt) -> str:
    tokens, count = _count(len(receipt.output.token_ids), "token"), result.num_checked
    if count is None:
        return f"{tokens} with log-probabilities"
    return f"the first {count} of {tokens}, and log-probabilities of {count // BLOCK_LEN * BLOCK_LEN}"


def _reason(result: ReplayResult, token_text: Callable[[int], str]) -> str:
    """The first thing that contradicts the receipt."""
    if result.refusal is not None:
        return f"it cannot be run: {result.refusal}"
    if result.token is not None:
        recorded = _token(result.token.recorded, str(result.recorded_finish), token_text)
        found = _token(result.token.found, result.error or str(result.found_finish), token_text)
        return f"position {result.token.position} differs: recorded {recorded}, found {found}"
    if not result.tokens_equal:
        found = "goes on" if result.found_finish is None else f"ended with {result.found_finish}"
        return f"the tokens are equal, but the answer {found}, not {result.recorded_finish}"
    if result.same_profile and not result.logprobs_equal:
        return f"tokens equal, {_logprobs(result)}"
    untrue = "the receipt cannot be true" if result.fields else "the model differs"
    return f"{'the receipt was edited' if result.is_edited else untrue}; tokens equal, {_logprobs(result)}"


def _logprobs(result: ReplayResult) -> str:
    if result.logprobs is None:
        return "log-probabilities equal"
    return f"log-probabilities differ, first in positions {result.logprobs.start} to {result.logprobs.end - 1}"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _token(token_id: int | None, ending: str, token_text: Callable[[int], str]) -> str:
    return f"the end ({ending})" if token_id is None else f"token {token_id} {token_text(token_id)!r}"


def _details(result: ReplayResult) -> list[str]:
    lines = []
    if result.is_edited:
        is_named = result.fields or result.files or result.profile or not result.logprobs_equal
        where = "" if is_named else ": a name, the version, the digest, or a parameter that does not change the answer"
        lines.append(f"the receipt was edited since it was written{where}")
    lines += [f"{name} is {recorded}, but must be {found}" for name, recorded, found in result.fields]
    lines += [_file_text(difference) for difference in result.files]
    if result.profile:
        fields = (f"{d.name} is {d.found or 'absent'} here, {d.recorded or 'absent'} there" for d in result.profile)
        lines.append("not the receipt's profile, so equal bits are not promised: " + "; ".join(fields))
    if result.token is not None and result.logprobs is not None:
        lines.append(f"before that, {_logprobs(result)}")
    return lines + [f"note: {note}" for note in result.notes]


def _file_text(difference: FileDifference) -> str:
    recorded, found, ranges = difference
    if recorded is None or found is None:
        name = (recorded or found).name  # type: ignore[union-attr]
        return f"the model differs: {name} {'is not in the receipt' if recorded is None else 'is missing here'}"
    shown = ", ".join(f"{r.start} to {r.end - 1}" for r in ranges[:_MAX_RANGES])
    more = f" and {len(ranges) - _MAX_RANGES} more ranges" if len(ranges) > _MAX_RANGES else ""
    sizes = f" ({recorded.nbytes} bytes recorded, {found.nbytes} here)" if recorded.nbytes != found.nbytes else ""
    where = f"somewhere in bytes {shown}{more}" if ranges else "in its checksum only"
    return f"the model differs: {found.name} is not the recorded {recorded.name}, {where}{sizes}"


def _file_object(difference: FileDifference) -> dict[str, Any]:
    recorded, found, ranges = difference
    return {
        "recorded": None if recorded is None else recorded.name,
        "found": None if found is None else found.name,
        "ranges": [list(byte_range) for byte_range in ranges],
    }
