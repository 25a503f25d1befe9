"""The one place for the engine's defaults. Frozen and validated at construction; an unknown option is an error."""

from dataclasses import dataclass

from verispec.arguments import check_bool, check_int
from verispec.errors import InputError

MAX_SIZE = 2**30  # slots and rows are 32-bit numbers on every backend


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one engine. None of them changes the tokens of a request, except that `max_len` ends it.

    `num_slots` is the K/V capacity in tokens. `max_len` bounds prompt plus output of one request (None: the model's
    context or the capacity, whichever is less). `row_budget` bounds the rows of one canonical pass, `stream_row_budget`
    those that drafts fill, and all rows while somebody streams, whose next token waits for the pass (None: no less).
    `max_running` bounds the sequences that run at once, `max_waiting` the queue behind them, `max_draft` the tokens of
    one path of a draft (None: each drafter's own default). `max_burst` bounds the rounds a backend runs by itself;
    `depth` is how many steps may be in the air at once. `history_len` tokens of earlier answers are kept to draft from;
    with `shares_history` requests draft from the answers of every salt, and say nothing of their drafts, not even by
    how many tokens an event has, unless they are traced: these draft from their own text alone.
    """

    num_slots: int = 8192
    max_len: int | None = None
    row_budget: int = 128
    stream_row_budget: int | None = None
    max_running: int = 32
    max_waiting: int = 4096
    max_draft: int | None = None
    max_burst: int = 16
    depth: int = 1
    prefix_cache: bool = True
    history_len: int = 2**15
    shares_history: bool = False

    def __post_init__(self) -> None:
        lowest = {"num_slots": 2, "row_budget": 1, "max_running": 1, "max_waiting": 1, "max_draft": 0, "max_len": 2}
        lowest |= {"max_burst": 1, "depth": 1, "history_len": 0, "stream_row_budget": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None or name not in ("max_draft", "max_len", "stream_row_budget"):
                object.__setattr__(self, name, check_int(name, value, low, MAX_SIZE))
        for name in ("prefix_cache", "shares_history"):
            check_bool(name, getattr(self, name))
        if self.max_len is not None and self.max_len > self.num_slots:
            raise InputError(f"max_len must be from 2 to num_slots ({self.num_slots}), not {self.max_len}")


DEFAULTS = EngineConfig()
