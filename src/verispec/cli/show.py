"""How results look: the line of figures, drafts in colour and as trees. Pure functions of outputs."""

from collections.abc import Callable, Iterator

from verispec.batch.prompts import numbers
from verispec.cli.terminal import safe
from verispec.types import NO_PARENT, DraftTrace, SampleOutput, SamplingParams, TokenEvent

GREEN, RED, STRUCK_RED, BOLD, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[9;31m", "\x1b[1m", "\x1b[0m"
ACCEPTED, REJECTED, BONUS = "accepted", "rejected", "the target's own"
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
    details += [f"{stats['tokens_per_pass']:.2f} per pass"] if stats["tokens_per_pass"] is not None else []
    details += [f"{output.stats.cached_tokens} cached"] if output.stats.cached_tokens else []
    details += [f"replays {stats['replays']} ({stats['mismatches']} differed)"] if stats["replays"] else []
    for detail in details:
        if len(", ".join([*parts, detail])) <= width:
            parts.insert(-1, detail)
    return ", ".join(parts)


def _speed(rate: float | None) -> str:
    return "" if rate is None else f" {rate:.0f}/s" if rate >= _WHOLE_RATE else f" {rate:.1f}/s"


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
