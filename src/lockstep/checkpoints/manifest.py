"""What makes a folder a checkpoint: a list of its files with their sizes and SHA-256, and the
SHA-256 of that list.

A bit that flips in any of them is seen, and so are a file that was cut short and one that is
missing. `sha256sum -c manifest.sha256` in the folder checks the list without us.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.checkpoints.folders import step_in
from lockstep.errors import DamagedCheckpoint, LockstepError

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
MODEL, MODEL_PART, STATE = "model.safetensors", "model-", "state.json"
"""What a checkpoint holds at least: its state, and the model in one file or in parts."""
FORMAT = 1
LARGEST = 64 * 2**20  # bytes of a manifest that are read at all
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


def measured(file: Path) -> Entry:
    """A file as it lies on disk."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return Entry(file.name, file.stat().st_size, digest.hexdigest())


def seal(folder: Path, step: int, entries: Sequence[Entry]) -> None:
    """Write the manifest and its seal, and force them to disk."""
    text = (
        json.dumps(
            {"format": FORMAT, "step": step, "files": [asdict(entry) for entry in entries]},
            indent=1,
        )
        + "\n"
    )
    write_forced(folder / MANIFEST, text.encode())
    write_forced(
        folder / SEAL, f"{hashlib.sha256(text.encode()).hexdigest()}  {MANIFEST}\n".encode()
    )


def check(folder: Path) -> list[Entry]:
    """The entries of a checkpoint whose files are all there and unchanged. Raises
    DamagedCheckpoint, naming the file, for any other.
    """
    entries = listed(folder)
    for entry in entries:
        file = folder / entry.name
        if not file.is_file() or file.is_symlink():
            raise DamagedCheckpoint(f"{folder.name}: {entry.name} is missing", file=entry.name)
        size = file.stat().st_size
        if size != entry.bytes:
            raise DamagedCheckpoint(
                f"{folder.name}: {entry.name} has {size} bytes and should have {entry.bytes}",
                file=entry.name,
            )
        if measured(file).sha256 != entry.sha256:
            raise DamagedCheckpoint(
                f"{folder.name}: {entry.name} has been changed (its SHA-256 is not the one in"
                f" {MANIFEST})",
                file=entry.name,
            )
    return entries


def listed(folder: Path) -> list[Entry]:
    """The files of a checkpoint as its manifest lists them: nothing of it is believed before its
    seal was compared.
    """
    sealed = _read(folder / SEAL).decode("ascii", "replace").split("  ")
    text = _read(folder / MANIFEST)
    if sealed != [hashlib.sha256(text).hexdigest(), f"{MANIFEST}\n"]:
        raise DamagedCheckpoint(
            f"{folder.name}: {MANIFEST} does not agree with {SEAL}", file=MANIFEST
        )
    try:
        found: Any = json.loads(text)
        if found["format"] != FORMAT:
            raise DamagedCheckpoint(
                f"{folder.name}: its format is {found['format']!r}, and this version reads"
                f" {FORMAT}",
                file=MANIFEST,
            )
        step = int(found["step"])
        entries = [
            Entry(str(each["name"]), int(each["bytes"]), str(each["sha256"]))
            for each in found["files"]
        ]
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{folder.name}: {MANIFEST} is not one of ours ({error})", file=MANIFEST
        ) from None
    if step_in(folder.name) not in (None, step):
        raise DamagedCheckpoint(
            f"{folder.name}: it holds the checkpoint of step {step} (its {MANIFEST} says so)",
            file=MANIFEST,
        )
    for entry in entries:
        if not _PLAIN.fullmatch(entry.name):
            raise DamagedCheckpoint(
                f"{folder.name}: {MANIFEST} names a file {entry.name!r} outside its folder",
                file=MANIFEST,
            )
    names = {entry.name for entry in entries}
    if STATE not in names or not any(
        name == MODEL or name.startswith(MODEL_PART) for name in names
    ):
        raise DamagedCheckpoint(
            f"{folder.name}: {MANIFEST} lists no {STATE if STATE not in names else 'model'}",
            file=MANIFEST,
        )
    return entries


@contextmanager
def believed(file: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint for whatever the contents of `file` do to code that expects what
    we write.
    """
    try:
        yield
    except LockstepError:
        raise
    except (
        OSError,
        SafetensorError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        if type(error).__name__ == "OutOfMemoryError":
            # torch's, a RuntimeError: the file is not at fault
            raise
        said = f"{type(error).__name__}: {error}"
        raise DamagedCheckpoint(
            f"{file.parent.name}: {file.name} cannot be read ({said})", file=file.name
        ) from error


def _read(file: Path) -> bytes:
    try:
        # a pipe would be waited for, and for ever
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(handle, "rb") as stream:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedCheckpoint(
                    f"{file.parent.name}: {file.name} is not a regular file", file=file.name
                )
            if found.st_size > LARGEST:
                raise DamagedCheckpoint(
                    f"{file.parent.name}: {file.name} is larger than any of ours", file=file.name
                )
            return stream.read()
    except OSError as error:
        raise DamagedCheckpoint(
            f"{file.parent.name}: {file.name} is missing ({error.strerror})", file=file.name
        ) from None


def write_forced(file: Path, octets: bytes) -> None:
    """Write a file and force it to disk."""
    with file.open("wb") as stream:
        stream.write(octets)
        stream.flush()
        os.fsync(stream.fileno())


def force(path: Path) -> None:
    """To disk: a file's bytes, a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
