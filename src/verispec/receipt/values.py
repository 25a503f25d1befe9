"""What a receipt is: an answer, everything it is a function of, and the hashes that tie both together.

A receipt is a value. `seals` say which section was changed since it was written; the digest chain in the output commits
to everything before the output and then, block by block, to tokens and log-probabilities. Knows nothing of engines:
`rerun` finds out whether what a receipt says is true, `reading` takes one from outside.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from verispec import __version__
from verispec.backends.calibration import Profile
from verispec.errors import InputError
from verispec.model.file_digest import FileDigest
from verispec.model.identity import ModelIdentity
from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenLogprob

FORMAT = 2
BLOCK_LEN = 32  # positions that one link of the chain stands for
SEAL_DIGITS = 16
MAX_NAME_CHARS = 255
HEAD = "head"  # what `edited_sections` calls an edit that no seal shows
_FLOATS = tuple(f.name for f in fields(SamplingParams) if isinstance(f.default, float))


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model: what it is called, and its files. A name is for people; the files decide."""

    name: str
    files: tuple[FileDigest, ...]


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """The numeric profile. `kv_dtype` and `hash` repeat what the fingerprint and the family say."""

    fingerprint: tuple[tuple[str, str], ...]
    family: tuple[int, ...]
    kv_dtype: str
    hash: str

    @classmethod
    def of(cls, profile: Profile) -> ProfileRecord:
        """The record of a profile."""
        kv_dtype = dict(profile.fingerprint).get("kv_dtype", "unknown")
        return cls(profile.fingerprint, profile.family, kv_dtype, profile.hash)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The prompt's length and the SHA-256 of its ids as int32-LE; the ids themselves unless the receipt is private."""

    num_tokens: int
    sha256: str
    token_ids: tuple[int, ...] | None

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> PromptRecord:
        """The record of a prompt, with its ids."""
        ids = tuple(map(int, token_ids))
        return cls(len(ids), hashlib.sha256(_int32(ids)).hexdigest(), ids)

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether these ids are the prompt, going by the hash."""
        other = PromptRecord.of(token_ids)
        return (other.num_tokens, other.sha256) == (self.num_tokens, self.sha256)


@dataclass(frozen=True, slots=True)
class ParametersRecord:
    """What decided how the answer was sampled and when it ended. `sampling.seed` may be None; `seed` is what held."""

    sampling: SamplingParams
    seed: int
    sample_index: int
    max_len: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """The answer. `chain` begins with the digest of everything before it, then one link per block of positions."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seals:
    """A short hash of each section, to say which one was edited. Whoever edits can seal again; a replay still tells."""

    model: str
    profile: str
    prompt: str
    parameters: str
    output: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """One answer with everything it is a function of."""

    format: int
    verispec: str
    model: ModelRecord
    profile: ProfileRecord
    prompt: PromptRecord
    parameters: ParametersRecord
    output: OutputRecord
    seals: Seals

    @property
    def is_private(self) -> bool:
        """Whether the prompt is known by its hash only."""
        return self.prompt.token_ids is None

    def private(self) -> Receipt:
        """The same receipt without the prompt's ids. Chain and seals stay as they are."""
        return replace(self, prompt=replace(self.prompt, token_ids=None))

    def to_json(self) -> str:
        """One line of JSON, in ASCII."""
        sections = _sections(self)
        if self.prompt.token_ids is not None:
            sections["prompt"]["token_ids"] = self.prompt.token_ids
        return json.dumps({"format": self.format, "verispec": self.verispec, **sections, "seals": asdict(self.seals)})

    def edited_sections(self) -> tuple[str, ...]:
        """The sections that are not what they were when the receipt was written; HEAD if it is none of them alone."""
        plain, seals = _sections(self), asdict(self.seals)
        edited = {name for name in plain if _seal(plain[name]) != seals[name]}
        if self.prompt.token_ids is not None and not self.prompt.matches(self.prompt.token_ids):
            edited.add("prompt")
        if self.profile != ProfileRecord.of(Profile(self.profile.fingerprint, self.profile.family)):
            edited.add("profile")
        if not edited and self.output.chain[0] != _head(self).hex():
            edited.add(HEAD)
        return tuple(name for name in (HEAD, *plain) if name in edited)


def make_receipt(
    *,
    model: ModelIdentity,
    profile: Profile,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_len: int,
    eos_ids: Iterable[int],
    output: SampleOutput,
) -> Receipt:
    """The receipt of a finished sample. Raises InputError for one that cannot have any."""
    check_recordable(params)
    if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise InputError(f"a receipt needs an answer that ended by itself; this one ended with {output.finish_reason}")
    unlinked = Receipt(
        format=FORMAT,
        verispec=__version__,
        model=ModelRecord(_shown(model.name), tuple(replace(f, name=_shown(f.name)) for f in model.files)),
        profile=ProfileRecord.of(profile),
        prompt=PromptRecord.of(prompt_ids),
        parameters=ParametersRecord(
            sampling=with_floats(params),
            seed=output.seed,
            sample_index=output.sample_index,
            max_len=max_len,
            eos_ids=tuple(sorted({int(token_id) for token_id in eos_ids})),
        ),
        output=OutputRecord(output.token_ids, output.finish_reason, chain=()),
        seals=Seals("", "", "", "", ""),
    )
    links = chain(_head(unlinked), prompt_len=len(prompt_ids), entries=output.logprobs)
    receipt = replace(unlinked, output=replace(unlinked.output, chain=links))
    return replace(receipt, seals=Seals(**{name: _seal(plain) for name, plain in _sections(receipt).items()}))


def check_recordable(params: SamplingParams) -> None:
    """Raise InputError if answers with these parameters cannot have a receipt."""
    if not params.deterministic:
        raise InputError("deterministic is off; only an answer that can be had again gets a receipt")
    if params.max_tokens == 0:
        raise InputError("max_tokens is 0; a receipt is of generated tokens")


def chain(head: bytes, *, prompt_len: int, entries: Sequence[TokenLogprob]) -> tuple[str, ...]:
    """The digest chain from its first value on, in hex.

    h_k is the SHA-256 of h_(k-1), then the block's output ids as int32-LE, then their log-probabilities as float32-LE.
    """
    digests = [head]
    for start, end in output_blocks(prompt_len, len(entries)):
        block = entries[start - prompt_len : end - prompt_len]
        values = struct.pack(f"<{len(block)}f", *(entry.logprob for entry in block))
        digests.append(hashlib.sha256(digests[-1] + _int32([entry.token_id for entry in block]) + values).digest())
    return tuple(digest.hex() for digest in digests)


def output_blocks(prompt_len: int, num_output: int) -> Iterator[tuple[int, int]]:
    """The absolute positions [start, end) of output tokens in each block of positions that holds any."""
    position, stop = prompt_len, prompt_len + num_output
    while position < stop:
        end = min(stop, (position // BLOCK_LEN + 1) * BLOCK_LEN)
        yield position, end
        position = end


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON has them."""
    plain = {f.name: getattr(params, f.name) for f in fields(params)}
    return {**plain, "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias}}


def with_floats(params: SamplingParams) -> SamplingParams:
    """The same values, spelt one way: a temperature of 1 is 1.0."""
    values: dict[str, Any] = {name: float(getattr(params, name)) for name in _FLOATS}
    return replace(params, **values)


def _sections(receipt: Receipt) -> dict[str, dict[str, Any]]:
    """Each section as JSON has it, the prompt without its ids: private or not, hashes are over the same."""
    return {
        "model": asdict(receipt.model),
        "profile": {**asdict(receipt.profile), "fingerprint": dict(receipt.profile.fingerprint)},
        "prompt": {"num_tokens": receipt.prompt.num_tokens, "sha256": receipt.prompt.sha256},
        "parameters": {**asdict(receipt.parameters), "sampling": plain_params(receipt.parameters.sampling)},
        "output": asdict(receipt.output),
    }


def _head(receipt: Receipt) -> bytes:
    """h_0: the digest of everything before the output."""
    before = _sections(receipt)
    del before["output"]
    return _digest({"format": receipt.format, "verispec": receipt.verispec, **before})


def _seal(plain: dict[str, Any]) -> str:
    return _digest(plain).hex()[:SEAL_DIGITS]


def _digest(plain: dict[str, Any]) -> bytes:
    """SHA-256 of canonical JSON: sorted keys, no spaces, ASCII."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).digest()


def _int32(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _shown(name: str) -> str:
    """A file's name as a receipt may hold it: one line, printable, short."""
    return "".join(c if c.isprintable() else "?" for c in name)[:MAX_NAME_CHARS]
