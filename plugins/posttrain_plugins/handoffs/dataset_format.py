"""The dataset's format must be one that the port takes."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Finding, Level
from posttrain_plugins.handoffs.lineage import certainty, datasets

NAME = "dataset-format"


class DatasetFormat:
    """Compares each dataset's format with its port's formats."""

    def check(self, site: Site) -> Iterable[Finding]:
        """Report datasets of another format, and those whose format is not known yet."""
        ports = site.ports()
        for name, data in datasets(site):
            allowed = ports[name].formats if name in ports else frozenset()
            format = data.facts.format
            if not allowed or format in allowed:
                continue
            expected = " or ".join(f"`{each}`" for each in sorted(allowed))
            if format is None:
                message = f"whether {data.origin} has the format {expected} is not known yet"
                yield Finding(NAME, Level.NOTE, Certainty.UNKNOWN, message, port=name)
                continue
            yield Finding(
                NAME,
                Level.ERROR,
                certainty(data),
                f"{data.origin} has the format `{format}`, but `{name}` of {site.uses} takes {expected}",
                port=name,
                fix="set `format` or `columns` where the data is loaded, or use a stage for this format",
            )
