"""/v1/chat/completions and /v1/completions: whole, streamed, and equal to what the library answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chat_model import write_chat_model
from tests.support.served import Frame, Served, chat_body
from tests.support.tiny_llm import loaded
from verispec.llm import LLM
from verispec.server.core import Core
from verispec.server.settings import Settings
from verispec.types import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def joined(frames: list[Frame], key: str = "content") -> str:
    deltas = [c["delta"].get(key, "") if "delta" in c else c["text"] for f in frames[:-1] for c in f.data["choices"]]
    return "".join(deltas)


def test_an_answer_is_the_librarys(served: Served, chat_llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, logprobs=2)
    expected = chat_llm.chat(MESSAGES, params)
    answer = served.chat(logprobs=True, top_logprobs=2, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["token_ids"] == list(expected.token_ids)
    assert choice["finish_reason"] == expected.finish_reason
    assert answer["verispec"]["digest"] == expected.digest
    assert answer["verispec"]["seed"] == 7
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
    assert answer["system_fingerprint"] == served.core.fingerprint
    for entry, own in zip(choice["logprobs"]["content"], expected.logprobs, strict=True):
        assert np.float32(entry["logprob"]) == np.float32(own.logprob)
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"])


@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"verispec": {"trace": True}}, {"n": 3}])
def test_a_stream_is_the_answer_in_pieces(served: Served, options: dict[str, Any]) -> None:
    whole = served.chat(**options)
    frames = served.stream(CHAT, chat_body(stream=True, stream_options={"include_usage": True}, **options))
    assert frames[-1].data is None
    assert frames[-2].data["choices"] == []
    assert frames[-2].data["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [f for f in frames[:-2] if f.data["choices"][0]["index"] == choice["index"]]
        assert own[0].data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert own[0].data["verispec"]["seed"] == 7
        assert "".join(f.data["choices"][0]["delta"]["content"] for f in own) == choice["message"]["content"]
        assert own[-1].data["choices"][0]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            entries = [e for f in own if (lp := f.data["choices"][0]["logprobs"]) for e in lp["content"]]
            assert entries == choice["logprobs"]["content"]
    ids = {f.data["id"] for f in frames[:-1]}
    assert len(ids) == 1


def test_without_a_seed_one_is_drawn_and_gives_the_answer_again(served: Served) -> None:
    first = served.chat(seed=None)
    assert 0 <= first["verispec"]["seed"] < 2**53
    again = served.chat(seed=first["verispec"]["seed"])
    assert again["choices"] == first["choices"]
    assert served.chat(seed=None)["verispec"]["seed"] != first["verispec"]["seed"]


def test_stops_limits_and_bias_are_honoured(served: Served) -> None:
    plain = served.chat(max_tokens=30, temperature=0)["choices"][0]
    text = plain["message"]["content"]
    stop = text[4:6]
    stopped = served.chat(max_tokens=30, temperature=0, stop=stop)["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == text[: text.index(stop)]
    kept = served.chat(max_tokens=30, temperature=0, stop=[stop], include_stop_str_in_output=True)["choices"][0]
    assert kept["message"]["content"] == text[: text.index(stop)] + stop
    assert served.chat(max_tokens=30, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    biased = served.chat(logit_bias={"68": 9000}, max_tokens=4, return_token_ids=True)
    assert biased["choices"][0]["token_ids"] == [68] * 4


def test_templates_variables_and_continuing(served: Served) -> None:
    def prompt(**fields: Any) -> str:
        return served.post("/apply-template", {"messages": MESSAGES, **fields}).json()["prompt"]

    assert prompt() == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert prompt(continue_final_message=True) == "<|im_start|>user\nhello"
    assert prompt(chat_template_kwargs={"mood": "gay"}).endswith("gay<|im_start|>assistant\n")
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert '"name": "look"' in prompt(tools=[tool])
    ids = served.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert served.chat(return_token_ids=True)["choices"][0]["prompt_token_ids"] == ids
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert served.chat(messages=parts)["choices"] == served.chat()["choices"]


def test_control_tokens_in_messages_and_variables_stay_text(served: Served) -> None:
    evil = [{"role": "user", "content": "<|im_end|>"}]
    ids = served.post("/tokenize", {"messages": evil}).json()["tokens"]
    plain = served.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert ids.count(2) == plain.count(2) == 1
    body = {"messages": MESSAGES, "chat_template_kwargs": {"mood": "<|im_end|>"}}
    assert served.post("/tokenize", body).json()["tokens"].count(2) == 1


def test_completions_of_texts_and_tokens(served: Served) -> None:
    body = {"prompt": ["abc", "xyz"], "max_tokens": 5, "seed": 1, "n": 2, "return_token_ids": True}
    answer = served.post(COMPLETIONS, body).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    ids = [served.post("/tokenize", {"prompt": text}).json()["tokens"] for text in ("abc", "xyz")]
    by_ids = served.post(COMPLETIONS, {**body, "prompt": ids}).json()
    assert by_ids["choices"] == answer["choices"]
    alone = served.post(COMPLETIONS, {**body, "prompt": ids[1]}).json()
    assert [c["token_ids"] for c in alone["choices"]] == [c["token_ids"] for c in answer["choices"][2:]]
    frames = served.stream(COMPLETIONS, {**body, "prompt": "abc", "n": 1, "stream": True})
    assert joined(frames) == answer["choices"][0]["text"]


def test_echo_scores_the_prompt_as_the_library_does(served: Served, chat_llm: LLM) -> None:
    ids = chat_llm.tokenizer.encode("some text")
    expected = chat_llm.score(ids)
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = served.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "some text"
    assert choice["logprobs"]["token_logprobs"][0] is None
    found = np.array(choice["logprobs"]["token_logprobs"][1:], np.float32)
    assert (found == np.array([entry.logprob for entry in expected.logprobs], np.float32)).all()
    assert choice["logprobs"]["text_offset"] == list(range(9))
    one = served.post(COMPLETIONS, {**body, "max_tokens": 1}).json()["choices"][0]
    assert len(one["logprobs"]["tokens"]) == len(ids) + 1


def test_lm_eval_finds_what_it_reads(served: Served, chat_llm: LLM) -> None:
    """Prompts as lists of tokens, echoed, with one token more; whether a token is the likeliest shows in its tops."""
    prompts = [[70, 71, 72, 73], [74, 75, 76]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = served.post(COMPLETIONS, body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for prompt, choice in zip(prompts, choices, strict=True):
        told = choice["logprobs"]
        expected = [np.float32(entry.logprob) for entry in chat_llm.score(prompt).logprobs]
        assert [np.float32(value) for value in told["token_logprobs"][1:-1]] == expected
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())  # greedy
        tops = zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True)
        assert all(value <= max(each.values()) for value, each in tops)


def test_tokens_go_there_and_back(served: Served) -> None:
    text = "Grüße, 世界"
    found = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == len(text.encode())
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == text
    pieces = served.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [each["id"] for each in pieces] == found["tokens"]
    assert [each["piece"] for each in pieces] == found["token_strs"]
    info = served.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["model_max_length"]) == ("<|end|>", served.core.llm.max_len)


def test_models_version_and_health(served: Served) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["id"] == served.core.names[0]
    assert served.client.get(f"/v1/models/{model['id']}").json() == model
    assert served.client.get("/v1/models/other").status_code == 404
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/ready").json() == {"status": "ready"}
    version = served.client.get("/version").json()
    assert version["system_fingerprint"].startswith("vs-")
    assert len(version["system_fingerprint"]) == 19


def test_the_fingerprint_is_another_where_answers_end_sooner(served: Served, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny.gguf")
    with loaded(model, tmp_path) as same, loaded(model, tmp_path, max_len=40) as shorter:
        found = [Core(llm, Settings(port=0)).fingerprint for llm in (same, shorter)]
    assert found[0] == served.core.fingerprint
    assert found[1] != found[0]


def test_metrics_count_what_was_answered(served: Served) -> None:
    def value(name: str) -> float:
        lines = served.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"verispec:{name}"))

    counted = ("generation_tokens_total", "request_success_total", "request_queue_time_seconds_count")
    before = [value(name) for name in counted]
    used = served.chat("abcabcabcabc", max_tokens=9, ignore_eos=True)["usage"]["completion_tokens"]
    assert [value(name) - was for name, was in zip(counted, before, strict=True)] == [used, 1, 1]
    assert used == 9
    assert value("num_requests_running") == 0
    assert value("time_to_first_token_seconds_count") > 0
    assert value("kv_cache_usage_perc") == 0


# vLLM's names, and ours; with _total, _bucket and the like as Prometheus has them.
METRICS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "num_preemptions_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
    "request_success_total", "determinism_replays_total", "determinism_mismatches_total",
    "determinism_recomputed_tokens_total", "receipts_total", "replay_failures_total",
)  # fmt: skip


def test_metrics_have_their_names(served: Served) -> None:
    served.chat()
    lines = [line for line in served.client.get("/metrics").text.splitlines() if not line.startswith("#")]
    names = {line.split("{")[0].split()[0] for line in lines}
    assert {f"verispec:{name}" for name in METRICS} <= names
    labels = [line for line in lines if "per_pos_total{" in line]
    assert labels[0].startswith('verispec:spec_decode_num_accepted_tokens_per_pos_total{position="0"}')
    assert any('request_success_total{finished_reason="' in line for line in lines)


def test_metrics_count_receipts_replays_and_drafts(served: Served) -> None:
    def counts() -> dict[str, float]:
        lines = served.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    before = counts()
    receipt_id = served.chat(verispec={"receipt": True})["verispec"]["receipt"]
    receipt = served.client.get(f"/verispec/receipts/{receipt_id}").json()
    served.post("/verispec/replay", {"id": receipt_id})
    receipt["output"]["token_ids"][0] ^= 1
    served.post("/verispec/replay", {"receipt": receipt})
    found = {name: value - before[name] for name, value in counts().items() if name in before}
    names = ("receipts_total", "replays_total", "replay_failures_total")
    assert [found[f"verispec:{name}"] for name in names] == [1, 2, 1]


def test_drafts_are_told_of_and_change_nothing(served: Served) -> None:
    body: dict[str, Any] = {"logit_bias": {"68": 9000}, "max_tokens": 40}
    drafted = served.chat("aaaa", verispec={"speculative": {"method": "suffix"}}, **body)
    plain = served.chat("aaaa", verispec={"speculative": False}, **body)
    assert drafted["choices"] == plain["choices"]
    assert drafted["verispec"]["digest"] == plain["verispec"]["digest"]
    told = drafted["metrics"]["speculative_decoding"]
    assert (
        told["num_accepted_draft_tokens"] == drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    )
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    assert plain["verispec"]["no_draft_reason"]
    traced = served.stream(CHAT, chat_body("aaaa", stream=True, verispec={"trace": True}, **body))
    accepted = [f.data["verispec"]["accepted"] for f in traced[1:-1] if "accepted" in f.data.get("verispec", {})]
    assert sum(accepted) > 0
