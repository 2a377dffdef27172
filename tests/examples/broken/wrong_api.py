"""A plugin that was written for another API."""

from posttrain import Registration, hookimpl

POSTTRAIN_API = ">=7,<8"


@hookimpl
def posttrain_losses():
    """Announce a loss of another time."""
    return [Registration("acme/broken", "A loss of another time", "nowhere:Nothing")]
