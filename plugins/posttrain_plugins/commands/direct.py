"""What a training command's pipeline says, in the words of its command line.

A command makes a pipeline that nobody has written, so nobody knows its key paths: `stages.train.with.loss.beta` is
`--loss.beta`, `data.data` is `--dataset`, and a fix such as `columns: {question: prompt}` is `--dataset.columns`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from posttrain.cli.output import Voice
from posttrain.contracts.component import Config
from posttrain.errors import PosttrainError
from posttrain.planning.problems import SpecProblems
from posttrain_plugins.commands.values import arms_of
from posttrain_plugins.commands.wording import Flag, flagged

LOADED: Mapping[str, str] = {"model": "model", "data": "dataset", "eval": "eval_dataset"}
"""The options that name what is loaded, by the stage that loads it; the training's ports are called as the stages."""
_TRAIN = "train"
_PATH = re.compile(r"`?\bstages\.(train|model|data|eval)\.with((?:\.\w+)*)`?")
_PORT = re.compile(
    r"(?<![\w.`/-])(?:train\.(model|data|eval)|(model|data|eval)\.(?:model|data|artifact))(?![\w.`/=-])"
)
_RESUME = re.compile(r"`posttrain resume[^`]*`|^posttrain resume$")
_BARE = re.compile(r"`(\w+)`")
_SHARED = "download"
"""An option of each stage that loads, and of the command itself."""


@dataclass(frozen=True)
class Wording:
    """How a command tells things.

    Args:
        verb: What was called, such as `posttrain dpo`.
        trainer: The options of the trainer.
        loaders: Those of the stages that load, by their names here.
        copies: The model is copied out at the end, which a resumed run would not do.
    """

    verb: str
    trainer: type[Config]
    loaders: Mapping[str, type[Config]]
    copies: bool = False

    @property
    def voice(self) -> Voice:
        """How warnings, and errors of stages, are told."""
        return Voice(self.text, self.place, "run the command again")

    def text(self, text: str) -> str:
        """Return a text with paths, ports and options in backticks as the command line has them."""
        return self._told(text, None)

    def place(self, where: str) -> str:
        """Return the option that a place in the pipeline is."""
        if where == _TRAIN:
            return self.verb
        return f"--{LOADED[where]}" if where in LOADED else self.text(where)

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Word the errors of the block."""
        try:
            yield
        except SpecProblems as several:
            raise SpecProblems([self._worded(each) for each in several.problems]) from several
        except PosttrainError as error:
            raise self._worded(error) from error

    def _worded(self, error: PosttrainError) -> PosttrainError:
        node = next((name for name in LOADED if re.match(rf"(?:stages\.)?{name}\b", error.where or "")), None)
        error.where = None if error.where is None else self.place(error.where)
        error.message = self._told(error.message, node)
        error.found = None if error.found is None else self._told(error.found, node)
        error.expected = None if error.expected is None else self._told(error.expected, node)
        if error.fix is not None:
            fix = self._told(error.fix, node)
            error.fix = _BARE.sub(lambda match: self._bare(match, node), fix)
        return error

    def _told(self, text: str, node: str | None) -> str:
        told = _PORT.sub(self._port, _PATH.sub(self._path, text))
        told = _RESUME.sub("the same command again", told) if self.copies else told
        return flagged(told, lambda name: self._flag(name, node)).replace(
            "`posttrain run` again", "run the command again"
        )

    def _path(self, match: re.Match[str]) -> str:
        stage, rest = match[1], match[2].removeprefix(".")
        if stage == _TRAIN:
            return f"--{rest}" if rest else self.verb
        return f"--{LOADED[stage]}.{rest}" if rest else f"--{LOADED[stage]}"

    def _port(self, match: re.Match[str]) -> str:
        return f"--{LOADED[match[1] or match[2]]}"

    def _bare(self, match: re.Match[str], node: str | None) -> str:
        flag = self._flag(match[1], node)
        return match[0] if flag is None else f"`--{flag.name}`"

    def _flag(self, name: str, node: str | None) -> Flag | None:
        """Return the option of a name: of what loads at this node, else of the trainer, else of what loads at all."""
        if name == _SHARED:
            return Flag(name)
        own = [node] if node is not None else []
        for stage in (*own, _TRAIN, *LOADED):
            model = self.trainer if stage == _TRAIN else self.loaders[stage]
            if name in model.model_fields:
                arms = arms_of(model.model_fields[name].annotation)
                whole = any(arm is dict or getattr(arm, "__origin__", None) is dict for arm in arms)
                return Flag(name if stage == _TRAIN else f"{LOADED[stage]}.{name}", whole)
        return None
