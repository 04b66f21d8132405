"""The session's token: who may speak, and what outsiders can read.

    token + session  --HKDF-->  a key that seals values, and a key pair that opens the session on its store

Every value is encrypted and authenticated (ChaCha20-Poly1305) together with its key, its sender, its writer and a counter,
so that neither the network nor the store can read, forge, or move it to another key. The store knows a public key alone.

A writer is one client; a process that takes a seat again is another one. Each reader remembers the counters that it has
seen of a key. It refuses a value that an older counter, or one that another writer has replaced, shows to be a replay:

    key "head"   train:0 wrote 5, then 8        read 8, then 5: refused
"""

from __future__ import annotations

import os
import struct
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from mcore_reshard.kernels.errors import SessionError

TOKEN_VARIABLE = "MCORE_RESHARD_TOKEN"
TOKEN_FILE_VARIABLE = "MCORE_RESHARD_TOKEN_FILE"
MIN_TOKEN = 16  # characters
_NONCE_BYTES = 12
_SENDER = struct.Struct(">HQQ")  # bytes of the sender's name, its writer, the writer's counter
_REMEMBERED = 1 << 12  # keys whose counters a reader remembers; the keys that it read longest ago are forgotten first
_warned = False


class ForgedError(SessionError):
    """No holder of the token wrote the value there."""


class WrongWriterError(SessionError):
    """A holder of the token wrote the value, but not the one that had to."""


class ReplayError(SessionError):
    """The value is older than one that this process has read."""


@dataclass(frozen=True, slots=True)
class Token:
    """The secret that all ranks of a session share."""

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, str) or len(self.secret) < MIN_TOKEN:
            raise SessionError(
                f"a token has at least {MIN_TOKEN} characters: make one with"
                " `python -c 'import secrets; print(secrets.token_hex())'`"
            )


def find_token(token: str | None = None, token_file: str | os.PathLike[str] | None = None) -> Token | None:
    """The token that was given: as an argument, as a file, or in the environment. None if there is none.

    Raises SessionError where a file cannot be read, and where different tokens were given.
    """
    found: dict[str, str] = {}
    if token is not None:
        found["token="] = token
    if variable := os.environ.get(TOKEN_VARIABLE):
        found[TOKEN_VARIABLE] = variable
    files = {"token_file=": token_file, TOKEN_FILE_VARIABLE: os.environ.get(TOKEN_FILE_VARIABLE)}
    for name, path in files.items():
        if path:
            try:
                found[f"{name} {path}".replace("= ", "=")] = Path(path).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SessionError(f"the token's file {path} cannot be read: {error}") from error
    if len(set(found.values())) > 1:
        raise SessionError(f"{' and '.join(found)} give different tokens: give one")
    return Token(next(iter(found.values()))) if found else None


class Sealer:
    """Seals and opens values of one session; without a token it passes them through."""

    @staticmethod
    def of(token: Token | None, session: str) -> Sealer:
        if token is None:
            _warn_once()
            return Sealer()
        return _TokenSealer(token, session)

    def seal(self, key: str, sender: str, value: bytes) -> bytes:
        return value

    def open(self, key: str, value: bytes, sender: str | None) -> bytes:
        """The value, and proof that `sender` (None: any holder of the token) wrote it there. Raises SessionError.

        Raises ReplayError for an older value than the newest that was opened. Where several threads read a key, that may
        be because this one asked first: ask again.
        """
        return value

    def proof(self, nonce: str) -> dict[str, str]:
        """What shows the store that this process holds the token."""
        return {}


class _TokenSealer(Sealer):
    def __init__(self, token: Token, session: str) -> None:
        aead, keys, serialization = load_cryptography()
        material = _derive(token.secret, session)
        self._session = session
        self._aead: Any = aead(material[:32])
        self._private: Any = keys.Ed25519PrivateKey.from_private_bytes(material[32:])
        self._owner: str = (
            self._private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
        )
        self._writer = int.from_bytes(os.urandom(8), "big")
        self._counter = count(1)
        self._seen = _Seen()

    def seal(self, key: str, sender: str, value: bytes) -> bytes:
        name = sender.encode()
        head = _SENDER.pack(len(name), self._writer, next(self._counter)) + name
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._aead.encrypt(nonce, value, self._bound_to(key, head))
        return head + nonce + sealed

    def open(self, key: str, value: bytes, sender: str | None) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            length, writer, number = _SENDER.unpack_from(value)
            end = _SENDER.size + length
            head, nonce, sealed = value[:end], value[end : end + _NONCE_BYTES], value[end + _NONCE_BYTES :]
            claimed = head[_SENDER.size :].decode()
            opened: bytes = self._aead.decrypt(nonce, sealed, self._bound_to(key, head))
        except (struct.error, ValueError, InvalidTag) as error:
            raise ForgedError(
                f"the value of {key!r} on the store does not come from a holder of this session's token, or was moved"
                " there from another key: somebody else writes to this store, or a rank has another token"
            ) from error
        if sender is not None and claimed != sender:
            raise WrongWriterError(
                f"the value of {key!r} on the store was written by {claimed or 'no rank'}, not by {sender}"
            )
        if not self._seen.is_news(key, writer, number):
            raise ReplayError(
                f"the value of {key!r} on the store is an older one of {claimed or 'no rank'}: somebody else writes to"
                " this store, and shows again what was said before"
            )
        return opened

    def proof(self, nonce: str) -> dict[str, str]:
        signature: bytes = self._private.sign(_challenge(nonce, self._session))
        return {"owner": self._owner, "proof": signature.hex()}

    def _bound_to(self, key: str, head: bytes) -> bytes:
        session, name = self._session.encode(), key.encode()
        return struct.pack(">II", len(session), len(name)) + session + name + head


class _Seen:
    """Of each key the counters that were read. Any thread may use it."""

    def __init__(self) -> None:
        self._of_key: OrderedDict[str, tuple[int, dict[int, int]]] = OrderedDict()  # last writer, counters by writer
        self._lock = Lock()

    def is_news(self, key: str, writer: int, number: int) -> bool:
        """Whether value `number` of a writer may stand at a key now; it is noted. The newest value stays news."""
        with self._lock:
            last, counters = self._of_key.pop(key, (writer, {}))
            newest = counters.get(writer, 0)
            is_news = number > newest or (number == newest and last == writer)
            if is_news:
                last, counters[writer] = writer, number
            self._of_key[key] = last, counters
            if len(self._of_key) > _REMEMBERED:
                self._of_key.popitem(last=False)
            return is_news


def signature_holds(owner: str, proof: str, nonce: str, session: str) -> bool:
    """Whether the holder of the private key of `owner` has signed `nonce`."""
    from cryptography.exceptions import InvalidSignature

    _, keys, _ = load_cryptography()
    try:
        key = keys.Ed25519PublicKey.from_public_bytes(bytes.fromhex(owner))
        key.verify(bytes.fromhex(proof), _challenge(nonce, session))
    except (ValueError, InvalidSignature):
        return False
    return True


def _challenge(nonce: str, session: str) -> bytes:
    return f"mcore-reshard store\n{nonce}\n{session}".encode()


def _derive(secret: str, session: str) -> bytes:
    """64 bytes: 32 for the seal, 32 for the key pair (HKDF, RFC 5869, over SHA-256)."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), 64, salt=session.encode(), info=b"mcore-reshard session 1").derive(secret.encode())


def load_cryptography() -> tuple[Any, Any, Any]:
    """What a token needs of the package; called before a fork, its import is paid once for all ranks."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError as error:
        raise SessionError("a session with a token needs the package cryptography: pip install cryptography") from error
    return ChaCha20Poly1305, ed25519, serialization


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "this session has no token: whoever reaches its store's port can join it, and take the weights."
            f" Give all ranks one, as Options(token_file=...) or in {TOKEN_VARIABLE}",
            stacklevel=4,
        )
