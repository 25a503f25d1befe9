"""How results look: the line of figures, the JSON object, and drafts in colour. Pure functions of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verispec.cli.terminal import safe
from verispec.llm import Completion
from verispec.types import SampleOutput, SamplingParams, TokenEvent, TokenLogprob

GREEN, STRUCK_RED, PLAIN = "\x1b[32m", "\x1b[9;31m", "\x1b[0m"
# What an object of `as_object` may hold, and `index` and `error` of a line.
OBJECT_KEYS = frozenset(
    ("index", "error", "text", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "finish_reason", "seed",
     "digest", "stats", "prompt_tokens", "profile", "samples")
)  # fmt: skip
_DIGEST_CHARS = 12
_WHOLE_RATE = 100  # faster than this, tenths say nothing


def coloured(event: TokenEvent, token_text: Callable[[int], str]) -> str:
    """The event's text with accepted draft tokens in green and rejected ones struck through in red."""
    accepted = "".join(event.pieces[: event.num_accepted])
    rejected = "".join(map(token_text, event.rejected_ids)).replace("\n", "\\n")
    rest = "".join(event.pieces[event.num_accepted :])
    shown = f"{GREEN}{safe(accepted)}{PLAIN}" if accepted else ""
    shown += f"{STRUCK_RED}{safe(rejected)}{PLAIN}" if rejected else ""
    return shown + safe(rest)


def figures(output: SampleOutput, params: SamplingParams, *, width: int) -> str:
    """One row: prompt and generation speed, drafts, seed, digest. What finds no room in `width` is left out."""
    stats = numbers(output)
    computed = output.prompt_len - output.stats.cached_tokens
    parts = [
        f"{computed} prompt token{'s' * (computed != 1)}{_speed(stats['prompt_tokens_per_second'])}",
        f"{len(output.token_ids)} new{_speed(stats['tokens_per_second'])}",
        f"digest {output.digest[:_DIGEST_CHARS]}",
    ]
    details = [f"seed {output.seed}"] if params.temperature else []
    details += [f"drafts {stats['accepted']}/{stats['drafted']}"] if stats["drafted"] else []
    details += [f"{stats['tokens_per_pass']:.2f} per pass"]
    details += [f"{output.stats.cached_tokens} cached"] if output.stats.cached_tokens else []
    details += [f"replays {stats['replays']} ({stats['mismatches']} differed)"] if stats["replays"] else []
    for detail in details:
        if len(", ".join([*parts, detail])) <= width:
            parts.insert(-1, detail)
    return ", ".join(parts)


def _speed(rate: float | None) -> str:
    return "" if rate is None else f" {rate:.0f}/s" if rate >= _WHOLE_RATE else f" {rate:.1f}/s"


def numbers(output: SampleOutput) -> dict[str, Any]:
    """The counters and times of one sample, as plain data."""
    stats = output.stats
    num_tokens = len(output.token_ids)
    passes = stats.passes + stats.fast_passes
    return {
        "prompt_tokens_per_second": _rate(
            output.prompt_len - stats.cached_tokens, stats.arrival_time, stats.first_token_time
        ),
        "tokens_per_second": _rate(num_tokens - 1, stats.first_token_time, stats.finish_time),
        "cached_tokens": stats.cached_tokens,
        "passes": stats.passes,
        "fast_passes": stats.fast_passes,
        "draft_passes": stats.draft_passes,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "replays": stats.replays,
        "mismatches": stats.mismatches,
        "recomputed": stats.recomputed,
        "recomputed_fraction": stats.recomputed / max(1, stats.recomputed + num_tokens),
        "accepted_per_replay": stats.accepted / stats.replays if stats.replays else None,
        "preemptions": stats.preemptions,
        "tokens_per_pass": num_tokens / max(1, passes),
        "time_to_first_token": stats.time_to_first_token,
        "longest_gap": stats.longest_gap,
        "longest_stall": stats.longest_stall,
        "stall_caused": stats.stall_caused,
        "chosen": dict(stats.chosen),
        "chosen_because": stats.chosen_because or None,
        "no_draft_reason": stats.no_draft_reason if not stats.drafted else None,
        "exit_threshold": stats.exit_threshold,
        "exit_rate": stats.exit_rate,
    }


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    """Tokens per second; None where there was nothing to time."""
    return None if count < 1 or start is None or end is None or end <= start else count / (end - start)


def as_object(completion: Completion, *, drafter: str, stats: bool) -> dict[str, Any]:
    """The completion as one JSON object; with several samples, the others are under `samples`.

    Without `stats` it is a function of the request alone: no times, no counts that depend on what else ran.
    """
    first, *others = (_sample_object(sample, drafter, stats=stats) for sample in completion.samples)
    result = {
        **first,
        "prompt_tokens": len(completion.prompt_ids),
        "profile": completion.profile,
    }
    if others:
        result["samples"] = [first, *others]
    return result


def _sample_object(sample: SampleOutput, drafter: str, *, stats: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "logprobs": [entry.logprob for entry in sample.logprobs],
        "finish_reason": str(sample.finish_reason),
        "seed": sample.seed,
        "digest": sample.digest,
    }
    if stats:
        result["stats"] = {"drafter": drafter, **numbers(sample)}
    if any(entry.alternatives for entry in sample.logprobs):
        result["top_logprobs"] = _alternatives(sample.logprobs)
    if sample.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry.logprob for entry in sample.prompt_logprobs]
    if sample.error is not None:
        result["error"] = sample.error
    return result


def _alternatives(entries: tuple[TokenLogprob, ...]) -> list[list[list[float]]]:
    return [[[token_id, value] for token_id, value in entry.alternatives] for entry in entries]
