"""A plugin that calls its loss as a built-in one is called."""

from posttrain import EXAMPLE_MEAN, Family, Loss, LossOutput, Registration, Term, hookimpl

POSTTRAIN_API = ">=1,<2"


class Simpo(Loss):
    """Another loss of the same name."""

    family = Family.PREFERENCE

    def __call__(self, batch, config, stats, state):
        """Return one value for each pair."""
        return LossOutput([Term((batch.rejected - batch.chosen) * batch.weight, EXAMPLE_MEAN)])


@hookimpl
def posttrain_losses():
    """Announce it."""
    return [Registration("simpo", "Another loss of the same name", Simpo)]
