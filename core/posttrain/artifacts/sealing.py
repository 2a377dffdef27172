"""Sealing: making a filled directory an artifact with a manifest, and checking one against its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain.artifacts.digest import DigestMemo
from posttrain.artifacts.files import payload, sync, write_durably
from posttrain.artifacts.kinds import FACTS_OF, Kind
from posttrain.artifacts.manifest import CONTENT, PROVENANCE, FileEntry, Manifest, canonical
from posttrain.errors import StoreError

_RESERVED = frozenset({CONTENT, PROVENANCE})
REBUILD = "run the pipeline again: the stage that made it is then repeated"


def seal(directory: Path, kind: Kind, facts: Any, memo: DigestMemo) -> Manifest:
    """Hash every file, write `content.json` and force everything to disk.

    The bytes of `content.json` are the canonical manifest: their sha256 is the artifact's digest.

    Raises:
        StoreError: For facts of another kind, no files at all, a reserved name or anything but regular files.
        OSError: When the disk is full or cannot be written.
    """
    expected = FACTS_OF[kind]
    if not isinstance(facts, expected):
        raise StoreError(
            f"these facts do not belong to an artifact of kind `{kind}`",
            where=str(directory),
            found=type(facts).__name__,
            expected=expected.__name__,
            fix="describe the output with the facts of its kind",
        )
    files = payload(directory)
    if not files:
        raise StoreError(
            "this output holds no files", where=str(directory), fix="write the output before returning"
        )
    if taken := sorted(_RESERVED & files.keys()):
        raise StoreError(
            "the store writes this file itself",
            where=str(directory / taken[0]),
            fix="give the payload another name",
        )
    entries = tuple(
        FileEntry(path=name, size=path.stat().st_size, sha256=memo.file(path)) for name, path in files.items()
    )
    manifest = Manifest(kind=kind, facts=facts, files=entries)
    for path in files.values():
        sync(path)
    folders = {
        folder for path in files.values() for folder in path.parents if folder.is_relative_to(directory)
    }
    for folder in sorted(folders, reverse=True):
        sync(folder)
    write_durably(directory / CONTENT, canonical(manifest.model_dump(mode="json")))
    return manifest


def read_manifest(directory: Path, digest: str | None = None) -> Manifest:
    """Read `content.json`.

    Args:
        directory: The artifact's directory.
        digest: What the manifest's digest has to be, if that is known.

    Raises:
        StoreError: When it is missing, damaged or another artifact's.
    """
    path = directory / CONTENT
    try:
        content = path.read_bytes()
        manifest = Manifest.model_validate_json(content)
    except FileNotFoundError as error:
        raise StoreError("an artifact has no manifest", where=str(path), fix=REBUILD) from error
    except ValidationError as error:
        raise StoreError("a manifest cannot be read", where=str(path), found=error, fix=REBUILD) from error
    except OSError as error:
        raise StoreError("a manifest cannot be read", where=str(path), found=error.strerror) from error
    # Of the bytes: facts that artifacts of this version have besides are no change of an older one.
    found = hashlib.sha256(content).hexdigest()
    if digest is not None and found != digest:
        raise StoreError("a manifest was changed", where=str(path), found=found, expected=digest, fix=REBUILD)
    return manifest


def problems(directory: Path, digest: str, memo: DigestMemo, full: bool = False) -> list[StoreError]:
    """Compare an artifact with its manifest and return everything that is wrong.

    Args:
        directory: The artifact's directory.
        digest: Its digest.
        memo: The memo of file digests.
        full: Hash every file again, whatever the memo knows.
    """
    try:
        manifest = read_manifest(directory, digest)
        present = {name: path for name, path in payload(directory).items() if name not in _RESERVED}
    except StoreError as error:
        return [error]
    except OSError as error:
        return [
            StoreError(f"artifact {digest[:12]} cannot be read", where=str(directory), found=error.strerror)
        ]
    found = [
        problem for entry in manifest.files for problem in _differences(directory, digest, entry, memo, full)
    ]
    for name in sorted(present.keys() - {entry.path for entry in manifest.files}):
        found.append(
            _damage(digest, "holds a file that is not in its manifest", present[name], name, "no such file")
        )
    return found


def _differences(
    directory: Path, digest: str, entry: FileEntry, memo: DigestMemo, full: bool
) -> Iterator[StoreError]:
    path = directory / entry.path
    if not path.is_file():
        yield _damage(digest, "lacks a file", path, "nothing", f"{entry.size} bytes")
        return
    size = path.stat().st_size
    if size != entry.size:
        yield _damage(digest, "has a file of another size", path, f"{size} bytes", f"{entry.size} bytes")
        return
    try:
        sha256 = memo.file(path, fresh=full)
    except StoreError as error:
        yield _damage(digest, "has a file that cannot be read", path, error.found, f"sha256 {entry.sha256}")
        return
    if sha256 != entry.sha256:
        yield _damage(
            digest, "has a file with other content", path, f"sha256 {sha256}", f"sha256 {entry.sha256}"
        )


def _damage(digest: str, what: str, path: Path, found: object, expected: str) -> StoreError:
    return StoreError(
        f"artifact {digest[:12]} {what}", where=str(path), found=found, expected=expected, fix=REBUILD
    )
