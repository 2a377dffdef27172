"""For authors of plugins: batches made by hand or at random, worked examples and conformance suites."""

from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.draws import make_batch
from posttrain_plugins.testing.losses.conformance import conformance
from posttrain_plugins.testing.rewards import reward_conformance
from posttrain_plugins.testing.rules import rule_conformance
from posttrain_plugins.testing.trainers import trainer_conformance
from posttrain_plugins.testing.worked import worked

__all__ = [
    "batch_of",
    "conformance",
    "make_batch",
    "part_of",
    "reward_conformance",
    "rule_conformance",
    "trainer_conformance",
    "worked",
]
