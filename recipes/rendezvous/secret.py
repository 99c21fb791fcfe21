"""The secret of a job: what its nodes know and nobody else does.

It comes from the environment or a file, never from a setting: those are seen in `ps`, and written
into run folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipes import reading
from recipes.config import UserError

VARIABLE = "FLEET_RECIPES_SECRET"
FILE_VARIABLE = "FLEET_RECIPES_SECRET_FILE"
WITHOUT = "none"  # as the secret: anybody may take part
SHORTEST = 16  # characters
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Secret:
    """What proofs are made with.

    Attributes:
        open: anybody knows it.
    """

    key: bytes = field(repr=False)
    open: bool = False

    @classmethod
    def of(cls, text: str) -> Secret:
        """The secret that a text is."""
        digest = hashlib.sha256(b"fleet-recipes secret\0" + os.fsencode(text))
        return cls(digest.digest(), text == WITHOUT)


def fresh() -> str:
    """A secret that nobody knows yet."""
    return secrets.token_hex(16)


def find(environment: Mapping[str, str]) -> Secret | None:
    """The secret that the environment gives; None where it gives none.

    A file that is named and does not exist is made, with a fresh secret: the first of nodes that
    share a file system makes it for all.

    Raises:
        UserError: it is too short to be one, or the file cannot be read or made.
    """
    if text := environment.get(VARIABLE, "").strip():
        return _checked(text, VARIABLE)
    if name := environment.get(FILE_VARIABLE, ""):
        path = Path(name)
        if not os.path.lexists(path):
            _make(path)
        try:
            text = reading.bytes_of(path, _MOST_BYTES).decode().strip()
        except UnicodeDecodeError:
            raise UserError(f"{FILE_VARIABLE}: {path} is no text", _HOW) from None
        return _checked(text, f"{FILE_VARIABLE}: what {path} holds")
    return None


def missing(nodes: int) -> UserError:
    """What to tell where there is none."""
    return UserError(
        f"{VARIABLE} is not set: by it the {nodes} nodes of a job prove to each other that they "
        "belong to it",
        "on every machine of the job the same, before the command; this one is fresh:\n"
        f"    export {VARIABLE}={fresh()}\n"
        f"  {FILE_VARIABLE}=PATH takes it from a file, {VARIABLE}={WITHOUT} does without "
        "(SECURITY.md)",
    )


_HOW = f"a secret is a text of {SHORTEST} characters or more, such as `openssl rand -hex 16` prints"


def _checked(text: str, where: str) -> Secret:
    if text != WITHOUT and len(text) < SHORTEST:
        raise UserError(f"{where} has {len(text)} characters, which can be guessed", _HOW)
    return Secret.of(text)


def _make(path: Path) -> None:
    """Put a fresh secret into a file that this user alone may read, unless another is faster."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(f"{fresh()}\n")
                stream.flush()
                os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):
                os.link(made, path)  # whole at once, and only where there is none
        finally:
            Path(made).unlink()
    except OSError as error:
        raise UserError(
            f"{FILE_VARIABLE}: {path} does not exist and cannot be made: {error.strerror}", _HOW
        ) from None
