import pytest
import torch
from posttrain_simpo_variant.loss import AnchoredSimPO

from posttrain import Family, Group
from posttrain.errors import SpecError
from posttrain.registry.components import validate_config
from posttrain.registry.discovery import discover
from posttrain_plugins.testing import conformance, make_batch

TestAnchored = conformance("acme/simpo-variant", monotone="margin")
TestPlain = conformance(
    AnchoredSimPO,
    {"anchor": 0.0, "gamma": 0.0, "beta": 10.0},
    monotone="margin",
)


def test_without_an_anchor_it_is_simpo():
    batch = make_batch(Family.PREFERENCE, seed=3)
    catalogue = discover()
    simpo = catalogue.make(Group.LOSS, "simpo")
    theirs = simpo(batch, simpo.config(beta=2.0, gamma_beta_ratio=0.5), {}, {})
    ours = AnchoredSimPO()(batch, AnchoredSimPO.config(beta=2.0, gamma=0.5, anchor=0.0), {}, {})
    torch.testing.assert_close(ours.terms[0].values, theirs.terms[0].values)


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"gamma": -1.0}, {"ancor": 0.1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(SpecError):
        validate_config(AnchoredSimPO.config, options, discover())
