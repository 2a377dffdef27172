"""A plugin whose loss takes what other libraries hand out."""

from posttrain import Family, Loss, Registration, hookimpl

POSTTRAIN_API = ">=1,<2"


class Broken(Loss):
    """A loss that takes four log-probs."""

    family = Family.PREFERENCE

    def __call__(self, policy_chosen_logps, policy_rejected_logps):
        """Return the loss."""
        return (policy_rejected_logps - policy_chosen_logps).mean()


@hookimpl
def posttrain_losses():
    """Announce it."""
    return [Registration("acme/broken", "A loss that takes four log-probs", Broken)]
