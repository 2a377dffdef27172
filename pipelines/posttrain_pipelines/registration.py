"""What this package gives to posttrain: names and lazy targets. Imports neither Prefect nor MLflow."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from posttrain import Registration, hookimpl

POSTTRAIN_API = ">=1,<2"

_HERE = "posttrain_pipelines"
_RECIPES = Path(__file__).resolve().parent / "recipes"


@hookimpl
def posttrain_runners() -> list[Registration]:
    """The Prefect runner."""
    return [
        Registration(
            "prefect",
            "A Prefect flow with one task for each node",
            f"{_HERE}.flow.runner:PrefectRunner",
            requires=("prefect",),
        )
    ]


@hookimpl
def posttrain_trackers() -> list[Registration]:
    """The MLflow tracker."""
    return [
        Registration(
            "mlflow",
            "Runs, lineage and models in MLflow",
            f"{_HERE}.tracking.tracker:MlflowTracker",
            requires=("mlflow",),
        )
    ]


@hookimpl
def posttrain_stages() -> list[Registration]:
    """Promotion."""
    return [
        Registration("promote", "Register a model and point an alias at it", f"{_HERE}.promotion:Promote")
    ]


@hookimpl
def posttrain_commands() -> list[Registration]:
    """The verbs for services and tracking."""
    return [
        Registration("sync", "Bring MLflow up to date with past runs", f"{_HERE}.commands:sync"),
        Registration("ui", "Start the pages of Prefect and MLflow", f"{_HERE}.commands:ui"),
        Registration("down", "Stop the local servers", f"{_HERE}.commands:down"),
    ]


@hookimpl
def posttrain_recipes() -> list[Registration]:
    """The shipped pipeline files; the first sentence of the comment at the top says what each is."""
    return [Registration(path.stem, _summary(path), str(path)) for path in sorted(_RECIPES.glob("*.yaml"))]


def _summary(path: Path) -> str:
    """Return the first sentence of the comment that a file begins with, else the file's name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    paragraph = itertools.takewhile(lambda line: line.lstrip("# "), lines)
    comment = itertools.takewhile(lambda line: line.startswith("#"), paragraph)
    text = " ".join(line.lstrip("# ").rstrip() for line in comment)
    return re.split(r"\.(?=\s|$)", text)[0] or path.stem
