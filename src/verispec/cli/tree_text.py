"""Draft trees as text: each node's token, how likely the drafter and the target found it, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from verispec.cli.terminal import safe
from verispec.types import NO_PARENT, DraftTrace

GREEN, RED, BOLD, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
ACCEPTED, REJECTED, BONUS = "accepted", "rejected", "the target's own"


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
