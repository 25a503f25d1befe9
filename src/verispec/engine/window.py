"""Tokens of one sequence that regular decoding drew in fast passes and no canonical pass has confirmed yet.

A window knows tokens, not slots: while it has n of them the sequence's lease has n slots, one for the last committed
token and one for each but the newest. Nothing in it is ever shown or cached; dropping it loses work, never state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from verispec.types import TextSink, Verdict


@dataclass(slots=True)
class Window:
    """Grows by `push` to `target_len` tokens. `is_over`: a finish was met in it, which is a reason to verify it now."""

    target_len: int
    drafter: str
    sink: TextSink | None
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False

    @classmethod
    def behind(cls, sink: TextSink, *, target_len: int, drafter: str) -> Window:
        """An empty window behind the text that was committed. A sink that cannot fork will fail at commit, not here."""
        try:
            return cls(target_len, drafter, sink.fork())
        except Exception:  # the sink belongs to the request, and so does its failure
            return cls(target_len, drafter, None)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_ready(self) -> bool:
        """Whether it should be verified now."""
        return self.is_over or len(self) >= self.target_len

    def push(self, token_id: int, *, stopping_ids: Collection[int], may_stop: bool, is_last: bool) -> None:
        """Take the next token; a negative one says that nothing could be drawn."""
        if token_id < 0:
            self.is_over = True
            return
        self.token_ids.append(token_id)
        stops = may_stop and token_id in stopping_ids
        self.is_over = self.is_over or is_last or stops or self._stops_text(token_id, may_stop=may_stop)

    def num_confirmed(self, verdict: Verdict) -> int:
        """How many of its tokens the verdict commits: the path, and the target's own token if it is the next one."""
        count = len(verdict.path)
        return count + (count < len(self) and self.token_ids[count] == verdict.bonus_id)

    def drop_front(self, count: int) -> None:
        """The first `count` tokens have been committed; the others still stand."""
        del self.token_ids[:count]

    def _stops_text(self, token_id: int, *, may_stop: bool) -> bool:
        if self.sink is None:
            return True
        try:
            return self.sink.push(token_id, may_stop=may_stop).stopped
        except Exception:  # commit will meet the same failure, and end the request with it
            self.sink = None
            return True
