"""What images become in a token sequence, by family of vision-language models."""

from posttrain_plugins.templates.vision.expansion import Expansion, Placed, expanded, expansion_of
from posttrain_plugins.templates.vision.files import Vision

__all__ = ["Expansion", "Placed", "Vision", "expanded", "expansion_of"]
