"""An adapter belongs to one base: combined with another model its weights mean nothing."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level
from posttrain_plugins.handoffs.lineage import certainty, named, policies, short

NAME = "adapter"


class Adapter:
    """Checks a stage that combines an adapter with a model: one port takes only adapters, one only models.

    Stages that merely compare policies take both kinds at one port and are not judged. What combines an
    adapter with its own base by digest, as every other stage does, cannot get this wrong.
    """

    def check(self, site: Site) -> Iterable[Finding]:
        """Report adapters that meet another base than theirs."""
        for port, adapter in _at(site, Kind.ADAPTER):
            for _, model in _at(site, Kind.MODEL):
                yield from _judge(site, port, adapter, model)


def _at(site: Site, kind: Kind) -> list[tuple[str, Input]]:
    ports = {name for name, port in site.ports().items() if port.kinds == {kind}}
    return [(name, source) for name, sources in site.inputs.items() if name in ports for source in sources]


def _judge(site: Site, port: str, adapter: Input, model: Input) -> Iterable[Finding]:
    base = adapter.facts.base
    if base is not None and model.artifact is not None:
        if base != model.artifact.digest:
            yield _wrong(port, adapter, model, short(base), certainty(adapter, model))
        return
    maker = site.upstream.get(adapter.origin)
    started = [source.origin for _, source in policies(maker) if source.kind == Kind.MODEL] if maker else []
    if not started:
        message = f"whether {adapter.origin} belongs to {model.origin} is not known yet"
        yield Finding(NAME, Level.NOTE, Certainty.UNKNOWN, message, port=port)
    elif model.origin not in started:
        yield _wrong(port, adapter, model, ", ".join(started), Certainty.PREDICTED)


def _wrong(port: str, adapter: Input, model: Input, base: str, certain: Certainty) -> Finding:
    return Finding(
        NAME,
        Level.ERROR,
        certain,
        f"{named(adapter)} was trained on {base}, but is combined with {named(model)}",
        port=port,
        fix="connect the model that the adapter was trained on",
    )
