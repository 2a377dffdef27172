"""An inspection as one page of HTML that needs nothing else, runs no script and loads nothing.

Whatever comes from the data is escaped by the template engine, and characters that act or hide are named.
"""

from __future__ import annotations

from importlib.resources import files

from posttrain_plugins.inspection.bars import svg_bars
from posttrain_plugins.inspection.escaping import parts, visible
from posttrain_plugins.inspection.summary import charts, model_lines, statistics_lines, training_lines
from posttrain_plugins.inspection.views import Inspection, Look, Piece, folded

_HERE = "posttrain_plugins.inspection"
_CLASSES = {Look.GIVEN: "t", Look.LEARNED: "t s", Look.STRADDLING: "t h", Look.CUT: "t c", Look.LOOSE: "t g"}


def page(inspection: Inspection) -> str:
    """Return the page."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True)
    environment.filters.update(seen=visible, parts=parts, classes=_classes, shown=_shown, folded=folded)
    statistics = inspection.statistics
    return environment.from_string(_resource("page.html.jinja")).render(
        style=Markup(_resource("page.css")),
        source=inspection.source,
        format=inspection.format,
        rows=inspection.rows,
        model=inspection.model,
        training=inspection.training,
        training_lines=list(training_lines(inspection)),
        model_lines=list(model_lines(inspection.model)),
        statistics_lines=list(statistics_lines(statistics)),
        charts=[(title, Markup(svg_bars(spread.bins, title))) for title, spread in charts(statistics)],
        shown=inspection.shown,
    )


def _resource(name: str) -> str:
    return files(_HERE).joinpath(name).read_text(encoding="utf-8")


def _classes(piece: Piece) -> str:
    return _CLASSES[piece.look] + (" x" if piece.special else "")


def _shown(piece: Piece) -> str:
    """Return a token's characters; line breaks get a sign, as they have no colour of their own."""
    return piece.shown if piece.look is Look.GIVEN else piece.shown.replace("\n", "↵\n")
