"""How results look: the line of figures, the JSON object, and drafts in colour. Pure functions of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verispec.cli.terminal import safe
from verispec.llm import Completion
from verispec.types import SampleOutput, TokenEvent, TokenLogprob

GREEN, STRUCK_RED, PLAIN = "\x1b[32m", "\x1b[9;31m", "\x1b[0m"


def coloured(event: TokenEvent, token_text: Callable[[int], str]) -> str:
    """The event's text with accepted draft tokens in green and rejected ones struck through in red."""
    accepted = "".join(event.pieces[: event.num_accepted])
    rejected = "".join(map(token_text, event.rejected_ids)).replace("\n", "\\n")
    rest = "".join(event.pieces[event.num_accepted :])
    shown = f"{GREEN}{safe(accepted)}{PLAIN}" if accepted else ""
    shown += f"{STRUCK_RED}{safe(rejected)}{PLAIN}" if rejected else ""
    return shown + safe(rest)


def figures(output: SampleOutput, profile: str) -> str:
    """One line: tokens, speed, tokens per target pass, drafts, seed, digest, profile."""
    stats = numbers(output)
    drafts = f"drafts {stats['accepted']}/{stats['drafted']} accepted"
    if not stats["drafted"]:
        drafts = f"nothing drafted ({stats['no_draft_reason']})" if stats["no_draft_reason"] else "nothing drafted"
    if stats["exit_threshold"] is not None:
        drafts += f" (exit below {stats['exit_threshold']:.3f})"
    if stats["replays"]:
        drafts += f", {stats['replays']} replays with {stats['mismatches']} mismatches"
    return (
        f"{len(output.token_ids)} tokens, {stats['tokens_per_second']:.1f} tok/s, "
        f"{stats['tokens_per_pass']:.2f} per pass, {drafts}, seed {output.seed}, digest {output.digest[:16]}, "
        f"profile {profile}"
    )


def numbers(output: SampleOutput) -> dict[str, Any]:
    """The counters and times of one sample, as plain data."""
    stats = output.stats
    num_tokens = len(output.token_ids)
    passes = stats.passes + stats.fast_passes
    seconds = max(1e-9, (stats.finish_time or stats.arrival_time) - stats.arrival_time)
    return {
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
        "tokens_per_second": num_tokens / seconds,
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


def as_object(completion: Completion, *, drafter: str) -> dict[str, Any]:
    """The completion as one JSON object; with several samples, the others are under `samples`."""
    first, *others = (_sample_object(sample, drafter) for sample in completion.samples)
    result = {
        **first,
        "prompt_tokens": len(completion.prompt_ids),
        "profile": completion.profile,
    }
    if others:
        result["samples"] = [first, *others]
    return result


def _sample_object(sample: SampleOutput, drafter: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "logprobs": [entry.logprob for entry in sample.logprobs],
        "finish_reason": str(sample.finish_reason),
        "cached_tokens": sample.stats.cached_tokens,
        "seed": sample.seed,
        "digest": sample.digest,
        "stats": {"drafter": drafter, **numbers(sample)},
    }
    if any(entry.alternatives for entry in sample.logprobs):
        result["top_logprobs"] = _alternatives(sample.logprobs)
    if sample.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry.logprob for entry in sample.prompt_logprobs]
    if sample.error is not None:
        result["error"] = sample.error
    return result


def _alternatives(entries: tuple[TokenLogprob, ...]) -> list[list[list[float]]]:
    return [[[token_id, value] for token_id, value in entry.alternatives] for entry in entries]
