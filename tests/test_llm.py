"""The Python interface on the real default model: what users call, and what they may do wrong."""

from __future__ import annotations

import gc
import math
import time
from pathlib import Path

import pytest

from tests.support.tiny_llm import loaded, write_model
from verispec.errors import InputError
from verispec.llm import LLM, Completion
from verispec.types import FinishReason, SamplingParams

SHORT = SamplingParams(max_tokens=6)


def num_free(llm: LLM) -> int:
    """Slots that are free or could be: everything, when nothing runs."""
    while llm.status()[:2] != (0, 0):
        time.sleep(0.001)
    llm.engine.check()
    return llm.engine.num_free_slots


def test_text_and_token_ids_are_the_same_prompt(smollm2: LLM) -> None:
    by_text = smollm2.generate("The capital of France is", SHORT)
    by_ids = smollm2.generate(smollm2.tokenizer.encode("The capital of France is"), SHORT)
    assert by_text[0].digest == by_ids[0].digest
    assert by_text[0].text.startswith(" Paris")
    assert by_text[0].prompt_ids == by_ids[0].prompt_ids


def test_results_come_in_input_order_and_are_reported_as_they_finish(smollm2: LLM) -> None:
    params = [SamplingParams(max_tokens=m) for m in (40, 1, 4)]
    seen: list[int] = []
    results = smollm2.generate(["One", "Two", "Three"], params, on_finish=lambda index, completion: seen.append(index))
    assert [len(r.token_ids) for r in results] == [40, 1, 4]
    assert sorted(seen) == [0, 1, 2]
    assert seen[0] == 1


def test_a_batch_keeps_old_objects_from_the_garbage_collector_while_it_lasts(smollm2: LLM) -> None:
    frozen: list[int] = []
    smollm2.generate("One", SHORT, on_finish=lambda index, completion: frozen.append(gc.get_freeze_count()))
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0


def test_more_prompts_than_the_queue_holds(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = smollm2.engine
    monkeypatch.setattr(engine, "has_room", lambda params: engine.num_waiting == 0)
    results = smollm2.generate([f"{i} and" for i in range(5)], SamplingParams(max_tokens=2))
    assert [len(r.token_ids) for r in results] == [2] * 5


def test_a_stream_is_the_completion_in_pieces(smollm2: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    (whole,) = smollm2.generate("Repeat: one two one two one", params)
    events = list(smollm2.stream("Repeat: one two one two one", params))
    assert "".join(e.text for e in events) == whole.text
    assert sum((e.token_ids for e in events), ()) == whole.token_ids
    assert events[-1].output is not None
    assert events[-1].output.digest == whole.digest
    assert all(e.output is None for e in events[:-1])


def test_streams_may_be_interleaved(smollm2: LLM) -> None:
    prompts = ["A list of fruits:", "Count: 1 2 3"]
    expected = [smollm2.generate(p, SHORT)[0].text for p in prompts]
    streams = [smollm2.stream(p, SHORT) for p in prompts]
    texts = ["", ""]
    for _ in range(20):
        for i, stream in enumerate(streams):
            event = next(stream, None)
            texts[i] += event.text if event else ""
    assert texts == expected


def test_closing_a_stream_frees_its_slots(smollm2: LLM) -> None:
    before, committed = num_free(smollm2), smollm2.status().totals.committed
    stream = smollm2.stream("Once upon a time", SamplingParams(max_tokens=100))
    next(stream)
    assert smollm2.status().num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert num_free(smollm2) == before
    assert smollm2.status().totals.committed < committed + 100


def test_an_interrupted_batch_frees_everything(smollm2: LLM) -> None:
    def interrupt(index: int, completion: Completion) -> None:
        raise KeyboardInterrupt

    before = num_free(smollm2)
    params = [SamplingParams(max_tokens=m) for m in (2, 50, 50)]
    with pytest.raises(KeyboardInterrupt):
        smollm2.generate(["a", "b", "c"], params, on_finish=interrupt)
    assert num_free(smollm2) == before
    assert smollm2.generate("The capital of France is", SHORT)[0].text.startswith(" Paris")


def test_chat_takes_one_conversation_or_many(smollm2: LLM) -> None:
    talks = [[{"role": "user", "content": f"Name a {thing}."}] for thing in ("river", "bird", "metal")]
    answers = smollm2.chat(talks, SHORT)
    assert [a.token_ids for a in answers] == [smollm2.chat(talk, SHORT).token_ids for talk in talks]
    assert len({a.prompt_ids for a in answers}) == 3
    assert smollm2.chat(talks[:1], SHORT)[0].digest == answers[0].digest
    for wrong in ([], [*talks, talks[0][0]], "hi", [["hi"]], [[]]):
        with pytest.raises(InputError, match="messages"):
            smollm2.chat(wrong, SHORT)  # type: ignore[call-overload]


def test_generation_defaults_come_from_the_file(smollm2: LLM, tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 3}
    with loaded(write_model(tmp_path / "m.gguf", metadata=sampling), tmp_path) as llm:
        assert dict(llm.generation_defaults) == {"temperature": 0.5, "top_k": 3}
    assert dict(smollm2.generation_defaults) == {}


def test_chat_uses_the_template_and_stops_at_the_turn_end(smollm2: LLM) -> None:
    answer = smollm2.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=30)
    )
    assert "Paris" in answer.text
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] in smollm2.tokenizer.eos_ids
    assert "<|im_end|>" not in answer.text
    streamed = smollm2.chat_stream([{"role": "user", "content": "What is the capital of France?"}], SHORT)
    assert answer.text.startswith("".join(e.text for e in streamed))


def test_score_equals_what_generation_reported(smollm2: LLM) -> None:
    """Bit for bit: the tokens a generation committed have the same log-probabilities when scored in parallel."""
    (done,) = smollm2.generate("The quick brown fox", SamplingParams(max_tokens=20, temperature=1.0, seed=5))
    scored = smollm2.score([*done.prompt_ids, *done.token_ids])
    assert [e.logprob for e in scored.logprobs[len(done.prompt_ids) - 1 :]] == [e.logprob for e in done.logprobs]
    assert scored.perplexity == pytest.approx(math.exp(-sum(e.logprob for e in scored.logprobs) / len(scored.logprobs)))
    assert len(scored.logprobs) == len(scored.token_ids) - 1
    fluent = smollm2.score("The sun rises in the east and sets in the west.").perplexity
    assert fluent < smollm2.score("Sets sun the in east rises west and the the in.").perplexity


def test_samples_share_the_prompt(smollm2: LLM) -> None:
    (done,) = smollm2.generate("My favourite colour", SamplingParams(max_tokens=8, temperature=1.0, seed=2, n=3))
    assert len(done.samples) == 3
    assert len({s.text for s in done.samples}) > 1
    assert [s.sample_index for s in done.samples] == [0, 1, 2]
    (single,) = smollm2.generate("My favourite colour", SamplingParams(max_tokens=8, temperature=1.0, seed=2))
    assert single.digest == done.samples[0].digest


def test_a_random_seed_is_reported_and_repeats(smollm2: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0)
    first, other = (smollm2.generate("Tell me", params)[0] for _ in range(2))
    assert first.seed != other.seed
    again = smollm2.generate("Tell me", SamplingParams(max_tokens=8, temperature=1.0, seed=first.seed))[0]
    assert again.digest == first.digest


def test_stop_strings_cut_the_text(smollm2: LLM) -> None:
    params = SamplingParams(max_tokens=40, stop=("four",))
    (done,) = smollm2.generate("one two three four five six seven one two three", params)
    assert done.finish_reason is FinishReason.STOP
    assert "four" not in done.text
    assert "four" in smollm2.tokenizer.decode(done.token_ids)


def test_alternatives_hold_the_greedy_token_first(smollm2: LLM) -> None:
    (done,) = smollm2.generate("The capital of France is", SamplingParams(max_tokens=3, logprobs=4, prompt_logprobs=0))
    for entry in done.logprobs:
        assert len(entry.alternatives) == 4
        assert entry.alternatives[0] == (entry.token_id, entry.logprob)
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == len(done.prompt_ids) - 1
    assert done.prompt_logprobs[0].alternatives == ()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SHORT, "empty"),
        ("", SHORT, "empty"),
        ([49152], SHORT, "vocabulary"),
        ([-1], SHORT, "vocabulary"),
        ([1] * 9000, SHORT, "9000 tokens"),
        ("x", SamplingParams(stop_ids=(10**6,)), "stop_ids"),
        ("x", SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),  # type: ignore[arg-type]
        ("x", [SHORT, SHORT], "2 sets of sampling parameters"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(smollm2: LLM, prompt: object, params: object, message: str) -> None:
    before = num_free(smollm2)
    with pytest.raises(InputError, match=message):
        smollm2.generate([prompt] if isinstance(prompt, list) else prompt, params)  # type: ignore[arg-type,list-item]
    assert num_free(smollm2) == before
    assert not smollm2.engine.has_work


def test_unknown_names_are_refused(smollm2: LLM) -> None:
    with pytest.raises(InputError, match="unknown drafter 'magic'; known: none, suffix"):
        smollm2.generate("x", SHORT, drafter="magic")
    for options, message in (
        ({"drafter": "magic"}, "unknown drafter"),
        ({"backend": "abacus"}, "unknown backend"),
        ({"fast_weights": "int3"}, "fast_weights must be same, int4, int8, fp8, not 'int3'"),
        ({"backend": "numpy", "fast_weights": "int4"}, "fast_weights int4 needs the cuda backend; this is the numpy"),
        ({"model": "no-such-model"}, "known models: smollm2-135m"),
        ({"kv_slots": 0}, "kv_slots"),
    ):
        with pytest.raises(InputError, match=message):
            LLM(**options)  # type: ignore[arg-type]
