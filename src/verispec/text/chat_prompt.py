"""Conversations to prompt tokens: the model's chat template and its tokenizer, joined.

Only the template writes control tokens. Those written inside messages stay text: they become what the tokenizer makes
of such text with control tokens switched off. Every other conversation gets exactly the ids of its rendered text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verispec.errors import InputError
from verispec.model.control_tokens import encode_parts, find_control_tokens, unused_characters
from verispec.model.tokenizer import Tokenizer
from verispec.text.chat import ChatTemplate
from verispec.text.content_mask import ContentMask, ControlTexts


class ChatPrompts:
    """A tokenizer with its chat template. One call at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template)
        self._control = ControlTexts(tokenizer.special_texts.values())
        # Such a control token may be written in other characters than its own.
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._has_normalised = any(token.special and token.normalized for token in added)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continues_last: bool = False,
    ) -> list[int]:
        """The prompt tokens of a conversation, up to where the assistant's answer begins.

        With `continues_last` they end inside the last message, behind its text, for the answer to go on from there.
        """
        mask = ContentMask(self._control)
        end_mark = ""
        if continues_last:
            messages, end_mark = _marked(messages, self._tokenizer.chat_template or "")
        text = self._template.render(
            messages,
            special_tokens=self._tokenizer.special_tokens,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt and not continues_last,
            mask=mask,
        )
        if continues_last:
            text, found, _ = text.rpartition(end_mark)
            if not found:
                raise InputError("continue_final_message: the chat template does not write the last message's text")
        if not mask.hides and not self._has_normalised:
            return self._tokenizer.encode(text, add_special=False)
        parts: list[str | int] = []
        end = 0
        for token in find_control_tokens(self._tokenizer, text):
            if mask.hides_before(text, token.end):
                continue
            parts += [mask.restore(text[end : token.start]), token.token_id]
            end = token.end
        return encode_parts(self._tokenizer, [*parts, mask.restore(text[end:])])


def _marked(messages: Sequence[Mapping[str, Any]], template: str) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The messages with a character behind the last one's text that does not come again after it."""
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, Mapping) or not isinstance(last.get("content"), str):
        return messages, "\0"  # refused by the template
    mark = next(unused_characters([template, *(str(message) for message in last.values())]))
    return [*messages[:-1], {**last, "content": last["content"] + mark}], mark
