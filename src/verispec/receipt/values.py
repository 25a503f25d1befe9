"""What a receipt is: an answer, everything it is a function of, and one digest over all of it.

A receipt is a value and says each thing once, or together with what it follows from, so that an edit contradicts
something. Knows nothing of engines: `rerun` finds out whether what a receipt says is true, `reading` takes one from
outside.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from verispec import __version__
from verispec.backends.calibration import Profile
from verispec.errors import InputError
from verispec.model.file_digest import FileDigest, ModelIdentity
from verispec.types import CONSTRAINTS, FinishReason, SampleOutput, SamplingParams, TokenLogprob

FORMAT = 3
BLOCK_LEN = 32  # output tokens whose log-probabilities share a digest
MAX_NAME_CHARS = 255
_FLOATS = tuple(f.name for f in fields(SamplingParams) if isinstance(f.default, float))


class FieldDifference(NamedTuple):
    """A field whose recorded value is not what follows from other fields, or from the model. None: there is none."""

    name: str
    recorded: str | None
    found: str | None


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model: what it is called, and its files. A name is for people; the files decide."""

    name: str
    files: tuple[FileDigest, ...]


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """The numeric profile, and its hash, which follows from it."""

    fingerprint: tuple[tuple[str, str], ...]
    family: tuple[int, ...]
    weights_version: int
    hash: str

    @classmethod
    def of(cls, profile: Profile) -> ProfileRecord:
        return cls(profile.fingerprint, profile.family, profile.weights_version, profile.hash)

    @property
    def profile(self) -> Profile:
        """What it is the record of."""
        return Profile(self.fingerprint, self.family, self.weights_version)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The SHA-256 of the prompt's ids as int32-LE, and the ids themselves unless the receipt is private."""

    sha256: str
    token_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> PromptRecord:
        ids = tuple(map(int, token_ids))
        return cls(hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest(), ids)

    def matches(self, token_ids: Iterable[int]) -> bool:
        return PromptRecord.of(token_ids).sha256 == self.sha256


@dataclass(frozen=True, slots=True)
class ParametersRecord:
    """What decided how the answer was sampled and when it ended. `sampling.seed` is the seed that was used."""

    sampling: SamplingParams
    sample_index: int
    max_len: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConstraintRecord:
    """What the answer had to look like: the hash of what the parameters say, and the library that followed it."""

    sha256: str
    library: str


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """The answer, and a digest of the log-probabilities of each BLOCK_LEN tokens that were drawn. The first `num_given`
    tokens came with the request.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprob_digests: tuple[str, ...]
    num_given: int = 0

    @property
    def given_ids(self) -> tuple[int, ...]:
        return self.token_ids[: self.num_given]

    @property
    def drawn_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.num_given :]


@dataclass(frozen=True, slots=True)
class SignatureRecord:
    """Who says so, and the proof, in hex. `signing` makes and checks it."""

    public_key: str
    value: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """One answer with everything it is a function of. `digest` and `signature` are about the rest."""

    verispec: str
    model: ModelRecord
    profile: ProfileRecord
    prompt: PromptRecord
    parameters: ParametersRecord
    output: OutputRecord
    digest: str
    signature: SignatureRecord | None = None
    constraint: ConstraintRecord | None = None

    @property
    def is_private(self) -> bool:
        """Whether the prompt is known by its hash only."""
        return self.prompt.token_ids is None

    @property
    def is_edited(self) -> bool:
        """Whether it is not what was written. Whoever edits can make the digest anew; a replay still tells."""
        return self.digest != content_digest(self)

    def private(self) -> Receipt:
        """The same receipt without the prompt's ids. Its digest stays as it is."""
        return replace(self, prompt=PromptRecord(self.prompt.sha256))

    def to_json(self) -> str:
        return json.dumps(_plain(self))

    def contradictions(self) -> tuple[FieldDifference, ...]:
        """The fields that cannot be true together with the others."""
        found = []
        ids, profile = self.prompt.token_ids, self.profile.profile
        if ids is not None and not self.prompt.matches(ids):
            found.append(FieldDifference("prompt.sha256", self.prompt.sha256, PromptRecord.of(ids).sha256))
        if profile.hash != self.profile.hash:
            found.append(FieldDifference("profile.hash", self.profile.hash, profile.hash))
        if self.parameters.sample_index >= (n := self.parameters.sampling.n):
            found.append(FieldDifference("parameters.sample_index", str(self.parameters.sample_index), f"below {n=}"))
        wanted = self.parameters.sampling.constraint
        recorded = None if self.constraint is None else self.constraint.sha256
        if recorded != (hashed := None if wanted is None else wanted.sha256):
            found.append(FieldDifference("constraint.sha256", recorded, hashed))
        num_digests, num_blocks = len(self.output.logprob_digests), -(-len(self.output.drawn_ids) // BLOCK_LEN)
        if num_digests != num_blocks:
            found.append(FieldDifference("output.logprob_digests", f"{num_digests} digests", f"{num_blocks}"))
        return tuple(found)


def make_receipt(
    *,
    model: ModelIdentity,
    profile: Profile,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_len: int,
    eos_ids: Iterable[int],
    output: SampleOutput,
    library: str = "",
) -> Receipt:
    """The receipt of a finished sample. Raises InputError for one that cannot have any.

    `library` is what followed the constraint, where there is one.
    """
    check_recordable(params)
    if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise InputError(f"a receipt needs an answer that ended by itself; this one ended with {output.finish_reason}")
    if (
        output.sample_index >= params.n
        or params.seed not in (None, output.seed)
        or output.prompt_len != len(prompt_ids)
    ):
        raise InputError("the output is not of this prompt with these parameters")
    receipt = Receipt(
        verispec=__version__,
        model=ModelRecord(_shown(model.name), tuple(replace(f, name=_shown(f.name)) for f in model.files)),
        profile=ProfileRecord.of(profile),
        prompt=PromptRecord.of(prompt_ids),
        parameters=ParametersRecord(
            sampling=with_floats(replace(params, seed=output.seed)),
            sample_index=output.sample_index,
            max_len=max_len,
            eos_ids=in_order(eos_ids),
        ),
        output=OutputRecord(
            output.given_ids + output.token_ids,
            output.finish_reason,
            logprob_digests(output.logprobs),
            len(output.given_ids),
        ),
        digest="",
        constraint=None if params.constraint is None else ConstraintRecord(params.constraint.sha256, library),
    )
    return replace(receipt, digest=content_digest(receipt))


def check_recordable(params: SamplingParams) -> None:
    """Raise InputError if answers with these parameters cannot have a receipt."""
    if not params.deterministic:
        raise InputError("deterministic is off; only an answer that can be had again gets a receipt")
    if params.max_tokens == 0:
        raise InputError("max_tokens is 0; a receipt is of generated tokens")


def content_digest(receipt: Receipt) -> str:
    """SHA-256 of canonical JSON (sorted keys, no spaces, ASCII) of all but digest, signature and the prompt's ids."""
    plain = _plain(replace(receipt.private(), signature=None))
    del plain["digest"]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def logprob_digests(entries: Sequence[TokenLogprob]) -> tuple[str, ...]:
    """SHA-256 of the log-probabilities as float32-LE, block by block."""
    values = [struct.pack("<f", entry.logprob) for entry in entries]
    starts = range(0, len(values), BLOCK_LEN)
    return tuple(hashlib.sha256(b"".join(values[i : i + BLOCK_LEN])).hexdigest() for i in starts)


def in_order(eos_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({int(token_id) for token_id in eos_ids}))


def with_floats(params: SamplingParams) -> SamplingParams:
    """The same values, spelt one way: a temperature of 1 is 1.0."""
    values: dict[str, Any] = {name: float(getattr(params, name)) for name in _FLOATS}
    return replace(params, **values)


def _plain(receipt: Receipt) -> dict[str, Any]:
    plain = {"format": FORMAT, **asdict(receipt)}
    plain["profile"]["fingerprint"] = dict(receipt.profile.fingerprint)
    sampling = plain["parameters"]["sampling"]
    sampling["logit_bias"] = {str(token_id): bias for token_id, bias in receipt.parameters.sampling.logit_bias}
    for name in CONSTRAINTS:
        if sampling[name] is None:
            del sampling[name]
    if receipt.is_private:
        del plain["prompt"]["token_ids"]
    for name in ("signature", "constraint"):
        if plain[name] is None:
            del plain[name]
    if not receipt.output.num_given:
        del plain["output"]["num_given"]
    return plain


def _shown(name: str) -> str:
    """A file's name as a receipt may hold it: one line, printable, short."""
    return "".join(c if c.isprintable() else "?" for c in name)[:MAX_NAME_CHARS]
