"""Signed receipts: what the key's owner wrote is accepted, and nothing else is, whatever was done to it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.scale import scaled
from tests.support.served import Served, serving
from tests.support.tiny_llm import loaded
from verispec.cli.main import run
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.receipt import Receipt, parse, replay
from verispec.receipt.signing import PublicKey, SigningKey, write_new_key
from verispec.receipt.values import SignatureRecord, content_digest
from verispec.types import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signing")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with loaded(write_chat_model(folder / "tiny.gguf"), folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def key(folder: Path) -> SigningKey:
    return write_new_key(folder / "key")


@pytest.fixture(scope="module")
def other(folder: Path) -> SigningKey:
    return write_new_key(folder / "other")


def answered(llm: LLM, seed: int) -> Receipt:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=seed, ignore_eos=True)
    return llm.generate("abc", params, receipts=True)[0].receipts[0]


@pytest.fixture(scope="module")
def signed(llm: LLM, key: SigningKey) -> Receipt:
    return key.sign(answered(llm, 1))


def is_accepted(key: SigningKey, data: bytes) -> bool:
    try:
        key.public.check(parse(data))
    except InputError:
        return False
    return True


def test_what_was_signed_is_accepted_and_still_a_receipt(llm: LLM, key: SigningKey, signed: Receipt) -> None:
    for each in (signed, signed.private()):
        assert is_accepted(key, each.to_json().encode())
    assert is_accepted(key, json.dumps(json.loads(signed.to_json()), indent=3, sort_keys=True).encode())
    assert parse(signed.to_json()) == signed
    assert replay(llm, parse(signed.to_json())).reproduced
    assert content_digest(signed) == signed.digest == answered(llm, 1).digest


def test_one_flipped_bit_anywhere_is_refused(key: SigningKey, signed: Receipt) -> None:
    data = signed.to_json().encode()
    assert is_accepted(key, data)  # control
    places = [(i, bit) for i in range(len(data)) for bit in range(8)]
    for i, bit in random.Random(1).sample(places, min(len(places), scaled(2000))):
        changed = data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :]
        assert not is_accepted(key, changed), (i, bit, data[i - 20 : i + 20])


def test_every_field_is_covered_even_where_the_digest_is_made_anew(key: SigningKey, signed: Receipt) -> None:
    def others(value: Any) -> Iterator[Any]:
        """The value with one leaf changed, for every leaf."""
        if isinstance(value, dict):
            for name, each in value.items():
                yield from ({**value, name: changed} for changed in others(each))
        elif isinstance(value, list):
            for i, each in enumerate(value):
                yield from ([*value[:i], changed, *value[i + 1 :]] for changed in others(each))
            yield value[:-1]
        elif isinstance(value, bool):
            yield not value
        elif isinstance(value, str):
            yield value[:-1] + ("0" if value[-1:] != "0" else "1")
        else:
            yield 1 if value is None else value + 1

    num_tried = 0
    for changed in others(json.loads(signed.to_json())):
        try:
            found = parse(json.dumps(changed))
        except InputError:
            continue
        for receipt in (found, replace(found, digest=content_digest(found))):
            if receipt != signed:
                num_tried += 1
                with pytest.raises(InputError):
                    key.public.check(receipt)
    assert num_tried > 50


def test_each_refusal_has_its_own_sentence(llm: LLM, key: SigningKey, other: SigningKey, signed: Receipt) -> None:
    moved = replace(answered(llm, 2), signature=signed.signature)
    forged = other.sign(signed)
    assert forged.signature is not None
    renamed = replace(signed, signature=SignatureRecord(key.public.hex, forged.signature.value))
    prompt_ids = signed.prompt.token_ids or ()
    swapped = replace(signed, prompt=replace(signed.prompt, token_ids=(*prompt_ids[1:], prompt_ids[0])))
    for receipt, said in (
        (answered(llm, 1), "not signed"), (forged, "another key"), (moved, "changed since it was signed"),
        (renamed, "signature does not fit"), (replace(signed, verispec="9"), "signature does not fit"),
        (replace(signed, digest="0" * 64), "its digest or its prompt"), (swapped, "its digest or its prompt"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            key.public.check(receipt)
    other.public.check(forged)  # control: it is a good signature, of another key


def test_key_files(folder: Path, tmp_path: Path, key: SigningKey, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine"
    assert run(["keys", "new", str(path)]) == 0
    said = capsys.readouterr().out.strip()
    assert (path.stat().st_mode & 0o777, (tmp_path / "mine.pub").stat().st_mode & 0o111) == (0o600, 0)
    assert said == PublicKey.read(f"{path}.pub").hex == SigningKey.read(path).public.hex
    assert said != key.public.hex
    before = path.read_bytes()
    for existing in (f"{path}.pub", str(path)):
        assert run(["keys", "new", str(path)]) == 2
        assert capsys.readouterr().err == f"verispec: {existing}: File exists\n"
        (tmp_path / "mine.pub").unlink(missing_ok=True)
    assert path.read_bytes() == before
    for load, bad in (
        (SigningKey.read, f"{path}.txt"),
        (PublicKey.read, str(path)),
        (SigningKey.read, folder / "key.pub"),
    ):
        (tmp_path / "mine.txt").write_text("-----BEGIN NOTHING-----")
        with pytest.raises(InputError, match="key in PEM form"):
            load(bad)  # type: ignore[operator]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_agrees_on_what_is_signed(folder: Path, tmp_path: Path, signed: Receipt) -> None:
    """The bytes are those that the documentation names."""
    assert signed.signature is not None
    (tmp_path / "bytes").write_bytes(b"verispec receipt " + signed.digest.encode())
    (tmp_path / "signature").write_bytes(bytes.fromhex(signed.signature.value))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(folder / "key.pub")]
    command += ["-in", str(tmp_path / "bytes"), "-sigfile", str(tmp_path / "signature")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    (tmp_path / "bytes").write_bytes(b"verispec receipt " + b"0" * 64)  # control
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_replay_accepts_what_this_key_signed_and_refuses_the_rest_before_it_loads_anything(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    tmp_path: Path,
    llm: LLM,
    signed: Receipt,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    file = tmp_path / "receipt.json"
    file.write_text(signed.to_json())
    model, trusted = str(folder / "tiny.gguf"), str(folder / "key.pub")
    assert run(["replay", str(file), "-m", model, "--signed-by", trusted]) == 0
    assert capsys.readouterr().out.startswith("reproduced")
    for receipt, key_file, said in (
        (answered(llm, 1), trusted, "it is not signed"), (signed, str(folder / "other.pub"), "signed with another key"),
        (replace(signed, verispec="9"), trusted, "it was changed since"), (signed, str(file), "is not a public key"),
    ):  # fmt: skip
        file.write_text(receipt.to_json())
        assert run(["replay", str(file), "-m", "/nowhere", "--signed-by", key_file]) == 2
        assert said in capsys.readouterr().err


def test_a_server_signs_and_says_with_which_key(llm: LLM, key: SigningKey, other: SigningKey) -> None:
    def receipt_of(served: Served) -> dict[str, Any]:
        receipt_id = served.chat(verispec={"receipt": True})["verispec"]["receipt"]
        return served.client.get(f"/verispec/receipts/{receipt_id}").json()

    with serving(llm, signing_key=key) as served:
        (told,) = served.client.get("/verispec/keys").json()["keys"]
        receipt = receipt_of(served)
        key.public.check(parse(json.dumps(receipt)))
        assert told["public_key"] == receipt["signature"]["public_key"] == key.public.hex
        assert told["pem"] == key.public.pem
        foreign = json.loads(other.sign(parse(json.dumps(receipt))).to_json())
        for body, expected in ((receipt, True), (foreign, False)):
            found = served.post("/verispec/replay", {"receipt": body}).json()
            assert (found["reproduced"], found["is_signed_here"]) == (True, expected)
    with serving(llm) as served:
        assert served.client.get("/verispec/keys").json() == {"keys": []}
        assert "signature" not in receipt_of(served)
