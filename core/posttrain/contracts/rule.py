"""The hand-off rule contract: what must fit where one stage meets the next."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.contracts.stage import Certainty, Finding, Input, Level, Port, Stage

CODE = r"[A-Z]{1,8}[0-9]{2,4}"
"""What a rule's code looks like: letters of its author, then a number."""
BUILT_IN = "H"
"""The letters that belong to the built-in rules."""


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


class Rule(ABC):
    """One failure at a hand-off. Registered under `Group.RULE` as a class; imports nothing heavy.

    A rule is asked about every node: while planning, on predictions, and right before the node starts, on artifacts.
    Its docstring is what `posttrain explain CODE` prints: what goes wrong, how it shows, and where it was seen.

    Class attributes:
        code: Letters and a number, such as `ACME07`; never given to another rule. `H` and a number are built in.
        title: The failure in a few words.
        level: How much it usually matters.
        fix: What to do about it.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    level: ClassVar[Level]
    fix: ClassVar[str]

    @abstractmethod
    def check(self, site: Site) -> Iterable[Finding]:
        """Report what does not fit at this node. A fact that is `None` is not known, and never an error."""

    @classmethod
    def text(cls) -> str:
        """Return the docstring without its indentation."""
        return inspect.getdoc(cls) or ""

    def finding(
        self,
        message: str,
        *sources: Input,
        port: str | None = None,
        level: Level | None = None,
        fix: str | None = None,
    ) -> Finding:
        """Return a finding that rests on the facts of these inputs.

        Args:
            message: What is wrong here, with names and values.
            sources: Whose facts were compared; the finding is verified when all of them are real.
            port: The input port it is about.
            level: Another level than the rule's.
            fix: Another fix than the rule's.
        """
        certain = Certainty.VERIFIED if all(each.verified for each in sources) else Certainty.PREDICTED
        return Finding(
            self.code, level or self.level, certain, message, port=port, fix=fix or self.fix, code=self.code
        )

    def unknown(self, message: str, port: str | None = None) -> Finding:
        """Return a note that something cannot be told yet."""
        return Finding(self.code, Level.NOTE, Certainty.UNKNOWN, message, port=port, code=self.code)
