"""Decode, verify, rollback: N tokens drawn in fast rounds under dynamic batching, then replayed in one canonical pass.

    committed tokens | window: drawn in fast rounds, K/V in leased slots
    ... x x x x  L-1 | w0 w1 w2 ... w(N-1)

Round i draws w(i) at the row of the token before it. A full window is a draft like any other: the verification runs
the row of token L-1 and of every w canonically, into the same slots, so fast K/V never survives; tokens up to the first
that the target does not draw itself are committed, and the rest is forgotten. Rollback is forgetting.
Where the rows of a pass do not suffice for a whole window, its front is verified.
Windows are dropped, never repaired: when their slots were lost (`draft_epoch`), or when a draw failed.

A backend that has cheaper weights draws windows on those (`on_cheaper_weights`). Nothing else may run on them, so such
a window shares its passes with other windows alone, and the backend draws and replays it by itself, round after round:
it is a chain that the whole model drafts for itself.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend
from verispec.errors import InputError
from verispec.spec.drafter import Curve, Held, NotYet, Refusal
from verispec.spec.growth import DraftModel
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig, Source
from verispec.spec.rate import Rate
from verispec.spec.turn import Pending, SequenceView, Turn
from verispec.types import Draft

_FINAL = Refusal("what fast passes give this request is final already")
_FIRST = NotYet("the first token comes with the prompt")
_OFF = Refusal("the window length is 0")
_KEY = "window"
_CHEAP_AGREEMENT = 0.85  # believed of cheaper weights until some of their windows were judged


def on_cheaper_weights(backend: Backend, cost: CostTable, config: ModelDrafterConfig) -> ModelDrafter:
    """Windows of up to `config.max_draft` tokens, or as many as promise most; `cost` is T of passes on such weights."""
    source = Source(DraftModel(backend, cost, only_drafts=True), _CHEAP_AGREEMENT, _CHEAP_AGREEMENT)
    return ModelDrafter("a window on cheaper weights", lambda: source, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """N, and what is assumed of acceptance until it is seen: the prior counts as `prior_weight` tokens."""

    window_len: int = 32
    prior_acceptance: float = 0.999
    prior_weight: float = 1000.0
    memory: float = 0.97  # of a replay

    def __post_init__(self) -> None:
        if self.window_len < 0:
            raise InputError(f"window_len must be at least 0, not {self.window_len}")


@dataclass(slots=True)
class _Window:
    """`target_len` tokens are wanted; `is_over`: a stop was drawn or nothing could be, so it is verified as it is."""

    target_len: int
    draft_epoch: int
    start: int  # the committed tokens it stands behind
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False

    @property
    def is_ready(self) -> bool:
        return self.is_over or len(self.token_ids) >= self.target_len


class DecodeDrafter:
    """One window per sequence; acceptance is one running rate over all sequences."""

    has_probabilities = False
    has_trees = False
    is_companion = False
    needs_cheap_rows = False

    def __init__(self, config: DecodeConfig | None = None) -> None:
        self._config = config or DecodeConfig()
        self._rate = Rate.fading(self._config.prior_acceptance, self._config.prior_weight, self._config.memory)
        self._windows: dict[int, _Window] = {}
        self._curves: tuple[float, tuple[Curve, ...]] | None = None  # with the rate they were made for

    @property
    def version(self) -> int:
        return self._rate.version

    def state(self, sequence: SequenceView) -> str | Refusal | Held:
        """A window under way, or whether one can be opened."""
        window = self._current(sequence)
        if window is not None:
            return Held(len(window.token_ids), window.target_len, window.is_ready)
        if not sequence.params.deterministic:
            return _FINAL
        if len(sequence.token_ids) == sequence.prompt_len or sequence.computed_len + 1 < len(sequence.token_ids):
            return _FIRST
        return _KEY if self._config.window_len else _OFF

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        rate = self._rate.value
        if self._curves is None or self._curves[0] != rate:
            self._curves = rate, (Curve.chain(self._config.window_len, rate, by_fast_rounds=True),)
        return self._curves[1]

    def draft(self, turns: Sequence[Turn]) -> list[Draft | Pending]:
        """The window as a chain where it is to be verified; otherwise it goes on growing."""
        return [self._draft(turn) for turn in turns]

    def _draft(self, turn: Turn) -> Draft | Pending:
        sequence = turn.sequence
        window = self._current(sequence)
        if window is None:
            target_len = min(turn.choice.num_nodes, len(turn.slots) - 1)
            window = _Window(target_len, sequence.draft_epoch, len(sequence.token_ids))
            self._windows[sequence.sequence_id] = window
        if turn.choice.grows:
            return Pending(tuple(window.token_ids))
        return Draft.chain(window.token_ids[: turn.choice.num_nodes])

    def observe(self, turn: Turn) -> None:
        """Fast rounds grow the window; a replay ends it and moves the acceptance."""
        sequence_id = turn.sequence.sequence_id
        if turn.verdict is not None:
            self._windows.pop(sequence_id, None)
            self._rate.observe_chain(len(turn.verdict.path), len(turn.draft))
        elif (window := self._windows.get(sequence_id)) is not None and turn.score.draws:
            drawn = [token_id for token_id in turn.score.draws if token_id >= 0]
            window.token_ids += drawn
            stops = drawn and drawn[-1] in turn.sequence.stopping_ids
            window.is_over = len(drawn) < turn.num_rounds or bool(stops)

    def forget(self, sequence: SequenceView) -> None:
        self._windows.pop(sequence.sequence_id, None)

    def _current(self, sequence: SequenceView) -> _Window | None:
        window = self._windows.get(sequence.sequence_id)
        if window is None:
            return None
        if window.draft_epoch != sequence.draft_epoch or window.start != len(sequence.token_ids):
            del self._windows[sequence.sequence_id]
            return None
        return window
