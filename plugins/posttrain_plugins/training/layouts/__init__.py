"""How the sequences of a micro-batch lie in rows, and the attention that keeps them apart."""

from posttrain_plugins.training.layouts.choice import LAYOUTS, choose_layout
from posttrain_plugins.training.layouts.layout import Layout

__all__ = ["LAYOUTS", "Layout", "choose_layout"]
