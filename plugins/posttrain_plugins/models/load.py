"""The stage `model.load`: a model or an adapter from a directory, the hub, a GGUF file or an installed package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Port,
    Prediction,
    SourceMark,
    Stage,
    StageConfig,
    VolatileMark,
)
from posttrain.errors import DataError
from posttrain_plugins import hub
from posttrain_plugins.models.artifact import (
    facts_of,
)
from posttrain_plugins.models.loaded_adapter import (
    BASE,
    known_base,
    require_fitting,
)
from posttrain_plugins.models.packages import gguf_of_version, installed_version
from posttrain_plugins.models.recognition import (
    Loaded,
    is_adapter,
    kind_of,
    require_kind,
    require_loadable,
)
from posttrain_plugins.models.template import (
    TemplateOption,
    fitted,
    template_field,
    templated,
    with_file,
)
from posttrain_plugins.templates.calling import WITH_CALLS
from posttrain_plugins.templates.library import named_template
from posttrain_plugins.templates.tokenizer import (
    TOKENIZER,
)

MODEL = "model"
_INDEX = "model.safetensors.index.json"
_LOCAL = ("path", "gguf", "template_file")
SOURCES = ("path", "id", "gguf", "package")


class LoadConfig(StageConfig):
    """Where the model comes from; exactly one of `path`, `id`, `gguf` and `package`."""

    path: Annotated[str | None, SourceMark()] = Field(
        default=None, description="a directory in the Hugging Face layout, with safetensors weights"
    )
    id: str | None = Field(default=None, description="a model of the Hugging Face hub")
    revision: str | None = Field(
        default=None,
        description="its commit; without one the model may change unnoticed, and the stage is never cached",
    )
    gguf: Annotated[str | None, SourceMark()] = Field(
        default=None, description="a GGUF file; it is converted once"
    )
    package: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="an installed Python package that holds one GGUF file, by its module name",
    )
    package_version: str | None = Field(
        default=None, description="its version; filled in with the installed one"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="precision of the weights; left out, they stay as they are (float32 from GGUF)",
    )
    template: TemplateOption | None = template_field(
        None, "put this chat template in place of the model's own, if any"
    )
    template_file: Annotated[str | None, SourceMark()] = Field(
        default=None, description="the same, from a jinja file of any name"
    )
    kind: Loaded | None = Field(
        default=None,
        description="what comes out; of a `path` its files say it, and anything else is a `model` unless it is said",
    )
    download: Annotated[bool, VolatileMark()] = Field(
        default=False, description="let this stage use the network"
    )

    @model_validator(mode="before")
    @classmethod
    def _file(cls, values: Any) -> Any:
        """Know a template that is a path."""
        return with_file(values)

    @model_validator(mode="before")
    @classmethod
    def _version(cls, values: Any) -> Any:
        """Put the package's version among the options, so that an upgrade makes the stage stale."""
        package = values.get("package") if isinstance(values, Mapping) else None
        if not isinstance(package, str) or not package.isidentifier() or values.get("package_version"):
            return values
        return {**values, "package_version": installed_version(package)}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give one of `path`, `id`, `gguf` and `package` (found {', '.join(given) or 'none'})"
            )
        if self.revision is not None and self.id is None:
            raise ValueError("`revision` belongs to a hub `id`")
        if self.template is not None and self.template_file is not None:
            raise ValueError("give `template` or `template_file`, not both")
        return self


class Load(Stage):
    """Bring a model into the store as plain safetensors, or an adapter whose base is there or is connected.

    Of a directory the files say whether it is a policy, a reward model, a process reward model or an adapter.
    """

    config = LoadConfig
    inputs = (
        Port(BASE, frozenset({Kind.MODEL, Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL}), optional=True),
    )
    target = "posttrain_plugins.models.loading:run"
    preload = ("torch", "transformers")

    def outputs(self, config: LoadConfig) -> tuple[Port, ...]:
        """The model."""
        return (Port(MODEL, frozenset({kind_out(config)})),)

    def predict(self, config: LoadConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """The facts of a local directory are read here already; of other sources little is known."""
        return {MODEL: Prediction(kind_out(config), _predicted(config, inputs))}

    def check(self, config: LoadConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report missing files, weights that are not safetensors, a package that is not installed."""
        for name in _LOCAL:
            value = getattr(config, name)
            if value is not None and not Path(value).exists():
                yield _error(
                    f"there is no {value}", f"check `{name}`; it is relative to the spec file's folder"
                )
                return
        if inputs.get(BASE) and (config.gguf or config.package):
            yield _error(f"the input `{BASE}` belongs to an adapter's `path` or `id`", "leave it out")
        try:
            if config.path is not None:
                require_loadable(Path(config.path))
                require_kind(Path(config.path), kind_out(config))
                require_fitting(Path(config.path), inputs, kind_out(config), config.dtype)
                if config.template is not None and (Path(config.path) / TOKENIZER).is_file():
                    fitted(Path(config.path), named_template(config.template))
            if config.package is not None:
                gguf_of_version(config.package, config.package_version)
        except DataError as error:
            yield _error(str(error), None)

    def pinned(self, config: LoadConfig) -> str | None:
        """A hub id needs a commit, a package a version."""
        if config.package is not None and config.package_version is None:
            return f"the version of `{config.package}` is not known"
        return hub.moves(config.id, config.revision)


def _predicted(config: LoadConfig, inputs: Inputs) -> PolicyFacts:
    changes: dict[str, Any] = {} if config.dtype is None else {"dtype": config.dtype}
    if config.path is not None and is_adapter(Path(config.path)):
        changes["base"] = known_base(Path(config.path), inputs)
    facts = _facts(config)
    if facts.template is None and (config.template is not None or config.template_file is not None):
        changes |= {"has_template": True, "overruled": (), "template_name": config.template}
        if config.template is not None:
            changes["calls"] = config.template in WITH_CALLS
    return facts.model_copy(update=changes)


def _facts(config: LoadConfig) -> PolicyFacts:
    """Read what a local directory says; nothing when it is not one, or `check` has something against it."""
    if config.path is None:
        return PolicyFacts(dtype=None if config.id is not None else "float32")
    directory = Path(config.path)
    file = None if config.template_file is None else Path(config.template_file)
    try:
        require_loadable(directory)
        files = [*sorted(directory.iterdir()), *([] if file is None else [file])]
        stamps = tuple((str(path), path.stat().st_mtime_ns) for path in files)
        return _cached_facts(directory, config.template, file, stamps)
    except (DataError, FileNotFoundError):
        return PolicyFacts()


@lru_cache(maxsize=32)
def _cached_facts(
    directory: Path, name: str | None, file: Path | None, stamps: tuple[tuple[str, int], ...]
) -> PolicyFacts:
    """Read the facts that a model has once it has got the template, if it is to get one."""
    given = name is not None or file is not None
    return facts_of(directory, templated(directory, name, file) if given else None)


def kind_out(config: LoadConfig) -> Kind:
    """Return what comes out, as the options say, or the files."""
    if config.kind is not None:
        return config.kind
    return Kind.MODEL if config.path is None else kind_of(Path(config.path))


def _error(message: str, fix: str | None) -> Finding:
    return Finding("model", Level.ERROR, Certainty.VERIFIED, message, fix=fix)
