"""The Hugging Face hub: read from the local cache unless a download is asked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from posttrain.errors import DataError, StageError
from posttrain.execution.environment import variables
from posttrain_plugins.data.reading.columnar import rows_of
from posttrain_plugins.data.reading.files import DataFile, Readable, numbered, numbered_entries

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SWITCHES = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
)
"""What the libraries made of the variables when they were imported; transformers asks huggingface_hub."""
_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def moves(id: str | None, revision: str | None) -> str | None:
    """Return None when a hub id is pinned to a commit (or there is none), else what to do about it."""
    if id is None or (revision is not None and _COMMIT.fullmatch(revision)):
        return None
    return f"`{id}` moves: pin `revision` to a commit, which is 40 hexadecimal digits"


def cached(id: str, what: str) -> bool:
    """Whether anything of a `model` or a `dataset` of the hub is in the local cache; looks at folders alone."""
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / "--".join([f"{what}s", *id.split("/")])]
    if what == "dataset":
        prepared = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
        folders.append(Path(prepared) / id.lower().replace("/", "___"))
        folders.append(Path(prepared) / id.replace("/", "___"))
    return any(folder.is_dir() for folder in folders)


def load_dataset(
    id: str,
    *,
    revision: str | None,
    subset: str | None,
    part: str | None,
    download: bool,
    stream: int | None = None,
) -> Readable:
    """Read a dataset of the hub.

    Args:
        id: Its name.
        revision: Its commit.
        subset: The name of a configuration.
        part: The split; `train` when left out.
        download: Whether the network may be used.
        stream: Read this many first rows without storing the dataset.

    Raises:
        DataError: It is not in the local cache and `download` is off, or it has several subsets or splits.
    """
    import datasets

    wanted = part or "train"
    try:
        with _network(download):
            found = datasets.load_dataset(
                id, name=subset, revision=revision, split=wanted, streaming=stream is not None
            )
            name = f"{id}[{wanted}]"
            if stream is not None:
                return numbered(name, islice(rows_of(found), stream))
    except (OSError, ValueError) as error:
        raise _unavailable(id, "dataset", error, download) from error
    return DataFile(name, lambda: numbered_entries(rows_of(found)), merged=True)


def model_directory(id: str, *, revision: str | None, download: bool) -> Path:
    """Return the directory of a model of the hub in the local cache.

    Raises:
        DataError: It is not there and `download` is off, or downloading failed.
    """
    import huggingface_hub

    try:
        with _network(download):
            return Path(
                huggingface_hub.snapshot_download(
                    id, revision=revision, allow_patterns=list(_MODEL_FILES), local_files_only=not download
                )
            )
    except (OSError, ValueError) as error:
        raise _unavailable(id, "model", error, download) from error


def upload(directory: Path, id: str, *, token: str, private: bool, revision: str | None, message: str) -> str:
    """Upload a model's directory as one commit and return its address.

    Args:
        directory: The files.
        id: The repository; it is made if need be.
        token: A token that may write there.
        private: Whether a repository that is made is private.
        revision: The branch; None for `main`.
        message: The message of the commit.

    Raises:
        StageError: The hub cannot be reached, or refuses.
    """
    import huggingface_hub

    try:
        with _network(True):
            api = huggingface_hub.HfApi(token=token)
            api.create_repo(id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=id, folder_path=directory, revision=revision, commit_message=message
            )
    except (OSError, ValueError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StageError(
            f"the model could not be uploaded: {reason}",
            where=id,
            fix="check repository, token and network; `posttrain resume` tries again without training",
        ) from error
    return str(commit.commit_url)


def _unavailable(id: str, what: str, error: Exception, download: bool) -> DataError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if download:
        return DataError(
            f"the {what} could not be downloaded: {reason}", where=id, fix="check the id and the network"
        )
    return DataError(
        f"the {what} cannot be read from the local cache: {reason}",
        where=id,
        fix="set `download: true` to let this stage use the network, or give a local `path`",
    )


@contextmanager
def _network(allowed: bool) -> Iterator[None]:
    """Let the hub libraries use the network, or keep them off it, whatever the process was started with."""
    import huggingface_hub.constants  # noqa: F401 - imported inside, it would keep what is set here

    modules = [(sys.modules[name], switch) for name, switch in _SWITCHES if name in sys.modules]
    before = [getattr(module, switch) for module, switch in modules]
    for module, switch in modules:
        setattr(module, switch, not allowed)
    try:
        with variables(dict.fromkeys(_VARIABLES, "0" if allowed else "1")):
            yield
    finally:
        for (module, switch), value in zip(modules, before, strict=True):
            setattr(module, switch, value)
