"""Two Markov chains as a backend, target and draft model: the probability of every output is known exactly.

Logits depend on a row's token alone, so that passes of any kind and shape agree. The draft model answers in the second
store and under any view. Its noise is the library's; by default draws are made for all rows at once, which is many
times faster than `collect` for a handful of tokens and knows no filters; `is_plain=False` leaves them to `collect`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.toy_trees import Markov
from verispec.backends.audit import CANDIDATE_SHAPES, KernelProbe
from verispec.backends.checks import check_pass
from verispec.backends.outputs import HostLogits, collect
from verispec.backends.protocol import (
    FULL_VIEW,
    BackendLimits,
    DrawResult,
    NoisyTopK,
    Pass,
    PassResult,
    ReadyTicket,
    StaleHandleError,
)
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.kv import TARGET_STORE
from verispec.sampling.noise import gumbel_f32, noise_words
from verispec.sampling.rows import Sampler, SamplingRows

Floats = NDArray[np.float32]
NEVER = -1e4  # the logit of a token without probability


class ToyBackend:
    """`told` is what handles give for the draft model's distributions instead of the truth. With `by_probability` it
    drafts and judges by itself; `most_rounds` is how many rounds it was asked for at once."""

    shapes = CANDIDATE_SHAPES
    arithmetics = ("toy",)
    weights_version = 0

    def __init__(
        self, chains: Markov, *, is_plain: bool = True, told: NDArray[np.float64] | None = None,
        by_probability: bool = False,
    ) -> None:  # fmt: skip
        self.limits = BackendLimits(
            chains.vocab_size, 64, 1 << 14, 256, 16, num_stores=2, trees=by_probability, by_probability=by_probability
        )
        self.most_rounds = 0
        self.resident = Resident(self.limits)
        self.passes: list[Pass] = []
        self.logits = [_logits(chains.q), _logits(chains.p)]
        self._told = None if told is None else _logits(told)
        self._collect = _PlainOutputs().collect if is_plain else _shared

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        self.resident.bind(seq_row, sampler)

    def set_masks(self, first: int, allowed: np.ndarray) -> None:
        self.resident.set_masks(first, allowed)

    def submit(self, pass_: Pass) -> ReadyTicket:
        check_pass(pass_, self.limits)
        if pass_.burst is not None:
            self.most_rounds = max(self.most_rounds, 1 + pass_.burst.num_rounds)
        return ReadyTicket(run_rounds(self.resident, pass_, self._run))

    def _run(self, pass_: Pass) -> PassResult:
        """One round; every round is recorded as the pass it is."""
        self.passes.append(pass_)
        is_draft = pass_.store != TARGET_STORE or pass_.view != FULL_VIEW
        wanted = pass_.wanted.head_rows()
        tokens = pass_.rows.token_ids[wanted]
        result = self._collect(pass_, self.resident, wanted, self.logits[is_draft][tokens])
        if is_draft and self._told is not None and pass_.wanted.distribution is not None:
            told = self._collect(pass_, self.resident, wanted, self._told[tokens])
            result = PassResult(result.draw, None, None, result.noisy_top_k, told.distribution)
        return result

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        return {"arithmetic": "toy", "store": str(store)}

    def device(self) -> dict[str, str]:
        return {}

    def wrong_answers(self) -> tuple[str, ...] | None:
        return None

    def probes(self) -> list[KernelProbe]:
        return []

    def close(self) -> None:
        pass


def _logits(probabilities: NDArray[np.float64]) -> Floats:
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(probabilities), NEVER).astype(np.float32)


@dataclass
class _Handle:
    values: Floats | None
    log_softmax: Floats

    def probabilities(self) -> Floats:
        if self.values is None:
            raise StaleHandleError("the distribution was released")
        return self.values

    def logprobs(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> Floats:
        self.probabilities()
        return self.log_softmax[rows, token_ids]

    def release(self) -> None:
        self.values = None


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _shared(pass_: Pass, resident: Resident, head_rows: NDArray[np.int32], logits: Floats) -> PassResult:
    return collect(pass_, resident, head_rows, HostLogits(logits))


class _PlainOutputs:
    """Temperature above 0 and nothing else; all rows at once."""

    def collect(self, pass_: Pass, resident: Resident, head_rows: NDArray[np.int32], logits: Floats) -> PassResult:
        wanted = pass_.wanted

        def at(rows: NDArray[np.int32]) -> Floats:
            return logits[np.searchsorted(head_rows, rows)]

        assert wanted.logprobs is None
        assert wanted.top_k is None
        draw = noisy = handle = None
        if wanted.draw is not None:
            raw = at(wanted.draw.rows)
            sampling = resident.sampling(pass_.rows, *wanted.draw)
            ids = (self._scaled(raw, sampling) + self._gumbel(sampling, raw)).argmax(axis=-1)
            draw = DrawResult(ids, _log_softmax(raw)[np.arange(len(ids)), ids])
        if wanted.noisy_top_k is not None:
            rows, k, noise = wanted.noisy_top_k
            sampling = resident.sampling(pass_.rows, rows, noise)
            log_p = self._scaled(at(rows), sampling)
            values = log_p + self._gumbel(sampling, log_p)
            ids = np.argsort(-values, axis=-1, kind="stable")[:, :k]
            chosen = [np.take_along_axis(a, ids, axis=-1) for a in (values, log_p)]
            noisy = NoisyTopK(np.where(chosen[1] > NEVER / 2, ids, -1), chosen[0], chosen[1])
        if wanted.distribution is not None:
            raw = at(wanted.distribution.rows)
            sampling = resident.sampling(pass_.rows, wanted.distribution.rows)
            handle = _Handle(np.exp(self._scaled(raw, sampling)), _log_softmax(raw))
        return PassResult(draw=draw, noisy_top_k=noisy, distribution=handle)

    def _scaled(self, logits: Floats, sampling: SamplingRows) -> Floats:
        assert (sampling.temperature > 0).all()
        assert not len(sampling.penalty_rows) + len(sampling.bias_rows)
        assert (sampling.top_p == 1).all()
        return _log_softmax(logits / sampling.temperature[:, None])

    def _gumbel(self, sampling: SamplingRows, like: Floats) -> Any:
        words = noise_words(
            np.arange(like.shape[-1])[None],
            seed_low=(sampling.seeds & np.uint64(0xFFFFFFFF)).astype(np.int64)[:, None],
            seed_high=(sampling.seeds >> np.uint64(32)).astype(np.int64)[:, None],
            t=sampling.t[:, None],
            sample_index=sampling.sample_index[:, None],
            stream=sampling.stream[:, None],
        )
        return gumbel_f32(np, words)
