"""The reference that the GPU's draws equal (`draw_check.py`) equals the package's draw, token and log-probability."""

import numpy as np
import pytest

from tests.backends.cuda.draw_reference import draw_case, parameters_of, reference
from verispec.sampling.draw import draw
from verispec.sampling.rows import SamplingRows


def sampling_rows(rows: list[dict[str, float]]) -> SamplingRows:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([row[name] for row in rows], dtype)

    none = np.zeros(0, np.int64)
    return SamplingRows(
        seeds=column("seed", np.uint64), t=column("t", np.int64), sample_index=column("sample", np.int64),
        stream=column("stream", np.int64), temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int64), top_p=column("top_p", np.float32), log_min_p=column("log_min_p", np.float32),
        penalty_rows=none, penalty_ids=none, repetition=none.astype(np.float32), penalty=none.astype(np.float32),
        bias_rows=none, bias_ids=none, bias=none.astype(np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "ties", "banned", "unusable"])
@pytest.mark.parametrize("vocab", [320, 5000])
def test_the_reference_equals_the_package(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(0)
    logits, rows = draw_case(rng, kind, vocab, 24), parameters_of(rng, 24)
    with np.errstate(all="ignore"):
        draws = draw(np, logits, sampling_rows(rows))
        wanted = [reference(row, row, parameters) for row, parameters in zip(logits, rows, strict=True)]
    assert draws.token_ids.tolist() == [token for token, _ in wanted]
    np.testing.assert_array_equal(draws.logprobs, np.array([logprob for _, logprob in wanted], np.float32))
