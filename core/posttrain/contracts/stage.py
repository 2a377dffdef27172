"""The stage contract: typed artifacts in, typed artifacts out.

Everything here is light; `target` names the function that only the worker imports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field

from posttrain.artifacts.kinds import FACTS_OF, Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice, Component, Config


@dataclass(frozen=True)
class SourceMark:
    """Marks a config field that names a local file or directory; its content digest goes into the key."""


@dataclass(frozen=True)
class SecretMark:
    """Marks a config field that holds a secret by reference (`env:NAME`); it never enters a key or a record."""


@dataclass(frozen=True)
class VolatileMark:
    """Marks a config field that cannot change the outputs (logging, memory cuts); it is left out of the key."""


Source = Annotated[str, SourceMark()]
Secret = Annotated[str, SecretMark(), Field(pattern=r"^env:[A-Za-z_][A-Za-z0-9_]*$")]


class StageConfig(Config):
    """Base of a stage's options: what stands under `with:`."""


@dataclass(frozen=True)
class Port:
    """One typed input or output.

    Args:
        name: The port's name, as written in `inputs:` or after the dot of a reference.
        kinds: The artifact kinds it takes or gives.
        formats: For datasets, the formats it takes or gives; empty means any.
        optional: The input may be left unconnected.
        many: The input takes a list of artifacts.
        training: The stage trains on this dataset (used to find evaluation rows in training data).
    """

    name: str
    kinds: frozenset[Kind]
    formats: frozenset[str] = frozenset()
    optional: bool = False
    many: bool = False
    training: bool = False


class Level(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Certainty(StrEnum):
    """What a finding rests on: real manifests, predicted ones, or nothing yet."""

    VERIFIED = "verified"
    PREDICTED = "predicted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One thing that a stage's check or a hand-off rule has to say about a node.

    `rule` is the name of who says it; `code` is that of a rule, which `posttrain explain` explains.
    """

    rule: str
    level: Level
    certainty: Certainty
    message: str
    node: str = ""
    port: str | None = None
    fix: str | None = None
    code: str | None = None

    @property
    def label(self) -> str:
        """Return how people see who says it: `H003 template-changed`, or the name of a stage."""
        return f"{self.code} {self.rule}" if self.code else self.rule


@dataclass(frozen=True)
class Prediction:
    """What a stage expects to put out, before it has run. Facts that are `None` are not known yet."""

    kind: Kind
    facts: Any = None

    def __post_init__(self) -> None:
        if self.facts is None:
            object.__setattr__(self, "facts", FACTS_OF[self.kind]())


@dataclass(frozen=True)
class Input:
    """One artifact that reaches a port: real (`artifact`), or predicted by the stage that will make it."""

    origin: str
    kind: Kind
    facts: Any
    artifact: Artifact | None = None
    prompts: frozenset[str] | None = None
    """Hashes of the prompts of a dataset, where they are known."""

    @property
    def verified(self) -> bool:
        """Whether the facts come from a committed artifact."""
        return self.artifact is not None


Inputs = Mapping[str, Sequence[Input]]


@dataclass(frozen=True)
class Estimate:
    """What a stage is expected to need; `None` where it cannot be told."""

    parameters: int | None = None
    trainable: int | None = None
    memory_bytes: int | None = None
    note: str | None = None


class Stage(ABC):
    """A plugin that turns artifacts into artifacts. Registered under `Group.STAGE`; instantiated without arguments.

    Class attributes:
        config: The strict option model.
        inputs: The input ports.
        target: `module:function`, called in the worker with a `StageContext`; it returns an `Outcome`.
        preload: Modules worth importing before a worker is forked, such as `("torch", "transformers")`.
        tiny: Options that make a smoke run small (`--tiny`); `None` takes an option away.
        external: The stage has an effect outside the store; `holds` is asked before it is skipped.
        shared: Numerics versions, by name, of the code that stages of several plugins share (a training loop).
            They are part of every key, whichever plugin the stage comes from. A base class sets them.
    """

    config: ClassVar[type[StageConfig]] = StageConfig
    inputs: ClassVar[tuple[Port, ...]] = ()
    target: ClassVar[str]
    preload: ClassVar[tuple[str, ...]] = ()
    tiny: ClassVar[Mapping[str, Any]] = {}
    external: ClassVar[bool] = False
    shared: ClassVar[Mapping[str, int]] = {}

    @abstractmethod
    def outputs(self, config: Any) -> tuple[Port, ...]:
        """Return the output ports; they may depend on the options (a split names its parts)."""

    def shrink(self, config: Any) -> Mapping[str, Any]:
        """Return what `--tiny` overlays on these options: `tiny`, unless that depends on them."""
        return self.tiny

    def predict(self, config: Any, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the output manifests. Facts that cannot be told yet stay `None`."""
        return {port.name: Prediction(min(port.kinds)) for port in self.outputs(config)}

    def check(self, config: Any, inputs: Inputs) -> Iterable[Finding]:
        """Report what is wrong with these options on these inputs."""
        return ()

    def estimate(self, config: Any, inputs: Inputs, gpus: int = 0) -> Estimate | None:
        """Estimate parameters and memory, where that makes sense, with so many GPUs granted; 0: on CPUs."""
        return None

    def pinned(self, config: Any) -> str | None:
        """Return None when the options determine the outputs, else why not (a moving hub id): then never cached."""
        return None

    def prompts(self, config: Any, port: str, base: Path) -> frozenset[str] | None:
        """Return the prompt hashes of a dataset output when they can be read cheaply at plan time."""
        return None

    def holds(self, config: Any, inputs: Inputs, workspace: Path) -> str | None:
        """For external stages: None when the effect is still in place, else why it is not."""
        return None


class Verdict(StrEnum):
    """How a stage that ran to its end came out."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Outcome:
    """What a stage's target returns.

    Args:
        verdict: Only gates give anything but `COMPLETED`.
        figures: The key figures of the final table and of the tracker.
        steps: Optimizer steps advanced, for trainers; zero is refused as a success.
        summary: One line for people.
    """

    verdict: Verdict = Verdict.COMPLETED
    figures: Mapping[str, float] = field(default_factory=dict)
    steps: int | None = None
    summary: str = ""


Cell = str | int | float | bool | None
"""What a table holds."""


class StageContext(Protocol):
    """What a stage's target is given in the worker."""

    node: str
    stage: Stage
    """The plugin that runs, so that one target can serve several stages (every offline trainer)."""
    config: Any
    work: Path
    """Scratch that survives a crash and a resume of the same key (trainer checkpoints)."""
    base: Path
    """The directory that relative source paths are resolved against."""
    workspace: Path
    """The `.posttrain` directory."""
    inputs: Mapping[str, Sequence[Artifact]]

    def input(self, port: str) -> Artifact:
        """Return the single artifact of an input port."""

    def output(self, port: str) -> Path:
        """Return the fresh directory to fill for an output port."""

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        """State kind and facts of an output; called once for each port."""

    def component(self, choice: Choice, group: str) -> Component:
        """Load the component a config field names."""

    def artifact(self, digest: str) -> Artifact:
        """Look an artifact up in the store (an adapter's base)."""

    def secret(self, reference: str) -> str:
        """Resolve a declared `env:NAME`."""

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Tell how far the stage is."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Stream metrics of one step."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Show rows, such as sampled completions, at one step; trackers keep them by name and step."""

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        """Say something to the person who watches, once."""

    @property
    def stopping(self) -> bool:
        """Whether the stage was asked to checkpoint and stop."""
