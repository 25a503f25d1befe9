"""A turn: one sequence in one step. What runs is fixed when it is planned; draft, score and verdict are filled in once.

The scheduler makes turns, drafters fill in drafts, passes fill in scores, `judge` fills in verdicts, and `commit` reads
it all. Nobody writes into a sequence before that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from verispec.backends.pass_builder import DraftRule
from verispec.backends.protocol import DistributionHandle, Ticket
from verispec.kv import Lease
from verispec.sampling.constraint import Constraint
from verispec.sampling.rows import SampleKey
from verispec.spec.speculation import Speculation
from verispec.spec.tree import TreeShape
from verispec.types import NO_DRAFT, Draft, SamplingParams, TokenLogprob, Verdict

logger = logging.getLogger(__name__)


class SequenceView(Protocol):
    """What drafters and passes may read of a sequence: committed state, which changes by the commit of its turn alone.

    `draft_epoch` changes whenever the leased slots of a draft under way were lost.
    """

    @property
    def sequence_id(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def computed_len(self) -> int: ...
    @property
    def slots(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def speculation(self) -> Speculation: ...
    @property
    def sample_key(self) -> SampleKey: ...
    @property
    def stopping_ids(self) -> Collection[int]: ...
    @property
    def constraint(self) -> Constraint | None: ...
    @property
    def uses_probabilities(self) -> bool: ...
    @property
    def draws_plainly(self) -> bool: ...
    @property
    def is_traced(self) -> bool: ...
    @property
    def is_streamed(self) -> bool: ...
    @property
    def needs_host(self) -> bool: ...
    @property
    def is_followed(self) -> bool: ...
    @property
    def may_draft(self) -> bool: ...
    @property
    def draft_epoch(self) -> int: ...
    @property
    def prediction_ids(self) -> Sequence[Sequence[int]]: ...
    @property
    def salt(self) -> str: ...


class Pending(NamedTuple):
    """A draft that is not ready: these tokens stand behind the committed ones, and fast rounds will draw further ones.

    Token i's row, and so its K/V, is at the position behind the committed tokens plus i.
    """

    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """A chain of up to `num_nodes` tokens, or a tree of as many places, that the backend drafts in every round."""

    num_nodes: int
    rule: DraftRule

    def __len__(self) -> int:
        return self.num_nodes


Drafted = Draft | Pending | Recipe


@dataclass(slots=True, eq=False)
class CatchUp:
    """A pass by which a drafter reads committed tokens, sent before that of the turns that it drafts for. The device
    runs one behind the other, so nobody waits for its end; what it `has_lost` is to be computed again."""

    ticket: Ticket | None
    has_lost: bool = False

    def wait(self) -> None:
        """For its end, once."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.result()

    def settle(self) -> None:
        """Wait for its end. A failure costs what a drafter's other failures do: speed."""
        try:
            self.wait()
        except Exception:
            self.has_lost = True
            logger.exception("a pass by which a drafter reads committed tokens failed; it will be run again")


class Choice(NamedTuple):
    """What the policy chose for a sequence: up to `num_nodes` nodes of a drafter. `reason` says why not more.

    With `grows`, the nodes come from fast rounds over several steps: `num_drawn` of them are there, and slots for all
    of them are leased at once. `is_replay`: they are a window that is verified now; `num_drawn` of it were drawn in
    earlier steps. `waits`: they are ready, but the pass has no rows.
    `by_backend`: the backend can draft them by itself, round after round; that takes it `draft_seconds` a round, in
    which `num_tokens` are expected to be committed. `is_forced`: whether that pays or not. `is_trial`: to see
    whether it does.
    """

    drafter: str = ""
    num_nodes: int = 0
    shape: TreeShape | None = None
    grows: bool = False
    num_drawn: int = 0
    is_replay: bool = False
    waits: bool = False
    by_backend: bool = False
    draft_seconds: float = 0.0
    num_tokens: float = 1.0
    is_forced: bool = False
    is_trial: bool = False
    reason: str = ""
    because: str = ""

    def is_like(self, other: Choice) -> bool:
        """Whether the same is drafted."""
        return (self.drafter, self.num_nodes, self.shape) == (other.drafter, other.num_nodes, other.shape)


Places = tuple[Constraint | None, ...]  # behind the committed tokens, then behind each node; None: never reached
States = tuple[tuple[str, Hashable], ...]  # by drafter: what names its curves, a draft under way, or a refusal
PLAIN = Choice()
NO_ROOM = Choice(reason="no room for a draft")


@dataclass(slots=True, eq=False)
class Score:
    """What the target says of a turn's rows: entry 0 follows the committed tokens, entry 1 + i node i of the draft.

    Of a growing draft, entry i follows the i-th token drawn. Draws are empty while the prompt is not complete.
    `prompt_logprobs` are those of the prompt tokens behind each row. `distribution` has the rows from `first_row` on,
    where probabilities judge the draft or are shown; `node_logprobs` are then the target's, raw, of each node's token.
    """

    draws: list[int]
    logprobs: list[float]
    alternatives: list[tuple[tuple[int, float], ...]] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    distribution: DistributionHandle | None = None
    first_row: int = 0
    node_logprobs: tuple[float, ...] = ()


NO_SCORE = Score([], [])


@dataclass(slots=True, eq=False)
class Turn:
    """`num_pending` committed tokens from position `start` on get rows, then the draft's nodes; row i uses `slots[i]`.

    `table_slots` are the slots of positions `table_start`.. that the backend's table does not have yet. `epoch` tells a
    stale turn from a current one. `completes`: every pending token has its row, so the target draws a new token.
    A growing draft is drawn in `num_rounds` rounds without the host; a turn without a draft may go on for as many, each
    with a row for the last draw; one that the backend drafts has up to as many, each with a draft and a verdict of its
    own. They come back as `rounds`, turns of one round each. A turn planned while an earlier one of its sequence was in
    the air, the `num_behind`-th in a row, begins at `start` at the latest, until it has landed.
    """

    sequence: SequenceView
    epoch: int
    seq_row: int
    is_canonical: bool
    start: int
    num_pending: int
    completes: bool
    slots: list[int]
    table_start: int
    table_slots: Sequence[int]
    room: int = 0  # tokens of a draft that could still be committed: the one behind it must fit too
    table_room: int = 0  # positions of the backend's table behind the last committed token
    store_lens: tuple[int, ...] = ()
    states: States = ()  # where the sequence stands with its drafters, if they were asked
    choice: Choice = PLAIN
    num_rounds: int = 1
    num_behind: int = 0
    is_stale: bool = False  # the sequence went on without it
    # Filled in by drafters,
    draft: Drafted = NO_DRAFT
    places: Places = ()  # where a draft stands in its grammar; of a growing one, the last place alone
    num_draft_passes: int = 0
    note: str = ""  # why nothing was drafted after all
    exit_state: tuple[float, float] | None = None  # threshold and rate of the adaptive exit
    catch_up: CatchUp | None = None  # with what its draft says to be stored
    # by the passes,
    score: Score = NO_SCORE
    path_places: list[int] | None = None  # of a tree that the backend drafted: which rows behind the first are its path
    rounds: list[Turn] = field(default_factory=list)
    seconds: float = 0.0  # of the pass that verified it
    # and by the judge.
    verdict: Verdict | None = None

    @property
    def rides(self) -> bool:
        """Whether it goes on for further rounds, each a row for the last draw."""
        return self.num_rounds > 1 and not self.choice.drafter

    @property
    def is_fed(self) -> bool:
        """Whether its last draw is fed back."""
        return self.rides or isinstance(self.draft, Pending | Recipe)

    @property
    def is_resident(self) -> bool:
        """Whether the backend can run its rounds by itself: nothing of them needs the host."""
        return self.choice.by_backend and not self.sequence.needs_host

    @property
    def is_streams_first(self) -> bool:
        """Whether a client waits for the first token, which it draws."""
        return self.sequence.is_streamed and self.start < self.sequence.prompt_len

    @property
    def judges_by_probability(self) -> bool:
        """Whether probabilities judge the draft: the request asked for it, and the drafter has them."""
        return isinstance(self.draft, Draft) and self.sequence.uses_probabilities and bool(self.draft.proposals)

    @property
    def shows_distributions(self) -> bool:
        """Whether the target's distributions are needed: to judge the draft, or to show it."""
        return self.judges_by_probability or (
            self.sequence.is_traced and isinstance(self.draft, Draft) and len(self.draft) > 0
        )


@dataclass(slots=True, eq=False)
class Cohort:
    """The turns of all sequences that only decode, as columns: `num_rounds` rounds of one row each.

    Its slots belong to `lease` until they are committed: round by round, one for each sequence.
    `is_ahead`: planned while earlier rounds of the same sequences were in the air, so their tokens and positions are
    known to the backend alone. `feeds`: the backend remembers where it left the sequences. `choices`: why sequences do
    not draft that may; these look again after a few rounds.
    """

    sequences: list[SequenceView]
    epochs: list[int]
    seq_rows: list[int]
    positions: list[int]  # of the first round, at most
    is_canonical: bool
    lease: Lease
    num_rounds: int = 1
    is_ahead: bool = False
    feeds: bool = False
    choices: Sequence[Choice] = ()
    # Filled in by the pass: a list per sequence, -1 where it had ended or could not draw.
    draws: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0


class Step(NamedTuple):
    """What runs between two commits: the turns of single sequences, and cohorts, canonical or fast."""

    turns: Sequence[Turn] = ()
    cohorts: Sequence[Cohort] = ()
