"""How results look: the line of figures, the JSON object, drafts in colour and as trees. Pure functions of outputs."""

from collections.abc import Callable, Iterator
from typing import Any

from verispec.cli.terminal import safe
from verispec.llm import Completion
from verispec.types import NO_PARENT, DraftTrace, SampleOutput, SamplingParams, TokenEvent, TokenLogprobs

GREEN, RED, STRUCK_RED, BOLD, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[9;31m", "\x1b[1m", "\x1b[0m"
ACCEPTED, REJECTED, BONUS = "accepted", "rejected", "the target's own"
# What an object of `as_object` may hold, and `index` and `error` of a line.
OBJECT_KEYS = frozenset(
    ("index", "error", "text", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "finish_reason", "seed",
     "digest", "stats", "prompt_tokens", "profile", "samples")
)  # fmt: skip
_COUNTERS = (
    "cached_tokens", "passes", "fast_passes", "draft_passes", "drafted", "accepted", "replays", "mismatches",
    "recomputed", "preemptions", "time_to_first_token", "longest_gap", "longest_stall", "stall_caused",
    "exit_threshold", "exit_rate",
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
    stats, num_tokens = output.stats, len(output.token_ids)
    computed = output.prompt_len - stats.cached_tokens
    return {
        "prompt_tokens_per_second": _rate(computed, stats.arrival_time, stats.first_token_time),
        "tokens_per_second": _rate(num_tokens - 1, stats.first_token_time, stats.finish_time),
        **{name: getattr(stats, name) for name in _COUNTERS},
        "recomputed_fraction": stats.recomputed / max(1, stats.recomputed + num_tokens),
        "accepted_per_replay": stats.accepted / stats.replays if stats.replays else None,
        "tokens_per_pass": num_tokens / max(1, stats.passes + stats.fast_passes),
        "chosen": dict(stats.chosen),
        "chosen_because": stats.chosen_because or None,
        "no_draft_reason": stats.no_draft_reason if not stats.drafted else None,
    }


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    """Tokens per second; None where there was nothing to time."""
    return None if count < 1 or start is None or end is None or end <= start else count / (end - start)


def as_object(completion: Completion, *, drafter: str, stats: bool) -> dict[str, Any]:
    """The completion as one JSON object; with several samples, the others are under `samples`.

    Without `stats` it is a function of the request alone: no times, no counts that depend on what else ran.
    """
    first, *others = (_sample_object(sample, drafter, stats=stats) for sample in completion.samples)
    result = {**first, "prompt_tokens": len(completion.prompt_ids), "profile": completion.profile}
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


def _alternatives(entries: TokenLogprobs) -> list[list[list[float]]]:
    return [[[token_id, value] for token_id, value in entry.alternatives] for entry in entries]


def tree_lines(trace: DraftTrace, token_text: Callable[[int], str], *, paint: bool) -> Iterator[str]:
    """One line per node, children under their parent; the accepted path is green, the rest red.

    The bonus token, which the target adds behind the path, is marked.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(trace.draft.parents):
        children.setdefault(parent, []).append(node)
    end = trace.verdict.path[-1] if trace.verdict.path else NO_PARENT

    def below(parent: int, indent: str) -> Iterator[str]:
        nodes = children.get(parent, [])
        for i, node in enumerate(nodes):
            is_last = i == len(nodes) - 1 and parent != end
            yield _node_line(trace, node, f"{indent}{'└─' if is_last else '├─'} ", token_text, paint=paint)
            yield from below(node, indent + ("   " if is_last else "│  "))
        if parent == end:
            yield _painted(f"{indent}└─ {_quoted(trace.verdict.bonus_id, token_text)}  {BONUS}", BOLD, paint)

    return below(NO_PARENT, "")


def _node_line(trace: DraftTrace, node: int, stem: str, token_text: Callable[[int], str], *, paint: bool) -> str:
    draft, is_accepted = trace.draft, node in trace.verdict.path
    guessed = f"{draft.probabilities[node]:.3f}" if draft.probabilities else "  -  "
    text = (
        f"{_quoted(draft.token_ids[node], token_text)}  draft {guessed}  target {trace.target_probabilities[node]:.3f}"
    )
    mark = ACCEPTED if is_accepted else REJECTED
    return stem + _painted(f"{text}  {mark}", GREEN if is_accepted else RED, paint)


def _quoted(token_id: int, token_text: Callable[[int], str]) -> str:
    return safe(repr(token_text(token_id)))


def _painted(text: str, colour: str, paint: bool) -> str:
    return f"{colour}{text}{PLAIN}" if paint else text
