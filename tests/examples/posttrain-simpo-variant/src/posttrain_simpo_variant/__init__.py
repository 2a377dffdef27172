"""SimPO with an anchor on the chosen answers, for posttrain."""

from posttrain import Registration, hookimpl

POSTTRAIN_API = ">=1,<2"


@hookimpl
def posttrain_losses() -> list[Registration]:
    """Announce the loss; it is imported when somebody uses it."""
    return [
        Registration(
            "acme/simpo-variant",
            "SimPO with an anchor on the chosen answers",
            "posttrain_simpo_variant.loss:AnchoredSimPO",
            reference="https://arxiv.org/abs/2405.14734",
        )
    ]
