"""The manifest, which makes a folder a checkpoint: a list of its files with their sizes and
digests, and the SHA-256 of that list.

A flipped bit, a truncated file and a missing file are all detected. In the folder, `sha256sum -c
manifest.sha256` checks the list without Lockstep, and `xxh128sum` a file. The digests of files are
XXH3, which takes a sixteenth of SHA-256's processor time. They protect against damage, not against
people: no digest that lies beside its file can do that.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from lockstep.checkpoints.folders import step_in
from lockstep.errors import DamagedCheckpoint, LockstepError
from lockstep.runtime.cores import cores
from lockstep.runtime.disk import write_whole

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
MODEL, MODEL_PART, STATE = "model.safetensors", "model-", "state.json"
"""The files that a checkpoint has at least: its state, and the model in one file or in parts."""
AVERAGE = "average.safetensors"
FORMAT = 2
_DIGEST = "xxh3_128"
"""The name of a file's digest in the manifest."""
LARGEST = 64 * 2**20  # bytes; a larger manifest is not read
_WORTH_THREADS = 2**22  # bytes
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of a checkpoint."""

    name: str
    bytes: int
    digest: str
    """XXH3 of 128 bits, in hexadecimal."""


def new_digest() -> Any:
    """Return a digest for a file that is being written, with the methods of hashlib's digests."""
    return xxhash.xxh3_128()


def measured(file: Path) -> SealedFile:
    """Return size and digest of a file on disk."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, new_digest)
    return SealedFile(file.name, file.stat().st_size, digest.hexdigest())


def seal(folder: Path, step: int, entries: Sequence[SealedFile]) -> None:
    """Write the manifest and its seal, and force them to disk."""
    files = [{"name": entry.name, "bytes": entry.bytes, _DIGEST: entry.digest} for entry in entries]
    text = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1) + "\n"
    write_whole(folder / MANIFEST, text, forced=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_whole(folder / SEAL, f"{digest}  {MANIFEST}\n", forced=True)


def check(folder: Path) -> list[SealedFile]:
    """Check that all files of a checkpoint are there and unchanged, and return its entries. If one
    is not, raises DamagedCheckpoint with its name.
    """
    entries = listed(folder)
    for entry in entries:
        file = folder / entry.name
        if not file.is_file() or file.is_symlink():
            raise DamagedCheckpoint(
                "checkpoint-file-missing", checkpoint=folder.name, file=entry.name
            )
        size = file.stat().st_size
        if size != entry.bytes:
            raise _changed(
                folder, entry.name, f"it has {size} bytes, but should have {entry.bytes}"
            )
    largest_first = sorted(entries, key=lambda entry: -entry.bytes)
    with _map_over_threads(sum(entry.bytes for entry in entries)) as map_files:
        remeasured = map_files(lambda entry: measured(folder / entry.name), largest_first)
        for sealed, current in zip(largest_first, remeasured, strict=True):
            if sealed != current:
                raise _changed(folder, sealed.name, f"its digest is not the one in {MANIFEST}")
    return entries


def _changed(folder: Path, name: str, difference: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        "checkpoint-file-changed", checkpoint=folder.name, file=name, difference=difference
    )


@contextmanager
def _map_over_threads(size: int) -> Iterator[Callable[..., Iterator[SealedFile]]]:
    """Yield `map`, over several threads if there are enough bytes to be worth it."""
    if size < _WORTH_THREADS:
        yield map
        return
    from concurrent.futures import ThreadPoolExecutor  # late: it imports many modules

    with ThreadPoolExecutor(min(4, cores())) as pool:  # more did not help
        yield pool.map


def listed(folder: Path) -> list[SealedFile]:
    """Return the files that a checkpoint's manifest lists. The manifest is compared with its seal
    before any of it is used.
    """
    sealed = _read(folder / SEAL).decode("ascii", "replace").split("  ")
    text = _read(folder / MANIFEST)
    if sealed != [hashlib.sha256(text).hexdigest(), f"{MANIFEST}\n"]:
        raise _changed(folder, MANIFEST, f"its SHA-256 is not the one in {SEAL}")
    with believed(folder / MANIFEST):
        contents: Any = json.loads(text)
        version = contents["format"]
        if version != FORMAT:
            raise DamagedCheckpoint(
                "checkpoint-format-unknown",
                checkpoint=folder.name,
                file=MANIFEST,
                format=version,
                known=FORMAT,
            )
        step = int(contents["step"])
        entries = [
            SealedFile(str(entry["name"]), int(entry["bytes"]), str(entry[_DIGEST]))
            for entry in contents["files"]
        ]
        if step_in(folder.name) not in (None, step):
            raise DamagedCheckpoint(
                "checkpoint-of-another-step", checkpoint=folder.name, file=MANIFEST, step=step
            )
        for entry in entries:
            if not _PLAIN.fullmatch(entry.name):
                raise ValueError(f"it names a file {entry.name!r} outside its folder")
        names = {entry.name for entry in entries}
        if STATE not in names:
            raise ValueError(f"it lists no {STATE}")
        if not any(name == MODEL or name.startswith(MODEL_PART) for name in names):
            raise ValueError("it lists no model")
    return entries


@contextmanager
def believed(file: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint for any error that the contents of `file` cause in the block, whose
    code expects what Lockstep writes.
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
        raise DamagedCheckpoint(
            "checkpoint-file-unreadable",
            checkpoint=file.parent.name,
            file=file.name,
            reason=f"{type(error).__name__}: {error}",
        ) from error


def _read(file: Path) -> bytes:
    with believed(file):
        try:
            status = file.lstat()
        except FileNotFoundError:
            raise DamagedCheckpoint(
                "checkpoint-file-missing", checkpoint=file.parent.name, file=file.name
            ) from None
        if not stat.S_ISREG(status.st_mode):  # reading a pipe could block for ever
            raise OSError("it is not a regular file")
        if status.st_size > LARGEST:
            raise DamagedCheckpoint(
                "checkpoint-file-too-large",
                checkpoint=file.parent.name,
                file=file.name,
                size=status.st_size,
                most=LARGEST,
            )
        return file.read_bytes()
