"""Bursts, round by round, for every backend that can run one round: a burst of n rounds is n passes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from verispec.backends.pass_builder import padded
from verispec.backends.protocol import Burst, BurstResult, DrawWanted, Pass, PassResult, TableUpdate, Wanted
from verispec.backends.resident import Fed, Resident, fed_back
from verispec.sampling.draw import NO_TOKEN

NO_UPDATE = TableUpdate(*(np.zeros(0, np.int32) for _ in range(3)))
Further = Callable[[Pass, Burst, Fed], BurstResult]


def run_rounds(
    resident: Resident, pass_: Pass, run: Callable[[Pass], PassResult], further: Further | None = None
) -> PassResult:
    """The pass, then its further rounds. `run` does one round, `further` all the others, if the backend has that."""
    pass_ = resident.take(pass_)
    result, wanted, burst = run(pass_), pass_.wanted.draw, pass_.burst
    if wanted is None or result.draw is None:
        return result
    result.draw.token_ids[resident.is_padding(pass_.rows, wanted.rows)] = NO_TOKEN
    if burst is None:
        return result
    fed = fed_back(pass_, result.draw, burst)
    if burst.num_rounds:
        found = _loop(resident, pass_, burst, fed, run) if further is None else further(pass_, burst, fed)
        result = replace(result, burst=found)
    else:
        result = replace(result, burst=_nothing(fed, 0))
    resident.remember(fed)
    return result


def _nothing(fed: Fed, num_rounds: int) -> BurstResult:
    shape = len(fed.seq_rows), num_rounds
    return BurstResult(np.full(shape, NO_TOKEN, np.int64), np.zeros(shape, np.float32))


def _loop(resident: Resident, pass_: Pass, burst: Burst, fed: Fed, run: Callable[[Pass], PassResult]) -> BurstResult:
    seq_rows, tokens, t = fed
    result = _nothing(fed, burst.num_rounds)
    for i in range(burst.num_rounds):
        going = np.flatnonzero(resident.goes_on(fed) & (i < burst.rounds))
        if not len(going):
            break
        at = seq_rows[going]
        rows = padded(tokens[going], t[going], resident.table[at, t[going]], at, shape=burst.shape)
        wanted = Wanted(draw=DrawWanted(np.arange(len(going), dtype=np.int32)))
        found = run(resident.take(replace(
            pass_, rows=rows, wanted=wanted, table_update=NO_UPDATE, head_shape=burst.shape, burst=None,
        ))).draw  # fmt: skip
        assert found is not None
        tokens[going] = result.token_ids[going, i] = found.token_ids
        result.logprobs[going, i] = found.logprobs
        t[going] += 1
    return result
