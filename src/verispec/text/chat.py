"""Chat messages to prompt text, through the model's own Jinja template. `chat_prompt` makes tokens of it.

Knows what a message is and what templates expect to find (the names that `transformers` gives them), and caps what goes
in and what comes out; `chat_sandbox` bounds the work in between. Templates see no clock, so that a prompt depends on
nothing but its arguments: there is no `strftime_now`, and templates that ask whether it is defined, as Llama's do, use
the date written in them. Knows nothing of tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError

from verispec.errors import InputError, ModelFileError
from verispec.text.chat_sandbox import BoundedEnvironment, Budget
from verispec.text.content_mask import ContentMask

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_TEMPLATE_CHARS = 128 * 1024
MAX_PROMPT_CHARS = 16 * 1024 * 1024  # also the cap on everything that goes in
# What a rendering may make beside its output, and for how long it may work: ordinary ones take about a millisecond.
BASE_CHARS = 2 * MAX_PROMPT_CHARS
CHARS_PER_INPUT_CHAR = 16
MAX_SECONDS = 1.0
_MAX_BRIEF_CHARS = 200
_VARIABLES = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """A compiled template. Rendering is deterministic and bounded; one rendering at a time."""

    def __init__(self, template: str | None) -> None:
        if not template:
            raise InputError("the model has no chat template; give a plain prompt instead (--raw on the command line)")
        if len(template) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(f"the chat template has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARS}")
        functions = {"raise_exception": _raise_exception}
        self._environment = BoundedEnvironment(Budget(BASE_CHARS, MAX_SECONDS), functions)
        try:
            code = self._environment.compile_bounded(template)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"the chat template, line {error.lineno}: {_one_line(error.message or '')}") from error
        except Exception as error:  # a template is a program we did not write: too deeply nested, for one
            raise ModelFileError(f"the chat template cannot be compiled: {_brief(error)}") from error
        self._template = Template.from_code(self._environment, code, self._environment.globals)
        self._source = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        mask: ContentMask | None = None,
    ) -> str:
        """The prompt for `messages`; raises `InputError` where they are malformed or the template refuses them.

        `variables` are further names that the template may look at (`enable_thinking`, say), never those it has anyway.
        With a `mask` the text still wears it: control tokens in it are the template's own.
        """
        conversation = _checked(messages)
        declared = None if tools is None else [dict(tool) for tool in tools]
        further = self._further(variables or {}, special_tokens)
        num_chars = _input_chars(conversation, declared, further)
        if mask is not None:
            conversation, declared, further = mask.apply(conversation, declared, further, template=self._source)
        self._environment.budget = Budget(BASE_CHARS + CHARS_PER_INPUT_CHAR * num_chars, MAX_SECONDS)
        known = {
            **further,
            **special_tokens,
            "messages": conversation,
            "tools": declared,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._collect(known)
        except TemplateError as error:
            raise InputError(f"the chat template refused the messages: {_brief(error)}") from error
        except InputError:
            raise
        except Exception as error:  # a template is a program we did not write and may fail in any way
            raise InputError(f"the chat template failed on the messages: {_brief(error)}") from error

    def _further(self, variables: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
        own = {*_VARIABLES, *special_tokens, *self._environment.globals}
        for name in variables:
            if name in own or not name.isidentifier():
                raise InputError(f"chat_template_kwargs cannot set {_one_line(name)!r}")
        return dict(variables)

    def _collect(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_PROMPT_CHARS:
                raise InputError(f"the chat template writes more than {MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{index}] must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"messages[{index}].{key} must be a string")
        if message["role"] not in ROLES:
            known = ", ".join(ROLES)
            raise InputError(f"messages[{index}].role {_one_line(message['role'])!r} is unknown; known roles: {known}")
    return [dict(message) for message in messages]


def _input_chars(
    conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> int:
    """How much the input holds; refuses what is too large or not plain data."""
    if sum(len(message["content"]) for message in conversation) > MAX_PROMPT_CHARS:
        raise InputError(f"messages hold more than {MAX_PROMPT_CHARS} characters")
    budget = Budget(BASE_CHARS, MAX_SECONDS)
    for name, values in (("messages", conversation), ("tools", tools or []), ("chat_template_kwargs", [variables])):
        for index, value in enumerate(values):
            try:
                budget.weigh(value)
            except TemplateError as error:
                raise InputError(f"{name}[{index}]: {_brief(error)}") from error
    return BASE_CHARS - budget.chars_left


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _brief(error: Exception) -> str:
    return _one_line(str(error) or type(error).__name__)


def _one_line(text: str) -> str:
    """What an error says, printable and short: templates may put anything into it."""
    shown = "".join(c if c.isprintable() else " " for c in text[:_MAX_BRIEF_CHARS])
    return shown if len(text) <= _MAX_BRIEF_CHARS else shown + "..."
