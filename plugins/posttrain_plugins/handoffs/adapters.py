"""Adapters belong to one base, and mean what their options say; a reference is the policy that training starts from."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain_plugins.handoffs.lineage import kin, named, policies, same, short, trains

LOST = 0.1
"""From this share of an adapter's effect on, a change of logits by merging it is said."""
REFERENCE = "reference"
"""What the port of a separate reference policy is called."""


class AdapterBase(Rule):
    """An adapter is combined with another model than the one it was trained on.

    All shapes fit, and the sum means nothing. It shows when an adapter is merged into the instruct model instead of
    the base, or into the base instead of the tuned model. Every other stage finds an adapter's base by its digest
    and cannot get this wrong.
    """

    code = "H040"
    title = "an adapter meets another base than its own"
    level = Level.ERROR
    fix = "connect the model that the adapter was trained on"

    def check(self, site: Site) -> Iterable[Finding]:
        """Judge stages with a port for adapters alone and one for models alone."""
        for port, adapter in _at(site, Kind.ADAPTER):
            for _, model in _at(site, Kind.MODEL):
                yield from self._judge(site, port, adapter, model)

    def _judge(self, site: Site, port: str, adapter: Input, model: Input) -> Iterable[Finding]:
        base = adapter.facts.base
        if base is not None and model.artifact is not None:
            if base != model.artifact.digest:
                yield self._wrong(port, adapter, model, short(base), adapter, model)
            return
        maker = site.upstream.get(adapter.origin)
        started = (
            [source.origin for _, source in policies(maker) if source.kind == Kind.MODEL] if maker else []
        )
        if not started:
            yield self.unknown(f"whether {adapter.origin} belongs to {model.origin} is not known yet", port)
        elif model.origin not in started:
            guess = Input(adapter.origin, adapter.kind, adapter.facts)
            yield self._wrong(port, adapter, model, ", ".join(started), guess)

    def _wrong(self, port: str, adapter: Input, model: Input, base: str, *basis: Input) -> Finding:
        message = f"{named(adapter)} was trained on {base}, but is combined with {named(model)}"
        return self.finding(message, *basis, port=port)


class AdapterChanged(Rule):
    """An adapter's options are not those of the adapter it was made from.

    Its strength is `lora_alpha` over its rank (or over the root of the rank): another alpha in `adapter_config.json`
    scales all that was learned, and nothing fails.
    """

    code = "H041"
    title = "an adapter's options changed on the way"
    level = Level.WARNING
    fix = "let the stage in between copy `adapter_config.json` as it is"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each adapter with the adapter it comes from."""
        for port, policy, source in kin(site):
            if {policy.kind, source.kind} != {Kind.ADAPTER}:
                continue
            own, before = policy.facts.adapter or {}, source.facts.adapter or {}
            changed = [name for name in sorted(own.keys() & before.keys()) if own[name] != before[name]]
            if changed:
                what = ", ".join(f"`{name}` {own[name]} instead of {before[name]}" for name in changed)
                yield self.finding(
                    f"{named(policy)} has {what} of {named(source)}", policy, source, port=port
                )


class ReferenceOther(Rule):
    """A trainer is given a reference that is not the policy it starts from.

    A loss that pulls towards a reference then pulls away from the start: towards the base rather than the tuned
    model, say, when adapters are chained. Scores of 4.6 instead of 7 were traced to that. The built-in trainers have
    no such port: their reference is the exact starting policy.
    """

    code = "H042"
    title = "the reference is not the starting policy"
    level = Level.WARNING
    fix = "connect the same policy to `reference` as to `model`, or leave the reference out"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare what is connected to the ports `reference` and `model` of a trainer."""
        if not trains(site):
            return
        for reference in site.inputs.get(REFERENCE, ()):
            for policy in site.inputs.get("model", ()):
                if policy.origin != reference.origin and not same(policy, reference):
                    message = f"training starts from {named(policy)}, but the reference is {named(reference)}"
                    yield self.finding(message, policy, reference, port=REFERENCE)


class MergeChanged(Rule):
    """A model was merged from an adapter and computes something else than the policy that was trained.

    An adapter that was trained on a base in 4 bits and is merged into the whole one, or a merge that was saved in 16
    bits: all weights are in their places, and part of what was learned is drowned. `model.merge` compares logits on a
    probe; this rule compares their largest difference with the largest change that the adapter had made.
    """

    code = "H043"
    title = "merging changed what a model computes"
    level = Level.WARNING
    fix = "merge with `dtype: float32`; an adapter that was trained on a base in few bits, with `into: dequantized`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report merged models that are far from what was trained, measured by how far that was from its base."""
        for port, model in policies(site):
            merge = model.facts.merge
            if merge is None or merge.gap is None or merge.effect is None:
                continue
            if merge.gap > LOST * merge.effect:
                message = (
                    f"logits of {named(model)} differ from the policy that was trained by up to {merge.gap:g}, and its "
                    f"adapter had changed them by up to {merge.effect:g}"
                )
                yield self.finding(message, model, port=port)


def _at(site: Site, kind: Kind) -> list[tuple[str, Input]]:
    ports = {name for name, port in site.ports().items() if port.kinds == {kind}}
    return [(name, source) for name, sources in site.inputs.items() if name in ports for source in sources]
