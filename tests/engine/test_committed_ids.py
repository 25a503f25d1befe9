"""Output that a client has already: generation goes on behind it, to the bit as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.adversaries import collect
from tests.support.decoding import letters
from tests.support.fake_backend import FakeBackend
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import Accept, FinishReason, SampleOutput, SamplingParams

PROMPT = (1, 2, 3, 1, 2)
PARAMS = SamplingParams(
    max_tokens=20, min_tokens=6, temperature=1.0, seed=3, stop_ids=(7,), repetition_penalty=1.3, frequency_penalty=0.2
)


def run(request: Request, method: str = "none", **config: int) -> list[SampleOutput]:
    backend = FakeBackend(vocab_size=8)
    options = EngineConfig(num_slots=backend.limits.num_slots, **config)
    engine = Engine(backend, family=(1, 2, 4, 8, 16, 32), drafters=make_drafters(), config=options)
    engine.add(replace(request, speculation=Speculation(method)))
    return [output for _, output in sorted(collect(engine).items())]


@pytest.mark.parametrize("method", ["none", "suffix", "decode"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_cut_anywhere_the_rest_is_the_same(method: str, is_streamed: bool) -> None:
    request = Request(PROMPT, replace(PARAMS, n=2), text=letters("ah"), is_streamed=is_streamed)
    whole = run(request)
    assert all(len(output.token_ids) >= 4 for output in whole)
    for cut in range(max(len(output.token_ids) for output in whole) + 1):
        given = tuple(output.token_ids[:cut] for output in whole)
        rest = run(replace(request, committed_ids=given), method)
        for before, after, ids in zip(whole, rest, given, strict=True):
            assert (*ids, *after.token_ids) == before.token_ids
            assert after.logprobs == before.logprobs[len(ids) :]
            assert (after.text, after.finish_reason) == (before.text, before.finish_reason)
            assert after.given_ids == ids


def test_control_other_output_goes_on_otherwise() -> None:
    (whole,) = run(Request(PROMPT, PARAMS))
    first = (whole.token_ids[0] + 1) % 7
    (rest,) = run(Request(PROMPT, PARAMS, committed_ids=((first, *whole.token_ids[1:4]),)))
    assert rest.logprobs != whole.logprobs[4:]


def test_what_cannot_have_been_is_refused() -> None:
    for committed, what in (
        (((1,), (2,)), "2 lists for n = 1"),
        (((99,),), "token id 99"),
        (((1,) * 21,), "21 tokens; the request can have 20"),
    ):
        with pytest.raises(InputError, match=f"committed_ids.*{what}"):
            run(Request(PROMPT, PARAMS, committed_ids=committed))
    engine = Engine(FakeBackend(), family=(1, 2, 4), drafters=make_drafters())
    speculation = Speculation("model", accept=Accept.REJECTION)
    params = replace(PARAMS, deterministic=False, stop_ids=())
    with pytest.raises(InputError):
        engine.add(Request(PROMPT, params, speculation, committed_ids=((1,),)))


def test_a_stop_inside_ends_it_at_once() -> None:
    params = replace(PARAMS, min_tokens=0)
    (output,) = run(Request(PROMPT, params, committed_ids=((1, 7, 2),)))
    assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, ())


def test_tenants_share_no_prefix() -> None:
    engine = Engine(FakeBackend(), family=(1, 2, 4, 8), drafters=make_drafters())
    cached = []
    for salt in ("a", "b", "a"):
        engine.add(Request((1, 2, 3, 4, 5, 6), SamplingParams(max_tokens=2), Speculation("none"), salt=salt))
        cached += [output.stats.cached_tokens for output in collect(engine).values()]
    assert cached == [0, 0, 5]


def test_output_that_was_given_is_no_cached_prompt() -> None:
    engine = Engine(FakeBackend(), family=(1, 2, 4, 8), drafters=make_drafters())
    engine.add(Request(PROMPT, PARAMS, Speculation("none")))
    (whole,) = collect(engine).values()
    engine.add(Request(PROMPT, PARAMS, Speculation("none"), committed_ids=(whole.token_ids[:-1],)))
    (rest,) = collect(engine).values()
    assert rest.token_ids == whole.token_ids[-1:]
    assert rest.stats.cached_tokens == len(PROMPT) - 1
