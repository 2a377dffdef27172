"""The hand-off rule contract: what must fit where one stage meets the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.contracts.stage import Finding, Input, Port, Stage


@dataclass(frozen=True)
class Site:
    """One node as a rule sees it.

    Args:
        node: The node's name.
        uses: The stage it runs.
        stage: The stage plugin.
        config: Its validated options.
        inputs: What reaches each port, real or predicted.
        upstream: The sites that made the inputs, by origin (`node.port`).
    """

    node: str
    uses: str
    stage: Stage
    config: Any
    inputs: Mapping[str, Sequence[Input]]
    upstream: Mapping[str, Site]

    def ports(self) -> Mapping[str, Port]:
        """Return the input ports by name."""
        return {port.name: port for port in self.stage.inputs}

    def ancestors(self) -> Sequence[Site]:
        """Return every site upstream of this one, each once, nearest first."""
        seen: dict[str, Site] = {}
        queue = list(self.upstream.values())
        while queue:
            site = queue.pop(0)
            if site.node not in seen:
                seen[site.node] = site
                queue.extend(site.upstream.values())
        return list(seen.values())


class Rule(Protocol):
    """Registered under `Group.RULE` as a class. Fires at plan and at bind; imports nothing heavy."""

    def check(self, site: Site) -> Iterable[Finding]:
        """Report what does not fit at this node."""
