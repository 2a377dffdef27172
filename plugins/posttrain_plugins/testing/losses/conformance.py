"""The suite: every check of a loss by name, and the one line that an author writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.contracts.loss import Loss
from posttrain_plugins.testing.losses import cuts, declarations, effects, slopes, values
from posttrain_plugins.testing.losses.subject import LossSubject, loss_subject
from posttrain_plugins.testing.suites import Check, require_reasons, suite

CHECKS: Mapping[str, Check[LossSubject]] = {
    "contract": Check(declarations.contract),
    "options": Check(declarations.options, lambda subject: bool(subject.loss.config.model_fields)),
    "effects": Check(effects.effects),
    "terms": Check(values.terms),
    "finite": Check(values.finite),
    "gradcheck": Check(slopes.gradcheck),
    "row_order": Check(cuts.row_order),
    "split": Check(cuts.split, lambda subject: subject.parted),
    "isolation": Check(slopes.isolation, lambda subject: subject.parted),
    "proportion": Check(slopes.proportion),
    "weightless": Check(slopes.weightless),
    "absence": Check(slopes.absence),
    "edges": Check(values.edges),
    "extremes": Check(values.extremes),
    "low_precision": Check(values.low_precision),
    "monotone": Check(slopes.monotone, lambda subject: subject.monotone is not None),
    "metrics": Check(values.metrics),
    "needs": Check(declarations.needs),
    "purity": Check(declarations.purity),
    "resume": Check(cuts.resume, lambda subject: subject.remembers),
    "example": Check(declarations.example),
}
"""What must hold of every loss."""


def conformance(
    loss: str | type[Loss],
    options: Mapping[str, Any] | None = None,
    *,
    monotone: str | None = None,
    except_: Mapping[str, str] | None = None,
    files: Sequence[str | Path] = (),
    others: Mapping[str, Any] | None = None,
    idle: Mapping[str, str] | None = None,
) -> type:
    """Return the conformance suite of a loss as a class of tests.

    Args:
        loss: The name it is registered by, or the class, which need not be registered.
        options: Its options; the defaults where left out.
        monotone: What its author promises: `margin` (it does not rise where a better answer becomes likelier, nor
            where a worse one becomes less so), `better` or `worse` (one of the two alone), or None (nothing).
        except_: Checks that it is known not to pass, each with the reason. One that passes all the same fails.
        files: Local plugin files in which the name may be.
        others: Another value of options of which none is found that validates, such as a list or a name.
        idle: Options that are known to have no effect in the steps that are drawn, each with the reason. One that has
            an effect all the same fails.

    Raises:
        SpecError: `except_` names no check, or it or `idle` gives no reason.

    Example:
        >>> TestSigmoid = conformance("sigmoid", {"beta": 0.5}, monotone="margin")
    """
    require_reasons(idle or {}, "idle")

    def subject() -> LossSubject:
        return loss_subject(loss, options, monotone, files, others=others, idle=idle)

    return suite(CHECKS, subject, except_)
