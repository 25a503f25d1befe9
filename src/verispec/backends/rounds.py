"""Bursts, round by round, for every backend that can run one round: a burst of n rounds is n passes, bit for bit.

A round is: draft (a pass per token), verify (one pass), keep what the target drew itself, go on behind it. Sequences
that do not draft have rounds without the first part; chains that are looked up need no pass.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from verispec.backends.pass_builder import padded
from verispec.backends.protocol import (
    NO_UPDATE,
    Burst,
    BurstResult,
    DistributionWanted,
    Drafting,
    DrawWanted,
    Pass,
    PassResult,
    Rows,
    Wanted,
)
from verispec.backends.resident import Fed, Resident, copied, idled
from verispec.backends.tree_rounds import Drafts, Settling, grow, placed
from verispec.backends.weighing import Offered, Weighed, draft_noise
from verispec.kv import DUMP_SLOT
from verispec.sampling.draw import NO_TOKEN, DrawResult

Run = Callable[[Pass], PassResult]
Further = Callable[[Pass, Burst, Fed], BurstResult]
Tokens = NDArray[np.int64]
LOOKED_UP = (4, 3, 2)  # how many of the last tokens are looked up: the most first


def run_rounds(resident: Resident, pass_: Pass, run: Run, further: Further | None = None) -> PassResult:
    """The pass, then its further rounds. `run` does one round, `further` all the others, if the backend has that."""
    burst, settling = pass_.burst, Settling(resident, run)
    drafts = Drafts.none(0, 0, ())
    if burst is not None and burst.drafts:
        pass_ = resident.take(pass_)
        fed, settling.update = before(pass_, burst), pass_.table_update
        drafts = _draft(resident, burst, fed, fed.token_ids >= 0, settling)
        pass_ = replace(pass_, rows=_with_drafts(resident, pass_.rows, burst, fed, drafts))
    pass_ = resident.take(pass_)
    wanted, weighed = pass_.wanted.draw, Weighed([], [], [])
    if burst is not None and burst.drafts:
        weighed = Weighed.of(burst, drafts.token_ids, _places(pass_, burst))
    result, settling.update = run(weighed.asked(pass_)), NO_UPDATE
    if wanted is None or result.draw is None:
        return result
    result.draw.token_ids[pass_.rows.slots[wanted.rows] == DUMP_SLOT] = NO_TOKEN  # of a sequence that had ended
    if burst is None:
        return result
    fed = before(pass_, burst)
    if not burst.drafts:
        drafts = Drafts.none(len(burst.rows), 0, ())
    most = weighed.judge(resident, fed, (drafts.token_ids, drafts.parents), drafts.offered, pass_, result)
    draws = _draws(pass_, result.draw, burst)
    going = fed.token_ids >= 0
    along, order = settling.settle(fed, drafts, draws, going, most)
    accepted = advance(resident, fed, along, np.take_along_axis(draws, order, axis=1), going)
    Following(resident, pass_, burst, fed, burst.rounds + 1).renew(0)
    if burst.num_rounds:
        found = further(pass_, burst, fed) if further else _loop(resident, pass_, burst, fed, settling)
    else:
        found = no_rounds(burst, 0)
    resident.remember(fed)
    resident.unsent = settling.update
    return replace(result, burst=found._replace(
        drafts=np.concatenate([drafts.token_ids[:, None], found.drafts], axis=1),
        accepted=np.concatenate([accepted[:, None], found.accepted], axis=1),
        parents=np.concatenate([drafts.parents[:, None], found.parents], axis=1),
    ))  # fmt: skip


def before(pass_: Pass, burst: Burst) -> Fed:
    """The tokens of a burst's rows: the last that are committed, NO_TOKEN of sequences that had ended."""
    rows = pass_.rows
    has_ended = rows.slots[burst.rows] == DUMP_SLOT
    return Fed(
        rows.seq_rows[burst.rows],
        np.where(has_ended, NO_TOKEN, rows.token_ids[burst.rows]).astype(np.int64),
        rows.positions[burst.rows].astype(np.int64),
    )


def no_rounds(burst: Burst, num_rounds: int) -> BurstResult:
    """The result of rounds in which everybody idles."""
    count, most = len(burst.rows), int(burst.draft_lens.max())
    shape = count, num_rounds * (1 + most)
    return BurstResult(
        np.full(shape, NO_TOKEN, np.int64),
        np.zeros(shape, np.float32),
        np.full((count, num_rounds, most), NO_TOKEN, np.int64),
        np.full((count, num_rounds), -1, np.int32),
        np.full((count, num_rounds, most), NO_TOKEN, np.int64),
    )


def advance(resident: Resident, fed: Fed, drafts: Tokens, draws: Tokens, going: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Accept what was drafted as far as it was drawn, and feed back the draw behind it; -1 for those that idle.

    Whoever has drawn a stop id on the way, or its last token, has ended: NO_TOKEN is fed back.
    """
    seq_rows, tokens, t = fed
    agreed = np.logical_and.accumulate((drafts == draws[:, : drafts.shape[1]]) & (drafts >= 0), axis=1)
    accepted = np.where(going, agreed.sum(axis=1), -1).astype(np.int32)
    has_ended = np.zeros(len(tokens), np.bool_)
    for i in range(draws.shape[1]):
        at = np.flatnonzero(accepted >= i)
        tokens[at] = draws[at, i]
        t[at] += 1
        has_ended[at] |= ~resident.goes_on(Fed(seq_rows[at], tokens[at], t[at]))
    tokens[has_ended] = NO_TOKEN
    return accepted


class Following:
    """The masks of a burst's sequences, renewed behind what they draw in up to so many `rounds` each."""

    def __init__(self, resident: Resident, pass_: Pass, burst: Burst, fed: Fed, rounds: NDArray[np.int32]) -> None:
        masks = None if burst.follow is None else pass_.rows.masks
        self._masked = [] if masks is None else [(i, mask) for i, mask in enumerate(masks[burst.rows].tolist()) if mask]
        self._follow, self._resident, self._rounds = burst.follow, resident, rounds.tolist()
        self._tokens = memoryview(fed.token_ids.data)  # as they are after each round; costs less than an array

    def renew(self, number: int) -> None:
        """After a round: NO_TOKEN is fed back where a sequence ends with it."""
        for i, mask in self._masked:
            if number >= self._rounds[i] or self._tokens[i] < 0:
                continue
            assert self._follow is not None
            allowed = self._follow(i, self._tokens[i])
            if allowed is None:
                self._tokens[i] = NO_TOKEN
            else:
                self._resident.renew_mask(mask, allowed)

    def goes_on(self, number: int) -> bool:
        """Whether anybody has a row in this round."""
        return any(token >= 0 and number < most for token, most in zip(self._tokens, self._rounds, strict=True))


def _draws(pass_: Pass, draw: DrawResult, burst: Burst) -> Tokens:
    """[S, 1 + K], what the pass drew at the rows of a burst's sequences."""
    lengths = burst.draft_lens
    at = np.minimum(_places(pass_, burst), len(draw.token_ids) - 1)
    return np.where(np.arange(at.shape[1]) <= lengths[:, None], draw.token_ids[at], NO_TOKEN)


def _places(pass_: Pass, burst: Burst) -> Tokens:
    """[S, 1 + K], where the draws of a burst's sequences are among those of the pass."""
    assert pass_.wanted.draw is not None
    first = np.searchsorted(pass_.wanted.draw.rows, burst.rows)
    return np.asarray(first[:, None] + np.arange(1 + int(burst.draft_lens.max())))


def _with_drafts(resident: Resident, rows: Rows, burst: Burst, fed: Fed, drafts: Drafts) -> Rows:
    """The rows with the tokens that were drafted; those of shorter drafts are padding."""
    sequence, i = np.nonzero(np.arange(drafts.token_ids.shape[1]) < burst.draft_lens[:, None])
    at, tokens = burst.rows[sequence] + 1 + i, drafts.token_ids[sequence, i]
    there = tokens >= 0
    positions, tails = placed(resident, fed, drafts, sequence[there], 1 + i[there])
    rows = copied(rows, max([len(tail) for _, tail in tails], default=1))
    rows.token_ids[at] = np.maximum(tokens, 0)
    rows.positions[at[there]], rows.prefix_lens[at[there]] = positions, positions + 1
    rows.slots[at[there]] = resident.table[rows.seq_rows[at[there]], fed.t[sequence[there]] + 1 + i[there]]
    for row, tail in tails:
        row = at[there][row]
        rows.tails[row, : len(tail)] = tail
        rows.prefix_lens[row], rows.tail_lens[row] = rows.positions[row] + 1 - len(tail), len(tail)
    idled(rows, at[~there])
    return rows


def _draft(resident: Resident, burst: Burst, fed: Fed, going: NDArray[np.bool_], run: Run) -> Drafts:
    """The drafts of one round."""
    seq_rows, _, t = fed
    found = Drafts.none(len(seq_rows), int(burst.draft_lens.max()), burst.drafts)
    drafts = found.token_ids
    lengths = np.where(going, np.minimum(burst.draft_lens, resident.limits[seq_rows] - t - 2), 0)
    for part in burst.drafts:
        if part.tree is not None:
            has_places = fed.t[part.sequences] + part.lengths < resident.table.shape[1]
            grow(resident, part, fed, part.sequences[has_places & (lengths[part.sequences] > 0)], lengths, found, run)
            continue
        live, i = part.sequences[lengths[part.sequences] > 0], 0
        if part.looks_up:
            for s in live.tolist():
                chain = _look_up(resident, fed, s, int(lengths[s]))
                drafts[s, : len(chain)] = chain
            continue
        while len(live):
            pass_ = _draft_pass(resident, part, fed, live, drafts[:, :i])
            result = run(resident.take(pass_))
            drawn, shown = result.draw, result.distribution
            assert drawn is not None
            if shown is not None:
                found.offered.extend(Offered(s, i - 1, shown, row) for row, s in enumerate(live.tolist()))
            drafts[live, i] = drawn.token_ids
            goes_on = resident.goes_on(Fed(seq_rows[live], drawn.token_ids, t[live] + 1 + i))
            i += 1
            live = live[goes_on & (drawn.logprobs >= np.float32(part.least_logprob)) & (i < lengths[live])]
    return found


def looked_up(token_ids: Tokens, length: int) -> Tokens:
    """What followed the last 4, 3 or 2 tokens the last time they occurred before, the most of them that did.

    Up to `length` tokens: fewer where the text ends, none where nothing is found.
    """
    for count in LOOKED_UP:
        if len(token_ids) > count:
            earlier = np.lib.stride_tricks.sliding_window_view(token_ids[:-1], count)
            found = np.flatnonzero((earlier == token_ids[-count:]).all(axis=1))
            if len(found):
                return token_ids[found[-1] + count :][:length]
    return token_ids[:0]


def _look_up(resident: Resident, fed: Fed, s: int, length: int) -> Tokens:
    """The chain of one sequence; it ends behind a stop id."""
    seq_row, t = fed.seq_rows[s], fed.t[s]
    tokens = resident.slot_tokens[resident.table[seq_row, :t]]
    found = looked_up(np.append(tokens, fed.token_ids[s]), length)
    goes_on = resident.goes_on(Fed(np.full(len(found), seq_row), found, t + 1 + np.arange(len(found))))
    return found[: 1 + int(np.logical_and.accumulate(goes_on).sum())]


def _draft_pass(resident: Resident, part: Drafting, fed: Fed, live: NDArray[np.int32], drafts: Tokens) -> Pass:
    """The pass that draws the next token of these sequences' drafts."""
    num_drafted = drafts.shape[1]
    seq_rows, positions = fed.seq_rows[live], fed.t[live] + num_drafted
    tokens = drafts[live, -1] if num_drafted else fed.token_ids[live]
    count, shape = 1, part.shape
    if not num_drafted:
        count, shape = part.first_rows, part.first_shape
    if count == 2:
        seq_rows = np.repeat(seq_rows, 2)
        positions = np.stack([positions - 1, positions], axis=1).ravel()
        earlier = resident.slot_tokens[resident.table[seq_rows[::2], positions[::2]]]
        tokens = np.stack([earlier, tokens], axis=1).ravel()
    rows = padded(tokens, positions, resident.table[seq_rows, positions], seq_rows, shape=shape)
    drawn = np.arange(count - 1, len(tokens), count, dtype=np.int32)
    wanted = Wanted(draw=DrawWanted(drawn))
    if part.by_probability:
        noise = draft_noise(fed.t[live], np.full(len(live), num_drafted - 1))
        wanted = Wanted(draw=DrawWanted(drawn, noise), distribution=DistributionWanted(drawn))
    return Pass(
        part.kind, rows, wanted, NO_UPDATE, head_shape=part.shape, store=part.store, view=part.view,
        only_drafts=part.only_drafts,
    )  # fmt: skip


def _loop(resident: Resident, pass_: Pass, burst: Burst, fed: Fed, run: Settling) -> BurstResult:
    seq_rows, tokens, t = fed
    result = no_rounds(burst, burst.num_rounds)
    width = 1 + result.drafts.shape[2]
    num_drawn, following = np.zeros(len(tokens), np.int64), Following(resident, pass_, burst, fed, burst.rounds)
    for i in range(burst.num_rounds):
        going = (tokens >= 0) & (i < burst.rounds)
        if not going.any():
            break
        drafts = _draft(resident, burst, fed, going, run)
        result.drafts[:, i], result.parents[:, i] = drafts.token_ids, drafts.parents
        ids = np.concatenate([np.where(going, tokens, NO_TOKEN)[:, None], drafts.token_ids], axis=1)  # [S, 1 + K]
        sequence, column = np.nonzero(ids >= 0)
        at, slots = seq_rows[sequence], resident.table[seq_rows[sequence], t[sequence] + column]
        positions, tails = placed(resident, fed, drafts, sequence, column)
        rows = padded(ids[sequence, column], positions, slots, at, shape=burst.shape, tails=tails)
        if pass_.rows.masks is not None:
            masks = np.zeros(burst.shape, np.int32)
            masks[: len(at)] = pass_.rows.masks[burst.rows][sequence]
            rows = replace(rows, masks=masks)
        wanted = Wanted(draw=DrawWanted(np.arange(len(at), dtype=np.int32)))
        draw_of = np.full(ids.shape, NO_TOKEN)
        draw_of[sequence, column] = np.arange(len(at))
        weighed = Weighed.of(burst, drafts.token_ids, draw_of)
        verifying = resident.take(replace(
            pass_, rows=rows, wanted=wanted, table_update=NO_UPDATE, head_shape=burst.shape, burst=None,
        ))  # fmt: skip
        verified = run(weighed.asked(verifying))
        found = verified.draw
        assert found is not None
        most = weighed.judge(resident, fed, (drafts.token_ids, drafts.parents), drafts.offered, verifying, verified)
        draws, logprobs = np.full((len(tokens), width), NO_TOKEN, np.int64), np.zeros((len(tokens), width), np.float32)
        draws[sequence, column], logprobs[sequence, column] = found.token_ids, found.logprobs
        along, order = run.settle(fed, drafts, draws, going, most)
        draws, logprobs = (np.take_along_axis(values, order, axis=1) for values in (draws, logprobs))
        accepted = result.accepted[:, i] = advance(resident, fed, along, draws, going)
        following.renew(i)
        sequence, column = np.nonzero(np.arange(width) <= accepted[:, None])
        at = num_drawn[sequence] + column
        result.token_ids[sequence, at] = draws[sequence, column]
        result.logprobs[sequence, at] = logprobs[sequence, column]
        num_drawn += accepted + 1
    return result
