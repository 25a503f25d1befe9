"""/generate (SGLang's form) and /inference/v1/generate (vLLM's): tokens in, tokens out, for training frameworks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from verispec.errors import InputError
from verispec.server.api import Extension, GenerateRequest, Sampling, TokensRequest
from verispec.server.core import Answer, Core, sampling_params
from verispec.server.errors import as_api_error
from verispec.server.http import EVENTS, Received, Reply, event, json_reply, parse
from verispec.server.logprobs import shortest
from verispec.server.openai import DONE, make_call, new_id
from verispec.types import TokenLogprob

_encode = msgspec.json.encode
_SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_DEFAULT_MAX_TOKENS = 128


async def generate(core: Core, received: Received) -> Reply:
    """Continue a text or tokens."""
    body = received.parsed(GenerateRequest)
    if (body.text is None) == (body.input_ids is None):
        raise InputError("text: give either text or input_ids")
    text = body.text
    if text is None:
        ids = body.input_ids or []
    else:
        ids = await core.tokenised(lambda: core.llm.tokenizer.encode(text), len(text))
    named = {_SGLANG_NAMES.get(name, name): value for name, value in (body.sampling_params or {}).items()}
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    answer = await _started(core, received, ids, named, body.stream, body.verispec, logprobs=logprobs)

    def written() -> Any:
        found = [_sglang(answer, i, with_logprobs=bool(body.return_logprob)) for i in range(len(answer.choices))]
        return found[0] if len(found) == 1 else found

    if body.stream:
        return Reply(_frames(answer, written), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(written))


async def inference_generate(core: Core, received: Received) -> Reply:
    """Continue tokens."""
    body = received.parsed(TokensRequest)
    core.check_model(body.model)
    named = dict(body.sampling_params or {})
    logprobs = named.pop("logprobs", None)
    if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int)):
        raise InputError("sampling_params.logprobs must be a whole number")
    answer = await _started(core, received, body.token_ids, named, body.stream, body.verispec, logprobs=logprobs)
    request_id = new_id("gen-")

    def written() -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "token_ids": choice.entries.token_ids,
                "logprobs": None if logprobs is None else {"content": [_entry(core, e) for e in choice.entries]},
                "finish_reason": None if choice.output is None else str(choice.output.finish_reason),
            }
            for i, choice in enumerate(answer.choices)
        ]
        return {"request_id": request_id, "choices": choices, "verispec": answer.extension(0)}

    if body.stream:
        return Reply(_frames(answer, written), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(written))


async def _started(
    core: Core,
    received: Received,
    prompt_ids: list[int],
    named: dict[str, Any],
    stream: bool | None,
    extension: Extension | None,
    *,
    logprobs: int | None,
) -> Answer:
    sampling = parse(_encode(named), Sampling, where="sampling_params")
    sampling.stream, sampling.verispec = stream, extension
    max_tokens = _DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    params = sampling_params(sampling, core.llm.generation_defaults, max_tokens=max_tokens, logprobs=logprobs)
    return core.start(await make_call(core, sampling, received, prompts=[prompt_ids], params=params))


def _sglang(answer: Answer, index: int, *, with_logprobs: bool) -> dict[str, Any]:
    choice = answer.choices[index]
    reason = None
    if choice.output is not None:
        reason = {"type": str(choice.output.finish_reason)}
    meta: dict[str, Any] = {
        "prompt_tokens": answer.prompt_len,
        "completion_tokens": choice.num_tokens,
        "finish_reason": reason,
        "verispec": answer.extension(index),
    }
    if with_logprobs:
        meta["output_token_logprobs"] = [[shortest(e.logprob), e.token_id, None] for e in choice.entries]
        meta["output_top_logprobs"] = [[[shortest(v), i, None] for i, v in e.alternatives] for e in choice.entries]
    return {"text": choice.text, "output_ids": choice.entries.token_ids, "meta_info": meta}


def _entry(core: Core, entry: TokenLogprob) -> dict[str, Any]:
    tops = [{"token_id": i, "logprob": shortest(value)} for i, value in entry.alternatives]
    return {"token_id": entry.token_id, "logprob": shortest(entry.logprob), "top_logprobs": tops}


async def _frames(answer: Answer, written: Any) -> AsyncIterator[bytes]:
    """Everything so far with each frame, as these interfaces have it."""
    try:
        async for commits in answer.commits():
            if commits:
                yield event(_encode(written()), event_id=f"{commits[-1].choice}.{commits[-1].end}")
    except Exception as error:
        yield event(_encode(as_api_error(error).body()))
    yield DONE
