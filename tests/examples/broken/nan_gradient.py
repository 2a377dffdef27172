"""A plugin whose loss has finite values, and a gradient that is not a number."""

from posttrain import EXAMPLE_MEAN, Family, Loss, LossOutput, Registration, Term, hookimpl

POSTTRAIN_API = ">=1,<2"


class Broken(Loss):
    """The distance of the margin from zero, by way of a square root of zero."""

    family = Family.PREFERENCE

    def __call__(self, batch, config, stats, state):
        """Return one value for each pair."""
        margin = batch.chosen - batch.rejected
        off = (margin - margin.detach()).square().sqrt()
        return LossOutput([Term((off - margin) * batch.weight, EXAMPLE_MEAN)])


@hookimpl
def posttrain_losses():
    """Announce it."""
    return [Registration("acme/broken", "A loss without a usable gradient", Broken)]
