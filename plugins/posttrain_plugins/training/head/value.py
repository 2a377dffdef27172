"""The head of models that give numbers: a reward for an answer, log-odds for a step.

transformers' own classes read a sequence's number at the last token that is not padding, which they tell by its id.
Here the places are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.head.paths import forward_as, unwrapped
from posttrain_plugins.training.head.scores import Head, TokenScores, Wanted
from posttrain_plugins.training.microbatch import MicroBatch

HEADS = ("score", "classifier")
"""What transformers calls the last layer of a model that classifies."""


@dataclass
class ValueHead(Head):
    """Calls the decoder, then the head with the hidden states of the places that are asked for.

    A head with two outputs gives the log-odds of the second: softmax(z)₁ = σ(z₁ − z₀).
    """

    bounded = True

    def __call__(self, model: Any, micro: MicroBatch, wanted: Wanted) -> TokenScores:
        """See `Head`."""
        decoder, head = value_parts(model)

        def forward(_: Any, *, selected: Tensor, **inputs: Any) -> Tensor:
            hidden = decoder(**inputs)[0]
            return number(head(hidden.flatten(0, -2).index_select(0, selected)))

        with forward_as(unwrapped(model), forward):
            return TokenScores.of_values(model(selected=micro.selected, **micro.inputs).float())


def number(outputs: Tensor) -> Tensor:
    """Return one number for each place, shape [N, 1 or 2] to [N]."""
    return outputs[..., 0] if outputs.shape[-1] == 1 else outputs[..., 1] - outputs[..., 0]


def value_parts(model: Any) -> tuple[nn.Module, nn.Module]:
    """Return the decoder and the head of a model that gives numbers; adapters and wrappers are looked through.

    Raises:
        StageError: It has none that is known.
    """
    plain = unwrapped(model)
    inner = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    decoder = getattr(inner, inner.base_model_prefix, None)
    head = next((getattr(inner, name) for name in HEADS if hasattr(inner, name)), None)
    if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module):
        raise StageError(
            "the model has no head that gives numbers",
            found=type(inner).__name__,
            expected=f"a sequence or token classification model, whose head is called {' or '.join(HEADS)}",
        )
    return decoder, head


def choose_value_head(model: Any, probe: MicroBatch) -> ValueHead:
    """Try the head on a probe.

    Raises:
        StageError: The model has no such head, or what it says is not finite.
    """
    head = ValueHead()
    with evaluating(model):
        found = head(model, probe, Wanted()).value
    if found is None or not bool(found.isfinite().all()):
        raise StageError(
            "the model's numbers are not finite",
            where="probe of the head",
            fix="look at where the model comes from: its weights are broken, or its precision is too low",
        )
    return head
