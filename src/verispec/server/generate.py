"""/generate (SGLang's form) and /inference/v1/generate (vLLM's): tokens in, tokens out, for training frameworks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from verispec.errors import InputError
from verispec.server.answer import Answer
from verispec.server.api import (
    MAX_PROMPTS,
    GenerateRequest,
    GenerateSampling,
    Sampling,
    StreamOptions,
    TokensRequest,
    TokensSampling,
)
from verispec.server.call import refuse_trace, sampling_params
from verispec.server.choices import Choice, Commit
from verispec.server.core import Core
from verispec.server.errors import as_api_error, renamed
from verispec.server.http import EVENTS, Received, Reply, event, json_reply
from verispec.server.logprobs import prompt_entries, shortest
from verispec.server.openai import DONE, Told, make_call, new_id
from verispec.types import FinishReason, TokenLogprob, TokenLogprobs

_encode = msgspec.json.encode
_DEFAULT_MAX_TOKENS = 128
_SGLANG_NAMES = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}  # fmt: skip


async def generate(core: Core, received: Received) -> Reply:
    """Continue a text or tokens, or several of them."""
    body = received.parsed(GenerateRequest)
    sampling = body.sampling_params or GenerateSampling()
    for theirs, name in _SGLANG_NAMES.items():
        if getattr(sampling, theirs) is not None:
            setattr(sampling, name, getattr(sampling, theirs))
    prompts = await _prompts(core, body)
    special_ids = core.llm.tokenizer.special_ids
    alternatives = (body.top_logprobs_num or 0) if body.return_logprob else None
    start = -1 if body.logprob_start_len is None or alternatives is None else body.logprob_start_len
    names = {"prompt_logprobs": "logprob_start_len"} | ({} if body.text is None else {"input_ids": "text"})
    with renamed(names, GenerateRequest.__struct_fields__):
        answer = await _started(
            core, received, prompts, sampling, body, logprobs=alternatives,
            prompt_logprobs=alternatives if start >= 0 else None,
            shown_ids=sorted(special_ids) if sampling.skip_special_tokens is False else (),
        )  # fmt: skip
    given = body.input_ids if body.text is None else body.text
    is_list = answer.call.params.n > 1 or (isinstance(given, list) and not isinstance(given[0], int))

    def written() -> Any:
        found = [_sglang(answer, i, body, first=start) for i in range(len(answer.choices))]
        return found if is_list else found[0]

    if body.stream:
        return Reply(_frames(answer, written), content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(written))


async def inference_generate(core: Core, received: Received) -> Reply:
    """Continue tokens."""
    body = received.parsed(TokensRequest)
    core.check_model(body.model)
    sampling = body.sampling_params or TokensSampling()
    with renamed({"prompt_logprobs": "sampling_params.prompt_logprobs"}, TokensRequest.__struct_fields__):
        answer = await _started(
            core, received, [body.token_ids], sampling, body, logprobs=sampling.logprobs, cache_salt=body.cache_salt
        )
    head = {"request_id": body.request_id or new_id("gen-")}
    wants_logprobs = sampling.logprobs is not None

    def choice(index: int, entries: TokenLogprobs) -> dict[str, Any]:
        output = answer.choices[index].output
        return {
            "index": index,
            "token_ids": entries.token_ids,
            "logprobs": {"content": [_entry(entry) for entry in entries]} if wants_logprobs else None,
            "finish_reason": None if output is None else str(output.finish_reason),
        }

    def written() -> dict[str, Any]:
        choices = [choice(i, each.entries) for i, each in enumerate(answer.choices)]
        found = {**head, "choices": choices, "usage": answer.usage(), "verispec": answer.extensions()}
        if sampling.prompt_logprobs is None:
            return found
        output = answer.choices[0].output
        scored = None if output is None else prompt_entries(core.llm.tokenizer, output.prompt_logprobs)
        return {**found, "prompt_logprobs": scored}

    if not body.stream:
        return json_reply(await answer.whole(written))

    def frame(commit: Commit) -> dict[str, Any]:
        own = answer.extension(None if commit.event.output is None else commit.choice)
        return {**head, "choices": [choice(commit.choice, commit.logprobs)], "verispec": own}

    frames = _deltas(answer, frame, head, body.stream_options or StreamOptions())
    return Reply(frames, content_type=EVENTS, on_end=answer.close)


async def _prompts(core: Core, body: GenerateRequest) -> list[list[int]]:
    """The tokens of every prompt. A flat list of numbers is one prompt."""
    if (body.text is None) == (body.input_ids is None):
        raise InputError("text: give either text or input_ids")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        encode = core.llm.tokenizer.encode
        return [await core.tokenised(partial(encode, text), len(text)) for text in texts]
    given: list[Any] = body.input_ids or []
    prompts = [given] if isinstance(given[0], int) else given
    if len(prompts) > MAX_PROMPTS:
        raise InputError(f"input_ids may hold at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    if not all(isinstance(ids, list) and all(isinstance(i, int) for i in ids) for ids in prompts):
        raise InputError("input_ids must be token ids, or lists of token ids")
    return prompts


async def _started(
    core: Core,
    received: Received,
    prompts: list[list[int]],
    sampling: Sampling,
    body: GenerateRequest | TokensRequest,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    **more: Any,
) -> Answer:
    """The answer, begun. What is wrong with a sampling parameter is said of its place."""
    refuse_trace(body.verispec)
    max_tokens = _DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    try:
        params = sampling_params(
            sampling, body.verispec, core.llm.generation_defaults, max_tokens=max_tokens, logprobs=logprobs,
            prompt_logprobs=sampling.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        )  # fmt: skip
        call = await make_call(
            core,
            sampling,
            received,
            prompts=prompts,
            params=params,
            stream=body.stream,
            extension=body.verispec,
            **more,
        )
        return core.start(call)
    except InputError as error:
        found = as_api_error(error, fields=frozenset(sampling.__struct_fields__))
        if found.param is None:
            raise
        found.param, found.message = f"sampling_params.{found.param}", f"sampling_params.{found.message}"
        raise found from error


def _sglang(answer: Answer, index: int, body: GenerateRequest, *, first: int) -> dict[str, Any]:
    """One choice. `first` is the first token of the prompt to tell the log-probability of, if any is."""
    choice, prompt_ids = answer.choices[index], answer.call.prompts[index // answer.call.params.n]
    output = choice.output
    token_text = answer.core.llm.tokenizer.token_text if body.return_text_in_logprobs else lambda token_id: None

    def own(entries: Iterable[TokenLogprob]) -> list[list[Any]]:
        return [[shortest(e.logprob), e.token_id, token_text(e.token_id)] for e in entries]

    def tops(entries: Iterable[TokenLogprob]) -> list[list[Any]]:
        return [[[shortest(value), i, token_text(i)] for i, value in e.alternatives] for e in entries]

    meta: dict[str, Any] = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": choice.num_tokens,
        "cached_tokens": 0 if output is None else output.stats.cached_tokens,
        "finish_reason": None if output is None else {"type": str(output.finish_reason)},
        "verispec": answer.extension(index),
    }
    if body.return_logprob:
        meta |= {"output_token_logprobs": own(choice.entries), "output_top_logprobs": tops(choice.entries)}
    if first >= 0 and output is not None:
        scored = output.prompt_logprobs or ()
        beginning = [None, prompt_ids[0], token_text(prompt_ids[0])]
        meta["input_token_logprobs"] = [beginning, *own(scored)][first:]
        meta["input_top_logprobs"] = [None, *tops(scored)][first:]
    text = choice.text + _stopping_text(answer, choice)
    return {"text": text, "output_ids": choice.entries.token_ids, "meta_info": meta}


def _stopping_text(answer: Answer, choice: Choice) -> str:
    """The text of the token that ended a choice, where such are kept; as a control token it must be shown as well."""
    call, tokenizer = answer.call, answer.core.llm.tokenizer
    if not call.keeps_stop or choice.output is None or choice.output.finish_reason is not FinishReason.STOP:
        return ""
    last = choice.entries.token_ids[-1]
    stopping = {*call.params.stop_ids, *(() if call.params.ignore_eos else tokenizer.eos_ids)}
    is_shown = last not in tokenizer.special_ids or last in call.shown_ids
    return tokenizer.token_text(last) if last in stopping and is_shown else ""


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    tops = [_token(*alternative) for alternative in entry.alternatives]
    return {**_token(entry.token_id, entry.logprob), "top_logprobs": tops}


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    """As vLLM names a token that has no text."""
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": shortest(logprob), "bytes": None}


async def _frames(answer: Answer, written: Callable[[], Any]) -> AsyncIterator[bytes]:
    """Everything so far with each frame, as SGLang has it: one a step, or one a commit where drafts are not told."""
    told = Told(answer)
    try:
        async for commits in answer.commits():
            found, event_id, is_left = b"", None, False
            for commit in commits:
                event_id, is_left = told.take(commit), commit.event.tells_drafts
                if not is_left:
                    found += event(_encode(written()), event_id=event_id)
            if is_left:
                found += event(_encode(written()), event_id=event_id)
            if found:
                yield found
    except Exception as error:
        yield event(_encode(as_api_error(error).body()))
    yield DONE


async def _deltas(
    answer: Answer, frame: Callable[[Commit], dict[str, Any]], head: dict[str, Any], options: StreamOptions
) -> AsyncIterator[bytes]:
    """What is new with each frame, as vLLM has it."""
    told = Told(answer)

    def written(commit: Commit) -> bytes:
        event_id, found = told.take(commit), frame(commit)
        if options.continuous_usage_stats:
            found["usage"] = answer.usage(len(told))
        return event(_encode(found), event_id=event_id)

    try:
        async for commits in answer.commits():
            if found := b"".join(map(written, commits)):
                yield found
        if options.include_usage:
            yield event(_encode({**head, "choices": [], "usage": answer.usage()}))
    except Exception as error:
        yield event(_encode(as_api_error(error).body()))
    yield DONE
