"""/tokenize, /tokenizer_info, /detokenize and /apply-template: what the server makes of texts, without generating."""

from __future__ import annotations

from typing import Any

from verispec.errors import InputError
from verispec.server.api import DetokenizeRequest, TemplateRequest, TokenizeRequest
from verispec.server.chat import rendered
from verispec.server.core import Core
from verispec.server.http import Received, Reply, json_reply


async def tokenize(core: Core, received: Received) -> Reply:
    """The tokens of a text or of a conversation."""
    body = received.parsed(TokenizeRequest)
    core.check_model(body.model)
    given = [text for text in (body.prompt, body.content, body.messages) if text is not None]
    if len(given) != 1:
        raise InputError("prompt: give exactly one of prompt, content and messages")
    text = given[0]
    if isinstance(text, str):
        asked = body.add_special_tokens if body.add_special is None else body.add_special
        tokenizer = core.llm.tokenizer
        ids = await core.tokenised(lambda: tokenizer.encode(text, add_special=asked is not False), len(text))
    else:
        ids = await rendered(core, body)

    def written() -> Reply:
        found: dict[str, Any] = {"count": len(ids), "max_model_len": core.llm.max_len, "tokens": ids}
        text_of = core.llm.tokenizer.token_text
        if body.return_token_strs:
            found["token_strs"] = [text_of(token_id) for token_id in ids]
        if body.with_pieces:
            found["tokens"] = [{"id": token_id, "piece": text_of(token_id)} for token_id in ids]
        return json_reply(found)

    return await core.tokenised(written, len(ids))


async def tokenizer_info(core: Core, received: Received) -> Reply:
    """What clients that tokenise over HTTP, such as lm-eval, ask for first."""
    tokenizer = core.llm.tokenizer
    found = {"model_max_length": core.llm.max_len, "chat_template": tokenizer.chat_template}
    return json_reply({"eos_token": None, "bos_token": None, **tokenizer.special_tokens, **found})


async def detokenize(core: Core, received: Received) -> Reply:
    """The text of tokens."""
    body = received.parsed(DetokenizeRequest)
    core.check_model(body.model)
    if max(body.tokens, default=0) >= core.llm.vocab_size:
        raise InputError(f"tokens holds {max(body.tokens)}; the vocabulary has {core.llm.vocab_size}")
    text = core.llm.tokenizer.decode(body.tokens)
    return json_reply({"prompt": text, "content": text})


async def apply_template(core: Core, received: Received) -> Reply:
    """The prompt of a conversation as text. Control tokens show by name, those written inside messages too."""
    body = received.parsed(TemplateRequest)
    core.check_model(body.model)
    ids = await rendered(core, body)

    def written() -> Reply:
        special = core.llm.tokenizer.special_texts
        pieces: list[str] = []
        plain: list[int] = []
        for token_id in [*ids, None]:
            if token_id is not None and token_id not in special:
                plain.append(token_id)
                continue
            pieces.append(core.llm.tokenizer.decode(plain))
            pieces.append("" if token_id is None else special[token_id])
            plain = []
        return json_reply({"prompt": "".join(pieces), "token_ids": ids})

    return await core.tokenised(written, len(ids))
