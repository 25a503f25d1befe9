"""/generate and /inference/v1/generate: what training frameworks send, and what they are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.served import Served
from verispec.llm import LLM
from verispec.types import SamplingParams

SGLANG, VLLM = "/generate", "/inference/v1/generate"
# What slime sends, with its defaults.
SLIME_SAMPLING: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 6,
}  # fmt: skip


def ids_of(served: Served, text: str) -> list[int]:
    ids: list[int] = served.post("/tokenize", {"prompt": text}).json()["tokens"]
    return ids


def generated(served: Served, path: str = SGLANG, **body: Any) -> Any:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tokens_in_and_tokens_out(served: Served) -> None:
    ids = served.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    sampling = {"max_tokens": 5, "seed": 6, "temperature": 1.0}
    body = {"prompt": ids, **sampling, "return_token_ids": True}
    expected = served.post("/v1/completions", body).json()["choices"][0]
    answer = served.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {**sampling, "logprobs": 1}})
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert [e["token_id"] for e in choice["logprobs"]["content"]] == expected["token_ids"]
    theirs = {"max_new_tokens": 5, "sampling_seed": 6, "temperature": 1.0}
    for given in ({"text": "abc"}, {"input_ids": ids}):
        found = served.post("/generate", {**given, "sampling_params": theirs, "return_logprob": True}).json()
        assert found["output_ids"] == expected["token_ids"]
        assert found["text"] == expected["text"]
        assert [e[1] for e in found["meta_info"]["output_token_logprobs"]] == expected["token_ids"]
    streamed = served.stream("/generate", {"text": "abc", "sampling_params": theirs, "stream": True})
    assert streamed[-2].data["output_ids"] == expected["token_ids"]
    bad = served.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": "x"}})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "sampling_params.max_new_tokens"


def test_slime_is_answered(served: Served, chat_llm: LLM) -> None:
    """Ids and log-probabilities are the library's, and everything that slime reads is there."""
    ids = ids_of(served, "hello")
    (expected,) = chat_llm.generate([ids], SamplingParams(seed=6, max_tokens=8, temperature=1.0))
    found = generated(served, sampling_params=SLIME_SAMPLING, return_logprob=True, input_ids=ids)
    told = found["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in told] == list(expected.token_ids)
    assert [np.float32(entry[0]) for entry in told] == [np.float32(e.logprob) for e in expected.logprobs]
    assert found["meta_info"]["finish_reason"] == {"type": "length"}
    assert found["meta_info"]["prompt_tokens"] == len(ids)
    assert found["meta_info"]["cached_tokens"] >= 0
    refused = served.post(SGLANG, {"input_ids": ids, "sampling_params": {"custom_params": {"a": 1}}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "sampling_params.custom_params"


def test_areal_is_answered(served: Served) -> None:
    """It always sends the images of a prompt, of which there are none."""
    sampling = {"top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "temperature": 1.0, "stop_token_ids": [],
                "frequency_penalty": 0.0, "ignore_eos": True}  # fmt: skip
    ask = {"input_ids": ids_of(served, "hello"), "sampling_params": sampling, "return_logprob": True, "stream": False}
    meta = generated(served, **ask, image_data=[])["meta_info"]
    assert (meta["finish_reason"]["type"], len(meta["output_token_logprobs"])) == ("length", 6)
    for name, value in (("image_data", ["data:,x"]), ("lora_path", "lora_1")):  # control
        assert served.post(SGLANG, {**ask, name: value}).json()["error"]["param"] == name


@pytest.mark.parametrize("n", [1, 2])
def test_vllms_frames_have_what_is_new(served: Served, n: int) -> None:
    """Token by token, with the log-probabilities of its own names; usage as it is asked for."""
    sampling = {"max_tokens": 9, "seed": 6, "logprobs": 1, "ignore_eos": True, "n": n}
    ask = {"token_ids": ids_of(served, "hello"), "sampling_params": sampling, "verispec": {"receipt": True}}
    whole = generated(served, VLLM, **ask)
    entry = whole["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{entry['token_id']}"
    assert whole["usage"]["completion_tokens"] == 9 * n
    own = whole["verispec"]["choices"] if n > 1 else [whole["verispec"]]
    assert len({each["receipt"] for each in own}) == len({each["digest"] for each in own}) == n
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = served.stream(VLLM, {**ask, "stream": True, "stream_options": options})
    joined: list[tuple[list[int], list[Any]]] = [([], []) for _ in range(n)]
    for frame in (f.data for f in frames if f.event_id):
        (choice,) = frame["choices"]
        joined[choice["index"]][0].extend(choice["token_ids"])
        joined[choice["index"]][1].extend(choice["logprobs"]["content"])
        assert frame["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in joined)
        assert frame["verispec"]["seed"] == 6
    assert joined == [(c["token_ids"], c["logprobs"]["content"]) for c in whole["choices"]]
    assert (frames[-2].data["choices"], frames[-2].data["usage"]["completion_tokens"]) == ([], 9 * n)
    assert frames[-1].data is None
    plain = served.stream(VLLM, {**ask, "stream": True})
    assert not [f for f in plain[:-1] if "usage" in f.data]  # control
    rest = served.stream(VLLM, {**ask, "stream": True}, headers={"Last-Event-ID": plain[0].event_id or ""})
    told = [i for f in (plain[0], *rest) if f.data and f.data["choices"][0]["index"] == 0
            for i in f.data["choices"][0]["token_ids"]]  # fmt: skip
    assert told == whole["choices"][0]["token_ids"]


def test_control_tokens_and_stops_are_text_where_that_is_wanted(served: Served, chat_llm: LLM) -> None:
    eos = chat_llm.tokenizer.eos_ids[0]
    name, letter = chat_llm.tokenizer.token_text(eos), chat_llm.tokenizer.encode("a")[0]

    def text(*, bias: int, **sampling: Any) -> str:
        sampling = {"max_new_tokens": 3, "sampling_seed": 1, "logit_bias": {str(bias): 9000}, **sampling}
        told: str = generated(served, text="abc", sampling_params=sampling)["text"]
        return told

    assert text(bias=eos, skip_special_tokens=False, no_stop_trim=True) == name
    assert text(bias=eos, skip_special_tokens=False) == ""
    assert text(bias=eos, no_stop_trim=True) == text(bias=eos) == ""
    assert text(bias=eos, skip_special_tokens=False, ignore_eos=True) == name * 3
    assert text(bias=eos, ignore_eos=True) == ""
    assert text(bias=letter, stop_token_ids=[letter], no_stop_trim=True) == "a"
    assert text(bias=letter, stop_token_ids=[letter]) == ""
    assert text(bias=letter, stop="aa", no_stop_trim=True) == "aa"
    assert text(bias=letter, stop="aa") == ""


@pytest.mark.parametrize("start", [0, 2])
def test_log_probabilities_of_the_prompt(served: Served, chat_llm: LLM, start: int) -> None:
    ids = ids_of(served, "some text")
    expected = [None, *(np.float32(entry.logprob) for entry in chat_llm.score(ids).logprobs)]
    asked = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = generated(served, **asked, logprob_start_len=start)["meta_info"]
    told = meta["input_token_logprobs"]
    assert [None if value is None else np.float32(value) for value, _, _ in told] == expected[start:]
    assert [token_id for _, token_id, _ in told] == ids[start:]
    assert "".join(text for _, _, text in told) == "some text"[start:]
    assert [tops is None or len(tops) for tops in meta["input_top_logprobs"]] == [True, *[2] * 8][start:]
    assert "input_token_logprobs" not in generated(served, **asked, logprob_start_len=-1)["meta_info"]
    by_vllm = generated(served, VLLM, token_ids=ids, sampling_params={"prompt_logprobs": 0})["prompt_logprobs"]
    assert [entry and np.float32(entry[str(i)]["logprob"]) for entry, i in zip(by_vllm, ids, strict=True)] == expected
    assert "prompt_logprobs" not in generated(served, VLLM, token_ids=ids)


@pytest.mark.parametrize(("path", "body", "param"), [
    (SGLANG, {"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    (SGLANG, {"text": "a", "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    (SGLANG, {"text": "a", "sampling_params": {"temperature": 1e-9}}, "sampling_params.temperature"),
    (SGLANG, {"input_ids": [[1], 2]}, "input_ids"),
    (SGLANG, {"text": [], }, "text"),
    (VLLM, {"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 1}},
     "sampling_params.prompt_logprobs"),
    (VLLM, {"token_ids": [1], "sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
    (VLLM, {"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
])  # fmt: skip
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_several_prompts_have_several_answers(served: Served) -> None:
    texts = ["abc", "hello there"]
    alone = [generated(served, text=text, sampling_params=SLIME_SAMPLING) for text in texts]
    for given in ({"text": texts}, {"input_ids": [ids_of(served, text) for text in texts]}):
        together = generated(served, **given, sampling_params=SLIME_SAMPLING)
        assert [each["output_ids"] for each in together] == [each["output_ids"] for each in alone]
        counts = [each["meta_info"]["prompt_tokens"] for each in together]
        assert counts == [len(ids_of(served, text)) for text in texts]
    assert isinstance(generated(served, text=["abc"], sampling_params=SLIME_SAMPLING), list)


def test_a_cache_salt_keeps_prefixes_apart(served: Served) -> None:
    ids = ids_of(served, "a prompt that is long enough to be found again " * 4)

    def cached(salt: str | None) -> int:
        before = hits()
        generated(served, VLLM, token_ids=ids, sampling_params={"max_tokens": 1}, cache_salt=salt)
        return int(hits() - before)

    def hits() -> float:
        lines = served.client.get("/metrics").text.splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("verispec:prefix_cache_hits_total"))

    most = len(ids) // 2
    assert cached(None) < most < cached(None)
    assert cached("mine") < most < cached("mine")
    named = generated(served, VLLM, token_ids=ids, request_id="mine", sampling_params={"max_tokens": 1})
    assert named["request_id"] == "mine"
