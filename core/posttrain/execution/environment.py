"""A stage process's environment: threads, devices, no network, and no secret it did not declare."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata, util
from pathlib import Path

import posttrain
from posttrain.errors import StageError
from posttrain.planning.secrets import has_secret_shape, is_reference, looks_like_secret, resolve

BRIDGES = "bridges"

_SECRET_NAME = re.compile(
    r"""TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|KEY(S|_ID)?(_|$)
      |(^|_)(PAT|JWT|CREDS?)(_|$)|(^|_)(PASS|AUTH|DSN)$|_PWD$""",
    re.IGNORECASE | re.VERBOSE,
)

_FIXED = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # NumPy's OpenBLAS and pyarrow's jemalloc start threads when they are imported. A zygote must have none, or it
    # could not fork safely; every launcher sets them, so that a stage finds the same whichever started it.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}

_PREFERRED = {
    # A thread that is out of work spins for a moment before it sleeps. For as long as libgomp lets it by default, it
    # takes the core from other stages and servers of the run: a step beside two others took 0.8 s, so 0.46 s. One
    # that sleeps at once is woken too late: alone a step took 0.13 s, and 0.17 s so.
    "GOMP_SPINCOUNT": "1000",
}
"""What a stage gets unless the caller's environment says otherwise; and `_heap`."""

_KEEPS = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824"
"""A block from the system is paid for page by page when it is first written: 2 to 60 ms for the 50 MiB of a gradient,
in each step, as blocks beyond 32 MiB go back at once unless told otherwise. The heap keeps what it has, for a stage's
life: what it took at its most."""
_KEEPING = (2, 36)
"""The glibc from which on that is known to work. Old ones refuse a threshold beyond 32 MiB, and would map every block
anew that is larger than 128 KiB."""


@cache
def _heap() -> Mapping[str, str]:
    """Return what has the C library keep freed blocks, if it is one that can be asked to."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, ValueError, OSError):
        # Another C library, or another system.
        return {}
    known = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= _KEEPING
    return {"GLIBC_TUNABLES": _KEEPS} if known else {}


def without_secrets(
    environ: Mapping[str, str], declared: Collection[str] = (), others: Collection[str] = ()
) -> dict[str, str]:
    """Return `environ` without the variables that hold secrets, except those the stage declared.

    Args:
        environ: The environment.
        declared: Names of the secrets that the stage declared.
        others: Names that any stage of the run declared: secrets, whatever their names look like.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in declared or not (name in others or _holds_secret(name, value))
    }


def _holds_secret(name: str, value: str) -> bool:
    named = _SECRET_NAME.search(name) is not None
    return named or looks_like_secret(name, value) or has_secret_shape(value)


def worker_environment(
    environ: Mapping[str, str],
    *,
    threads: int,
    gpus: Sequence[str] = (),
    secrets: Collection[str] = (),
    others: Collection[str] = (),
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of a stage's process.

    Args:
        environ: The parent's environment.
        threads: Threads for numerical libraries; set before anything is imported.
        gpus: Ids of the GPUs it may see; none hides all of them.
        secrets: Names of the variables that the stage declared.
        others: Names of the variables that any stage of the run declared.
        extra: What the pipeline sets under `runtime.env`, secrets by reference; it wins.

    Raises:
        SpecError: A reference's variable is not set.
    """
    return {
        **_PREFERRED,
        **_heap(),
        **without_secrets(environ, secrets, others),
        **_FIXED,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **{
            name: resolve(value, environ) if is_reference(value) else value
            for name, value in (extra or {}).items()
        },
    }


def with_posttrain(environ: Mapping[str, str], python: str, workspace: Path) -> dict[str, str]:
    """Return `environ` such that another interpreter finds posttrain, this one's copy if need be.

    The bridge to this copy is a directory of links to the posttrain packages and their metadata alone, so
    that no other library of this interpreter can shadow the runtime's own.

    Raises:
        StageError: The interpreter does not start, or lacks what posttrain itself needs.
    """
    found = _imports_posttrain(python, tuple(sorted(environ.items())))
    if found is None:
        return dict(environ)
    path = os.pathsep.join(filter(None, [str(_bridge(workspace)), environ.get("PYTHONPATH")]))
    bridged = {**environ, "PYTHONPATH": path}
    problem = _imports_posttrain(python, tuple(sorted(bridged.items())))
    if problem is not None:
        raise StageError(
            "posttrain cannot be imported by the interpreter of this stage",
            where=f"runtime.python: {python}",
            found=problem,
            fix=f"{python} -m pip install posttrain",
        )
    return bridged


@cache
def _imports_posttrain(python: str, environ: tuple[tuple[str, str], ...]) -> str | None:
    """Return None when the interpreter can import the worker, else the last line of what it said."""
    command = [python, "-P", "-c", "import posttrain.execution.worker"]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StageError(
            "the interpreter of this stage does not start",
            where=f"runtime.python: {python}",
            found=error,
            expected="the path of a Python 3.11 or newer",
        ) from error
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _bridge(workspace: Path) -> Path:
    """Return a directory that holds links to the posttrain packages and their metadata."""
    links = {Path(path).name: Path(path) for path in _packages()}
    label = hashlib.sha256("\n".join(map(str, sorted(links.values()))).encode()).hexdigest()[:12]
    bridge = workspace / BRIDGES / label
    bridge.mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        if not (bridge / name).exists():
            temporary = bridge / f".{name}.{os.getpid()}"
            temporary.symlink_to(target)
            temporary.replace(bridge / name)
    return bridge


def _packages() -> list[Path]:
    """Return the directories of posttrain, of the packages its own entry points name, and of its metadata."""
    found = [Path(str(posttrain.__file__)).parent]
    try:
        distribution = metadata.distribution("posttrain")
    except metadata.PackageNotFoundError:
        return found
    for entry in distribution.entry_points.select(group="posttrain"):
        spec = util.find_spec(entry.module.partition(".")[0])
        found += [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    records = (Path(place) / f"posttrain-{distribution.version}.dist-info" for place in sys.path)
    return found + [record for record in records if record.is_dir()][:1]


@contextmanager
def variables(wanted: Mapping[str, str], hidden: Collection[str] = ()) -> Iterator[None]:
    """Set environment variables of this process while the block lasts, then put back what was there.

    Args:
        wanted: What to set.
        hidden: Names to take away, unless they are wanted.
    """
    before = {name: os.environ.get(name) for name in {*wanted, *hidden}}
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
