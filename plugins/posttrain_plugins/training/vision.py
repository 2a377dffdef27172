"""What of a model that sees is trained: by default its language part alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from posttrain.errors import StageError
from posttrain_plugins.training.head.value import HEADS

_WRAPPED = re.compile(r"^base_model\.model\.|\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What peft puts into the names of a model's own parameters."""


@dataclass(frozen=True)
class Vision:
    """The parts of a model that see: tower, projector, or both in one.

    Args:
        parts: Paths of the modules beside the language part and its head.
        trained: Paths of what among them is trained all the same.
    """

    parts: tuple[str, ...]
    trained: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, unfreeze: Sequence[str] = ()) -> Vision:
        """Find the parts of a plain model.

        Args:
            model: A transformers model, without an adapter.
            unfreeze: Suffixes of paths of modules that see and are to be trained.

        Raises:
            StageError: A name in `unfreeze` is that of no such module.
        """
        parts = tuple(_beside(model, _language(model))) if sees(model) else ()
        inside = [path for path, _ in model.named_modules() if _under(path, parts)]
        trained = []
        for name in unfreeze:
            found = [path for path in inside if f".{path}".endswith(f".{name}")]
            if not found:
                raise StageError(
                    f"`{name}` in unfreeze names no module that sees",
                    where="unfreeze",
                    found=", ".join(parts) or "a model that takes no images",
                    fix="name one of these, or a module inside, by the end of its path",
                )
            trained += found
        return cls(parts, tuple(trained))

    @property
    def pattern(self) -> str | None:
        """A regular expression for the whole paths of modules that stay frozen; None where there are none."""
        if not self.parts:
            return None
        but = f"(?!{_any(self.trained)}(?:\\.|$))" if self.trained else ""
        return f"{but}{_any(self.parts)}(?:\\..*)?"

    def freeze(self, model: Any) -> None:
        """Freeze the parameters of what is not to be trained, but what an adapter saves whole."""
        pattern = self.pattern
        if pattern is None:
            return
        for name, parameter in model.named_parameters():
            if "modules_to_save." not in name and re.fullmatch(pattern, _WRAPPED.sub("", name)):
                parameter.requires_grad_(False)

    def told(self, model: Any, hint: bool) -> str | None:
        """Say which parts stay frozen, if some do.

        Args:
            model: The model as it is going to be trained.
            hint: Whether to say what would train them.
        """
        named = [(_WRAPPED.sub("", name), each.requires_grad) for name, each in model.named_parameters()]
        frozen = [part for part in self.parts if not any(on for name, on in named if _under(name, [part]))]
        if not frozen:
            return None
        more = f"; `unfreeze: [{frozen[0].rpartition('.')[2]}]` would train one of them" if hint else ""
        return f"what sees stays frozen: {', '.join(frozen)}{more}"


def sees(model: Any) -> bool:
    """Whether a model takes images."""
    return getattr(model.config, "vision_config", None) is not None


def _language(model: Any) -> set[int]:
    """Return the parameters of the language part and of the heads."""
    heads = [model.get_output_embeddings(), *(getattr(model, name, None) for name in HEADS)]
    modules = [model.get_decoder(), *(head for head in heads if isinstance(head, nn.Module))]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _beside(module: nn.Module, inside: set[int], path: str = "") -> Iterator[str]:
    """Yield the paths of the largest modules that hold none of the parameters."""
    for name, child in module.named_children():
        own = {id(parameter) for parameter in child.parameters()}
        where = f"{path}.{name}" if path else name
        if own and not own & inside:
            yield where
        elif own - inside:
            yield from _beside(child, inside, where)


def _under(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _any(paths: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, paths))})"
