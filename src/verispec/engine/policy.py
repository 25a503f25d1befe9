"""What a sequence drafts, looked up: a table of choices by drafter, load and context, made anew as acceptance moves.

An entry answers: with these rows running anyway and this many sequences drafting, which number of nodes gives most
tokens a second, by measured cost T(M, context) and by the drafter's curves? All that draft are taken to draft alike,
which makes an entry a small sum; the crowd is what it is now, which keeps it honest. Nothing here changes what is
committed, only when.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from verispec.backends.cost import CostTable
from verispec.backends.protocol import first_draft_rows
from verispec.engine.step_costs import StepCosts
from verispec.engine.step_rates import Crowd, StepRates, draft_seconds
from verispec.engine.windows import Windows, held_window
from verispec.kv import TARGET_STORE
from verispec.spec.drafter import Curve, DrafterSet, NotYet, Refusal
from verispec.spec.skip_menu import WORTH_IT
from verispec.spec.tree import TreeShape
from verispec.spec.turn import NO_ROOM, PLAIN, Choice, States, Turn

_MOST_ENTRIES = 4096
_WINDOWS_WORTH_IT = 1.03  # times the tokens of plain decoding: not all windows are opened and replayed together
_LOOKS, _LONGEST_REST = 0.02, 128  # the share of time for looking whether to draft, in which no draft is made; rounds
_HIDDEN_LOOKS, _WHILE_BUSY = 0.1, 0.0015  # the share of looks that take fewer seconds than that: a burst hides them
_REST_AT_FIRST = 16  # the most of those rounds while an answer is short: its beginning tells most
_SHORT_LOOK = 0.015  # of the time that one sequence has left, for a look at it
_IDLE_LOOKS = 0.01  # of the time that is left, for all looks while nothing is in the air
_LOOK_STEP = 0.1  # towards what the host last took for a look
_WORTH_A_CHANGE = 3.0  # of drafts, times what it takes: of many that are predicted the best flatters itself
_FADED = 0.8  # of the host's time for a round, when those that rest for it could look again
_NOTICEABLE_HOST = 0.15  # a change of the host's time, as a logarithm, that entries are made anew for
NOT_WORTH_IT = "verifying a draft was not predicted to pay at this load"
NO_FASTER = "fast passes take as long as canonical ones at this load, and replays would come on top"
NOT_LAST = PLAIN._replace(
    reason="the batch would end no earlier: others draft nothing, or not enough, and have as much left"
)
STAYS_PLAIN = PLAIN._replace(reason="a draft was not predicted to save what beginning to draft takes")
TOO_FAR_BEHIND = PLAIN._replace(reason="drafts were not predicted to save what it takes to catch up with the text")
_ENDLESS = 1 << 30  # tokens
_SHORT_ANSWER = 32  # tokens that an answer is believed to have left when it begins
_WAIT, _LONGEST_WAIT = 0.025, 0.1  # seconds that a stream waits for a burst: 40 frames a second, or 10
_HOST_SHARE = 0.02  # of the time of a burst: where the host would take more, streams wait longer
_LONGEST_BURST = 0.5  # seconds of any burst: aborts, Ctrl-C and newcomers wait for its end
# Of few sequences, where the host is far and sends bursts ahead: seconds, or times what the host takes. Rounds behind
# the end of their answers are in vain, and with few there is nobody else to use them.
_SHORT_BURST, _HOST_TIMES, _FEW = 0.006, 8, 8
_SHOWN = 0.5  # of what the host and the trip take for a burst: the rest is hidden behind bursts sent ahead


class RoundLoad(NamedTuple):
    """Sequences that could go on without the host, those that could not, and what bounds their rounds."""

    num_going: int
    num_waiting: int
    context_len: int
    room: int  # the most rounds that one of them has left
    num_free: int  # rounds that free slots suffice for
    is_streamed: bool
    num_nodes: int = 0  # drafted by the backend in a round, which takes it `draft_seconds`
    draft_seconds: float = 0.0
    rooms: Sequence[int] = ()  # the rounds that each has left, where others wait for their places


class _Entry(NamedTuple):
    """A choice, its predicted tokens a second, and the drafter's version it was made with; where something is drafted,
    its curve, how many sequences share its passes, and the seconds saved by each token of one. `rates` are those of
    everything that could have been drafted."""

    choice: Choice
    rate: float
    version: int
    curve: Curve | None = None
    drafting: int = 1
    saved: float = 0.0
    rates: Mapping[tuple[TreeShape | None, int], float] = MappingProxyType({})


class Policy:
    """Chooses among the canonical shapes `family`, which may be empty, and the shapes of fast passes.

    `follows`: the backend asks for masks between rounds, so that a constraint alone needs no host. `by_probability`:
    its rounds can be judged by probabilities, so that such a rule needs none, either. `fits_rows`: what was not drafted
    after all has no rows. `leaves_out`: draft passes that nobody wants hardly cost anything, unless a sequence in them
    does not draw plainly.
    """

    def __init__(
        self,
        family: Sequence[int],
        cost: CostTable,
        drafters: DrafterSet,
        *,
        row_budget: int,
        max_draft: int | None,
        max_burst: int,
        follows: bool = False,
        by_probability: bool = False,
        fits_rows: bool = False,
        leaves_out: bool = True,
    ) -> None:
        self._follows, self._by_probability = follows, by_probability
        self._leaves_out = leaves_out
        self.costs = StepCosts(family, cost, row_budget=row_budget)
        self._windows = Windows(self.costs, row_budget=row_budget)
        self._cost = cost
        self._drafters = drafters
        self.states, self.needs_cheap_rows = drafters.states, drafters.needs_cheap_rows
        self._row_budget = row_budget
        self.rates = StepRates(
            self.costs, cost, row_budget=row_budget, max_draft=max_draft, max_burst=max_burst, fits_rows=fits_rows
        )
        self._look_seconds = 0.0  # of the host, to ask a sequence's drafters
        self._cost_versions = (0, 0, 0, 0)
        self._entries: dict[Hashable, _Entry] = {}
        self._can_pay: dict[tuple[int, bool], tuple[tuple[int, int], bool]] = {}  # with the versions of the costs

    def choose(
        self,
        turns: Sequence[Turn],
        *,
        is_canonical: bool,
        other_rows: int,
        other_tokens: int,
        beside: int,
        room_of_others: int | None = None,
        last: Mapping[Turn, Choice] = MappingProxyType({}),
    ) -> None:
        """Fill in the choices of turns that complete.

        `other_rows` run in the same pass and give `other_tokens`; `beside` rows run in the step's other pass. Where all
        that counts is when the last of a batch ends, `room_of_others` are the most tokens that one of the others has
        left. The `last` choice of a turn stays unless another saves clearly more than a change takes.
        """
        rates = self.rates
        versions = self._cost.version, _rough(rates.host_seconds), _rough(rates.round_seconds), rates.version
        if versions != self._cost_versions:
            self._cost_versions = versions
            self._entries.clear()
        groups: dict[tuple[States, bool], list[Turn]] = {}  # sequences in the same state draft alike
        for turn in turns:
            turn.states = turn.states or self.states(turn.sequence)
            groups.setdefault((turn.states, self._needs_host(turn)), []).append(turn)
        free = {key: group for key, group in groups.items() if held_window(key[0]) is None}
        drafting: Counter[str] = Counter()
        for (found, _), group in free.items():
            for name, state in found:
                drafting[name] += 0 if isinstance(state, Refusal) else len(group)
        num_free = sum([len(group) for group in free.values()])
        rows = other_rows + sum([turn.num_pending for group in free.values() for turn in group])
        if num_free < len(turns):
            rows += self._windows.choose(
                turns, rows=rows, other_rows=other_rows, beside=beside, host_seconds=self.rates.host_seconds
            )
            beside += sum([turn.choice.grows for turn in turns])
        context_len = sum([turn.start for turn in turns]) // len(turns)
        crowd = Crowd(rows, other_tokens + num_free, beside, _bucket(context_len), is_canonical)
        if self._cost.trip and not (self._leaves_out and all(turn.sequence.draws_plainly for turn in turns)):
            crowd = crowd._replace(leaves_out=False)
        plain: dict[bool, float] = {}  # seconds of a step, where the end of a batch counts, and what each draft adds
        if room_of_others is not None:
            needs = {needs_host for _, needs_host in free}
            plain = {each: self.rates.plain_seconds(crowd._replace(needs_host=each)) for each in needs}
        drafts, added = 0, dict[Turn, float]()
        for (found, needs_host), group in free.items():
            entries = self._ranked(found, drafting, crowd._replace(needs_host=needs_host))
            for turn in group:
                if turn in last and self._stays(turn, last[turn], entries, crowd):
                    choice = last[turn]
                else:
                    best = next((e.choice for e in entries if self._catches_up(turn, e)), TOO_FAR_BEHIND)
                    choice = _within(best, turn)
                drafts += 0 if choice.grows else choice.num_nodes
                turn.choice = choice if turn.room > 0 else NO_ROOM
                if plain and choice.num_nodes:
                    added[turn] = _added_seconds(choice, entries, crowd, plain[needs_host])
        left = max(0, self._row_budget - rows)  # prompts may have more rows than that by themselves
        if drafts > left:
            rationed = [turn for turn in turns if held_window(turn.states) is None]
            if room_of_others is not None:  # who ends last comes first
                rationed.sort(key=lambda turn: -turn.room)
            _ration(rationed, left)
        if room_of_others is not None:
            _hold_back(turns, room_of_others)
            if num_free == len(turns) and not _ends_sooner(turns, max(plain.values()), added, room_of_others):
                _hold_back(turns, _ENDLESS)

    def _stays(self, turn: Turn, last: Choice, entries: Sequence[_Entry], crowd: Crowd) -> bool:
        """Whether too little would be saved in what its answer is expected to have left for the rounds in the air to
        end first, which a change takes."""
        best, mine = entries[0], next((entry for entry in entries if entry.choice.drafter == last.drafter), None)
        if best.choice.is_forced or best.choice.grows:
            return False
        if not last.drafter:  # it rests, and needs no host for its rounds
            rate: float | None = self.rates.plain(crowd)
        elif mine is None:
            return False
        else:
            rate = mine.rates.get((last.shape, last.num_nodes))
        if rate is None:  # less than a level, because the answer ends
            return best is mine
        num_tokens = min(turn.room, max(_SHORT_ANSWER, turn.start - turn.sequence.prompt_len))
        saved = crowd.tokens * num_tokens * (1.0 / rate - 1.0 / best.rate)
        worth = _WORTH_A_CHANGE if last.drafter else 1.0
        return saved < worth * (self._cost.trip + self.rates.host_seconds)

    def expected(self, turn: Turn) -> States | None:
        """The states that a sequence will have when its prompt is computed; None if no drafter waits for that, or
        knows."""
        if not any(isinstance(state, NotYet) and state.then is not None for _, state in turn.states):
            return None
        return tuple([(n, s if not isinstance(s, NotYet) or s.then is None else s.then) for n, s in turn.states])

    def _needs_host(self, turn: Turn) -> bool:
        """Whether its next round needs the host, whatever is drafted."""
        sequence = turn.sequence
        if self._follows and sequence.is_followed:
            return False
        return sequence.needs_host or (sequence.uses_probabilities and not self._by_probability)

    def note_burst(self, turns: Sequence[Turn]) -> None:
        """Learn from the time of a pass in which the backend drafted for all of these, in the middle of their answers:
        the first rounds of one are few, and wait for the host."""
        name = turns[0].choice.drafter
        if any(turn.choice.drafter != name or turn.start < turn.sequence.prompt_len for turn in turns):
            return
        num_rounds, num_rows = max(turn.num_rounds for turn in turns), sum([1 + t.choice.num_nodes for t in turns])
        context_len = sum([turn.start for turn in turns]) // len(turns)
        predicted = self.costs.pass_seconds(num_rows, context_len) + turns[0].choice.draft_seconds
        seconds = turns[0].seconds - (0.0 if turns[0].num_behind else self._cost.trip)
        self.rates.note_burst(name, len(turns), seconds, num_rounds * predicted, num_rounds)

    def note_looks(self, seconds: float) -> None:
        """What the host took to ask each sequence's drafters."""
        self._look_seconds += (seconds - self._look_seconds) * (_LOOK_STEP if self._look_seconds else 1.0)

    def _ranked(self, states: States, drafting: Mapping[str, int], crowd: Crowd) -> list[_Entry]:
        """What each drafter offers, the best first."""
        is_free = self._drafters.leaves_choice(name for name, _ in states)
        entries = [
            self._entry(name, state, drafting[name], crowd, is_free=is_free)
            for name, state in states if not isinstance(state, Refusal)
        ]  # fmt: skip
        if not entries:
            return [_Entry(PLAIN._replace(reason=str(states[0][1]) if states else ""), 0.0, 0)]
        return sorted(entries, key=lambda entry: -entry.rate)

    def _catches_up(self, turn: Turn, entry: _Entry) -> bool:
        """Whether drafts save more than it takes to compute what the drafter lacks of the sequence, if that goes on for
        as long as its answer has lasted: then no more is lost on one that ends than was on waiting for it."""
        curve, choice = entry.curve, entry.choice
        if curve is None or curve.cost is None or curve.store == TARGET_STORE or choice.is_forced:
            return True
        stored_len = turn.store_lens[curve.store]
        if turn.start - stored_len < first_draft_rows(curve.store):
            return True
        num_rows, context_len = entry.drafting * (turn.start - stored_len), (turn.start + stored_len) // 2
        seconds = draft_seconds(curve.cost, num_rows, context_len) / entry.drafting  # all of them catch up together
        num_tokens = min(turn.room, max(_SHORT_ANSWER, turn.start - turn.sequence.prompt_len))
        return self._cost.speed * seconds < entry.saved * num_tokens

    def _entry(self, name: str, key: Hashable, drafting: int, crowd: Crowd, *, is_free: bool) -> _Entry:
        drafting = min(crowd.tokens, 1 << (drafting - 1).bit_length())  # how many draft at once is a rough figure
        at = (name, key, drafting, crowd, is_free)
        found = self._entries.get(at)
        version = self._drafters.version(name)
        if found is None or found.version != version:
            if len(self._entries) >= _MOST_ENTRIES:
                self._entries.clear()
            found = self._entries[at] = self._made(name, key, drafting, crowd, is_free, version)
        return found

    def _made(self, name: str, key: Hashable, drafting: int, crowd: Crowd, is_free: bool, version: int) -> _Entry:
        """The best curve, if it is worth its passes; plain decoding otherwise."""
        predictions, plain = self.rates, self.rates.plain(crowd)
        best = _Entry(PLAIN._replace(reason=NOT_WORTH_IT), plain, version)
        rates: dict[tuple[TreeShape | None, int], float] = {}
        for curve in self._drafters.curves(name, key):
            if curve.by_fast_rounds:
                best = self._with_windows(best, name, curve, drafting, crowd, is_free=is_free)
                continue
            offers = predictions.offers(name, curve, drafting, crowd)
            rates |= {(curve.shape, offer.num_nodes): offer.rate for offer in offers}
            found = predictions.best_of(offers, curve, drafting, crowd)
            predicted = found.rate / plain
            is_worth_it = curve.is_forced or predicted > (1.0 if curve.cost is None else WORTH_IT)
            if found.num_nodes and is_worth_it and (found.rate > best.rate or curve.is_forced):
                choice = Choice(
                    name, found.num_nodes, curve.shape, by_backend=curve.by_backend and not crowd.needs_host,
                    is_replay=curve.is_window, draft_seconds=found.draft_seconds, num_tokens=1.0 + found.tokens,
                    is_forced=curve.is_forced, is_trial=curve.is_trial,
                )  # fmt: skip
                # Of a step, in which everybody who drafts commits so many tokens.
                saved = (crowd.tokens + crowd.beside + drafting * found.tokens) * (1 / plain - 1 / found.rate)
                best = _Entry(choice, found.rate, version, curve, drafting, saved / (drafting * choice.num_tokens))
            elif not best.choice.num_nodes and curve.cost is not None:
                best = best._replace(choice=best.choice._replace(reason=_why_not(curve, predicted, found.num_nodes)))
        return best._replace(rates=rates)

    def _with_windows(
        self, best: _Entry, name: str, curve: Curve, drafting: int, crowd: Crowd, *, is_free: bool
    ) -> _Entry:
        """The entry, or windows of the length that promises most.

        A window is many steps, so it has to pay in those to come, when the prompts of this one have run; and in this
        one too, where a plain row beside those of prompts may be free.
        """
        to_come = crowd._replace(rows=crowd.tokens)
        if is_free and not self.rates.has_faster_rounds(drafting, to_come):
            return best._replace(choice=best.choice._replace(because=NO_FASTER))
        longest = min(self.rates.limit(len(curve.levels)), self._row_budget - 1)
        lengths = range(1, longest + 1) if is_free else range(longest, longest + 1)
        rates = {n: self.rates.window_rate(curve, n, drafting, to_come) for n in lengths if n}
        num_nodes = max(rates, key=rates.__getitem__, default=0)
        host = self.rates.host(is_needed=crowd.needs_host)
        plain, rate = self.rates.plain(to_come), rates.get(num_nodes, 0.0)
        plain_now = (crowd.tokens + crowd.beside) / (self.rates.seconds(crowd, crowd.rows) + host)
        pays = rate > max(best.rate, _WINDOWS_WORTH_IT * plain)
        pays = pays and self.rates.window_rate(curve, num_nodes, drafting, crowd) > plain_now
        because = f"canonical passes predicted {plain:.3g} tokens a second, replays {rate:.3g}"
        if num_nodes and (pays or not is_free):
            return best._replace(choice=Choice(name, num_nodes, grows=True, because=because), rate=rate)
        return best._replace(choice=best.choice._replace(because=because))

    def num_rounds(self, load: RoundLoad, host_seconds: float) -> int:
        """How many rounds the backend runs by itself: as long as a stream may wait, as slots are free, as is left.

        The host takes `host_seconds` for each burst, with caches that the pass has emptied.
        Where some sequences need the host after each round they wait at most twice as long for the others, and only
        if that is worth more tokens a second.
        Where bursts are sent ahead, those of few sequences last as long as the host needs for the next one.
        """
        count = min(self.rates.max_burst, load.room, load.num_free)
        if count <= 1:
            return 1
        together = load.num_going + load.num_waiting
        seconds = self.costs.pass_seconds(together + load.num_nodes, load.context_len) + load.draft_seconds
        if load.num_waiting:
            short = self.costs.pass_seconds(load.num_going + load.num_nodes, load.context_len) + load.draft_seconds
            once = together / (seconds + host_seconds)
            twice = (together + load.num_going) / (seconds + short + host_seconds)
            count = 2 if twice > once else 1
        if load.is_streamed:
            wait = min(_LONGEST_WAIT, max(_WAIT, host_seconds / _HOST_SHARE))
            count = min(count, int(wait / max(1e-6, seconds)))
        elif self._cost.learns:  # not where passes were never timed
            count = min(count, int(_LONGEST_BURST / max(1e-6, seconds)))
        if self._cost.trip and load.num_going <= _FEW:  # the next burst is sent meanwhile
            enough = max(_SHORT_BURST, _HOST_TIMES * host_seconds)
            count = min(count, math.ceil(enough / max(1e-6, seconds)))
        count = max(1, count)
        if load.rooms:
            added = _SHOWN * (host_seconds + self._cost.trip)
            count = _best_filled(load.rooms, count, added / max(1e-6, seconds))
        return count

    def drafts_can_pay(self, num_running: int, *, is_canonical: bool) -> bool:
        """Whether the best drafts of so many sequences could pay: else looking for them is worth nothing."""
        at, versions = (num_running, is_canonical), (self._cost.version, _rough(self.rates.host_seconds))
        made, found = self._can_pay.get(at, (None, False))
        if made != versions:
            found = self.rates.best_could_pay(num_running, is_canonical=is_canonical)
            self._can_pay[at] = versions, found
        return found

    def forget_host(self) -> None:
        """What the host took is measured where drafts are: where nothing was drafted for long, it counts for less."""
        self.rates.host_seconds *= _FADED
        self.rates.round_seconds *= _FADED

    @property
    def rests(self) -> bool:
        """Whether who drafts nothing goes on without the host until a look says otherwise: where the host is far."""
        return self._cost.trip > 0 and self.rates.max_burst > 1

    def rest_len(
        self, num_rows: int, context_len: int, num_output: int, *, in_vain: bool = False, in_air: bool = False
    ) -> int:
        """For how many rounds those that draft nothing do not look again.

        Rounds that run meanwhile, `in_air`, hide a look that is short; one that was `in_vain` has ended them.
        """
        seconds = self.rates.host_seconds if in_vain else num_rows * self._look_seconds
        round_seconds = max(1e-12, self.costs.fast_seconds(num_rows, context_len))
        share = _HIDDEN_LOOKS if in_air and seconds < _WHILE_BUSY else _LOOKS
        longest = _REST_AT_FIRST if num_output < _SHORT_ANSWER else _LONGEST_REST
        return min(longest, int(seconds / (share * round_seconds)))

    def is_short_look(self, context_len: int, room: int) -> bool:
        """Whether a look at one sequence takes hardly any of the time that so many further rounds of it do."""
        return self._look_seconds < _SHORT_LOOK * room * self.costs.fast_seconds(1, context_len)

    def are_long_looks(self, num_looks: int, context_len: int, room: int) -> bool:
        """Whether the device should not wait for looks at so many sequences that have so many rounds left."""
        left = room * self.costs.fast_seconds(num_looks, context_len)
        return self.rests and num_looks * self._look_seconds > _IDLE_LOOKS * left


def _best_filled(rooms: Sequence[int], most: int, added: float) -> int:
    """How many rounds, of up to `most`, have most tokens in their time and that of `added` ones for each burst: an
    answer that ends in its middle leaves a place empty to its end."""
    best, best_rate, ended = 1, 0.0, 0
    for num_ended, end in enumerate([*sorted(room for room in rooms if 0 < room < most), most]):
        rate = (ended + (len(rooms) - num_ended) * end) / (end + added)
        if rate >= best_rate:
            best, best_rate = end, rate
        ended += end
    return best


def refusal(states: States) -> Choice | None:
    """Why none of a sequence's drafters has anything to offer; None if one has."""
    for _, state in states:
        if not isinstance(state, Refusal):
            return None
    return _refused(str(states[0][1]))


@cache
def _refused(reason: str) -> Choice:
    return Choice(reason=reason)


def _ration(turns: Sequence[Turn], left: int) -> None:
    """Drafts as far as there are rows, in this order."""
    for turn in turns:
        if turn.choice.grows:
            continue
        if turn.choice.num_nodes > left:
            turn.choice = PLAIN._replace(reason="no rows were left for a draft")
        left -= turn.choice.num_nodes


def _hold_back(turns: Sequence[Turn], room_of_others: int) -> None:
    """Drafts of those that have no more left than somebody who draws token by token would only take its time; those
    that are forced stay."""
    most = max([room_of_others, *(turn.room for turn in turns if not turn.choice.num_nodes)])
    for turn in turns:
        choice = turn.choice
        is_free = not (choice.is_forced or choice.grows or held_window(turn.states) is not None)
        if choice.num_nodes and turn.room <= most and is_free:
            turn.choice = NOT_LAST


def _added_seconds(choice: Choice, entries: Sequence[_Entry], crowd: Crowd, plain: float) -> float:
    """What a draft adds to the step: its share of what those of all that draft alike do, by their predicted rate."""
    entry = next((entry for entry in entries if entry.choice.drafter == choice.drafter), entries[0])
    rate = entry.rates.get((choice.shape, choice.num_nodes), entry.rate)
    num_tokens = crowd.tokens + crowd.beside + entry.drafting * (choice.num_tokens - 1.0)
    return (num_tokens / max(1e-12, rate) - plain) / entry.drafting


def _ends_sooner(turns: Sequence[Turn], plain: float, added: Mapping[Turn, float], room_of_others: int) -> bool:
    """Whether the last one of a batch should end sooner by these drafts: what one drafts, all others wait for."""
    seconds = plain + sum([added[turn] for turn in turns if turn.choice.num_nodes])
    num_rounds = max([room_of_others + 1.0, *((turn.room + 1) / turn.choice.num_tokens for turn in turns)])
    return num_rounds * seconds <= (1 + max([room_of_others, *(turn.room for turn in turns)])) * plain


def _within(choice: Choice, turn: Turn) -> Choice:
    """The choice, no deeper than what can still be committed."""
    shape, room = choice.shape, turn.room
    if shape is None:
        return choice if choice.num_nodes <= room else choice._replace(num_nodes=room)
    if shape.depth > room:
        choice = choice._replace(num_nodes=min(choice.num_nodes, shape.within(choice.num_nodes, room).num_nodes))
    if not shape.is_chain and choice.num_nodes > turn.table_room:
        choice = choice._replace(by_backend=False)  # the places of its nodes are positions of the table
    return choice


def _rough(seconds: float) -> int:
    """Times of the host that differ by less change no choice."""
    return round(math.log(max(1e-6, seconds)) / _NOTICEABLE_HOST)


def _bucket(context_len: int) -> int:
    """Contexts that differ by less than an eighth change no choice."""
    step = max(64, 1 << max(0, context_len.bit_length() - 3))
    return context_len // step * step


def _why_not(curve: Curve, predicted: float, num_nodes: int) -> str:
    """Why a curve's nodes were not chosen."""
    if not num_nodes:
        return "the draft does not fit into a pass"
    return f"{curve.what} predicted {predicted:.2f}x on this model and device; not drafting; --force to draft anyway"
