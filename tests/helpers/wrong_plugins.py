"""Plugins that are wrong in one way."""

from __future__ import annotations

from helpers.plugins import status_of

from posttrain.contracts.registration import Group
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.status import Status

HEAD = """\
import posttrain
from posttrain import Registration

POSTTRAIN_API = ">=1,<2"
"""

REWARD = """

@posttrain.hookimpl
def posttrain_rewards():
    return [Registration("{name}", "A reward.", "no_such_module:Reward")]
"""

BUILTIN = HEAD + REWARD.format(name="exact")

HEALTHY = HEAD + REWARD.format(name="healthy")

IMPORT_ERROR = (
    "import posttrain\n\n\ndef helper():\n    raise RuntimeError('broken\\nin two lines')\n\n\nhelper()\n"
)


def assert_rest_works(catalogue: Catalogue) -> None:
    assert status_of(catalogue, "builtin").status is Status.LOADED
    assert status_of(catalogue, "healthy").status is Status.LOADED
    assert catalogue.names(Group.REWARD) == ["exact", "healthy"]
    assert catalogue.entry(Group.REWARD, "exact").plugin.builtin
    assert not catalogue.entry(Group.REWARD, "healthy").plugin.builtin
