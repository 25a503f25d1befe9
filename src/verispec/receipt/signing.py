"""Who says so: receipts signed with Ed25519 keys. A replay shows that an answer is true, a signature whose it is.

What is signed are the ASCII bytes of `verispec receipt DIGEST`, where DIGEST is the receipt's content digest in 64 hex
digits, computed anew from the content. That covers everything but the prompt's ids, which must have the recorded hash;
so a private receipt keeps its signature. Keys are PEM files, as openssl reads and writes them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from verispec.errors import InputError
from verispec.receipt.values import Receipt, SignatureRecord, content_digest

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ModuleNotFoundError as error:
    raise InputError("signatures need the package cryptography: pip install 'verispec[server]'") from error

_MAX_KEY_NBYTES = 2**16


class PublicKey:
    """Who may have signed; `name` is what messages call it."""

    def __init__(self, key: Ed25519PublicKey, name: str) -> None:
        self._key = key
        self.name = name

    @classmethod
    def read(cls, path: str | Path) -> PublicKey:
        load = serialization.load_pem_public_key
        return cls(_loaded(Path(path), load, Ed25519PublicKey, "public"), str(path))

    @property
    def hex(self) -> str:
        """Its 32 bytes, which are also its name in receipts."""
        return self._key.public_bytes_raw().hex()

    @property
    def pem(self) -> str:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self._key.public_bytes(serialization.Encoding.PEM, form).decode("ascii")

    def check(self, receipt: Receipt) -> None:
        """Raise InputError unless this key signed exactly this receipt."""
        signature = receipt.signature
        if signature is None:
            raise InputError(f"it is not signed; {self.name} was to have signed it")
        if signature.public_key != self.hex:
            raise InputError(f"it is signed with another key, {signature.public_key}, not with {self.name}")
        ids = receipt.prompt.token_ids
        try:
            self._key.verify(bytes.fromhex(signature.value), _signed_bytes(receipt))
        except InvalidSignature:
            raise InputError("it was changed since it was signed: the signature does not fit its content") from None
        if receipt.is_edited or not (ids is None or receipt.prompt.matches(ids)):
            raise InputError("it was changed since it was signed: its digest or its prompt does not fit its content")


class SigningKey:
    """A private key. It never leaves this object."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key(), "this key")

    @classmethod
    def read(cls, path: str | Path) -> SigningKey:
        def load(data: bytes) -> Any:
            return serialization.load_pem_private_key(data, password=None)

        return cls(_loaded(Path(path), load, Ed25519PrivateKey, "private"))

    def sign(self, receipt: Receipt) -> Receipt:
        """The receipt with this key's signature instead of any other."""
        value = self._key.sign(_signed_bytes(receipt)).hex()
        return replace(receipt, signature=SignatureRecord(self.public.hex, value))


def write_new_key(path: Path) -> SigningKey:
    """Draw a key: `path`, which only its owner reads, and the public one beside it, in `path`.pub. Replaces no file."""
    key = Ed25519PrivateKey.generate()
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    found = SigningKey(key)
    public_path = path.with_name(path.name + ".pub")
    if public_path.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(public_path))
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, secret), mode=0o600)
    _write(public_path, found.public.pem.encode("ascii"), mode=0o644)
    return found


def _signed_bytes(receipt: Receipt) -> bytes:
    return f"verispec receipt {content_digest(receipt)}".encode("ascii")


def _loaded(path: Path, load: Callable[[bytes], Any], kind: Any, what: str) -> Any:
    with path.open("rb") as file:
        data = file.read(_MAX_KEY_NBYTES)
    try:
        key = load(data)
    except (ValueError, TypeError) as error:  # no PEM, damaged, or encrypted
        raise InputError(f"{path} is not a {what} key in PEM form without a password") from error
    if not isinstance(key, kind):
        raise InputError(f"{path} is a {what} key, but not of Ed25519")
    return key


def _write(path: Path, data: bytes, *, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
