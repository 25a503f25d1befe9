"""What callers may give as prompts and parameters, made into one form; what is something else is refused by its name.

A prompt is text, token ids, or a dict in the form of a line of `generate --prompts`: one of `prompt`, `token_ids` and
`messages`, beside sampling parameters that hold for it alone and `prediction`, the text or ids expected as its answer:
one, a list of alternatives, or a `Draft`.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from verispec.arguments import kind_of
from verispec.errors import InputError
from verispec.strict_json import numbered
from verispec.types import Draft, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Mapping[str, Any]
Prediction = Sequence[str | list[int]] | Draft
CONTENT_KEYS = ("prompt", "token_ids", "messages")
PARAMETERS = tuple(f.name for f in fields(SamplingParams))
_KINDS = "text, token ids or a dict such as {'prompt': '...'}"


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt, checked: its text or ids, or the messages of a conversation; its parameters; and what is expected of
    the answer, alternatives or a tree of them."""

    content: str | list[int] | None
    params: SamplingParams
    messages: Any = None  # checked by the chat template
    prediction: Prediction = ()


def pair(prompts: Any, params: Any) -> list[PromptSpec]:
    """One prompt or many, with one set of parameters for all or one for each."""
    listed = _listed(prompts)
    if params is None or isinstance(params, SamplingParams | Mapping):
        each = [checked_params(params)] * len(listed)
    elif isinstance(params, Sequence) and not isinstance(params, str | bytes):
        each = [checked_params(p) for p in params]
    else:
        raise InputError(
            f"params must be SamplingParams, a dict of its fields or a list of these, not {kind_of(params)}"
        )
    if len(each) != len(listed):
        raise InputError(f"{len(listed)} prompts but {len(each)} sets of sampling parameters")
    if len(listed) == 1:
        return [spec(listed[0], each[0])]
    return [spec(prompt, p, name=f"prompts[{i}]") for i, (prompt, p) in enumerate(zip(listed, each, strict=True))]


def spec(prompt: Any, params: Any = None, *, name: str = "prompt") -> PromptSpec:
    """One prompt with its parameters."""
    checked = checked_params(params)
    if isinstance(prompt, str):
        return PromptSpec(_text(prompt, name), checked)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, checked, name)
    return PromptSpec(_token_ids(prompt, name, _KINDS), checked)


def checked_params(params: Any) -> SamplingParams:
    """SamplingParams, from themselves, from a mapping of their fields, or the defaults."""
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        return SamplingParams.from_mapping(params)
    if not isinstance(params, SamplingParams):
        raise InputError(f"params must be SamplingParams or a dict of its fields, not {kind_of(params)}")
    return params


def _listed(prompts: Any) -> list[Any]:
    """One prompt or many, as many. A flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview | AbstractSet) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be {_KINDS}, or a list of these, not {kind_of(prompts)}")
    listed = list(prompts)
    return [listed] if listed and all(isinstance(p, Integral) for p in listed) else listed


def _from_mapping(prompt: Mapping[str, Any], params: SamplingParams, name: str) -> PromptSpec:
    given = [key for key in CONTENT_KEYS if key in prompt]
    if len(given) != 1:
        raise InputError(f"{name} needs exactly one of {', '.join(CONTENT_KEYS)}; it has {', '.join(given) or 'none'}")
    options = {key: value for key, value in prompt.items() if key not in given}
    predicted = _prediction(options.pop("prediction", ()), f"{name}['prediction']")
    if unknown := sorted(map(repr, options.keys() - set(PARAMETERS))):
        raise InputError(f"{name} has the unknown key {unknown[0]}; known: {', '.join(sorted(PARAMETERS))}")
    bias = options.get("logit_bias")
    if isinstance(bias, Mapping) and any(isinstance(key, str) for key in bias):  # as JSON has it
        options["logit_bias"] = numbered(bias, name="logit_bias")
    (key,) = given
    merged, value, where = replace(params, **options), prompt[key], f"{name}[{key!r}]"
    if key == "messages":
        return PromptSpec(None, merged, messages=value, prediction=predicted)
    if key == "token_ids":
        return PromptSpec(_token_ids(value, where, "a list of token ids"), merged, prediction=predicted)
    if not isinstance(value, str):
        raise InputError(f"{where} must be text, not {kind_of(value)}")
    return PromptSpec(_text(value, name), merged, prediction=predicted)


def _prediction(value: Any, name: str) -> Prediction:
    """What does not begin with a token id is a list of alternatives."""
    if isinstance(value, Draft):
        return value
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], Integral)):
        return tuple(_expected(each, f"{name}[{i}]", "text or token ids") for i, each in enumerate(value))
    return (_expected(value, name, "text or token ids, a list of these, or a Draft"),)


def _expected(value: Any, name: str, kinds: str) -> str | list[int]:
    return _text(value, name) if isinstance(value, str) else _token_ids(value, name, kinds)


def _text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} holds half of a surrogate pair at character {error.start}: it is not text") from error
    return str(text)


def _token_ids(value: Any, name: str, expected: str) -> list[int]:
    if isinstance(value, bytes | bytearray | memoryview | AbstractSet | str) or not isinstance(value, Iterable):
        raise InputError(f"{name} must be {expected}, not {kind_of(value)}")
    ids = list(value)
    for i, token_id in enumerate(ids):
        if type(token_id) is not int and (isinstance(token_id, bool) or not isinstance(token_id, Integral)):
            raise InputError(f"{name}[{i}] must be a token id, a whole number, not {kind_of(token_id)}")
    return [int(token_id) for token_id in ids]
