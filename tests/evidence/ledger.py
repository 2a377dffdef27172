"""What every piece of evidence records: command, commit, machine; and where it is written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.planning.versions import current_versions

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "evidence"


def posttrain(
    *arguments: str, workspace: Path, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a workspace and return what it printed.

    Args:
        arguments: Its own.
        workspace: In the directory that it runs in.
        check: Stop if it fails.
        env: Variables beside those of this process.
    """
    command = [sys.executable, "-m", "posttrain", *arguments, "--workspace", str(workspace)]
    environ = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=workspace.parent, env=environ, check=False
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "versions": dict(current_versions()),
    }


def commit() -> str:
    """Return the commit the evidence was made with, marked when the tree differs from it outside of the evidence."""
    head = _git("describe", "--always", "--abbrev=12")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/evidence")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(name: str, title: str, command: str, lines: list[str], data: Any) -> None:
    """Write `docs/evidence/NAME.md` for people and `NAME.json` for machines."""
    OUT.mkdir(parents=True, exist_ok=True)
    about = machine()
    head = [
        f"# {title}",
        "",
        f"Command: `{command}`. Commit `{commit()}`. {about['cores']} cores ({about['processor']}),"
        f" {about['memory_gib']} GiB, Python {about['versions']['python']}, torch {about['versions'].get('torch')},"
        f" transformers {about['versions'].get('transformers')}.",
        "",
    ]
    (OUT / f"{name}.md").write_text("\n".join([*head, *lines]) + "\n")
    (OUT / f"{name}.json").write_text(
        json.dumps({"command": command, "commit": commit(), "machine": about, "results": data}, indent=1)
        + "\n"
    )
    sys.stdout.write(f"wrote {OUT / name}.md\n")
