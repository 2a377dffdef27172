"""What the stage `model.load` runs in its worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Inputs, Outcome, StageContext
from posttrain.errors import DataError
from posttrain_plugins import hub
from posttrain_plugins.models.artifact import CONFIG, facts_of, weight_files, weights_dtype, write_config
from posttrain_plugins.models.load import MODEL, SOURCES, LoadConfig, kind_out
from posttrain_plugins.models.loaded_adapter import BASE, base_of, copy_adapter, copy_beside, require_fitting
from posttrain_plugins.models.packages import gguf_of_version
from posttrain_plugins.models.recognition import is_adapter, require_kind, require_loadable
from posttrain_plugins.models.template import fitted, put_template
from posttrain_plugins.models.valued_record import VALUES
from posttrain_plugins.templates.library import named_template
from posttrain_plugins.templates.tokenizer import TEMPLATE, TOKENIZER, chat_template, read_json

_INDEX = "model.safetensors.index.json"


def run(context: StageContext) -> Outcome:
    """Write the model."""
    config: LoadConfig = context.config
    output = context.output(MODEL)
    kind = kind_out(_absolute(config, context.base))
    file = _gguf(config, context.base)
    if file is not None:
        _convert(file, output, context.work / "tokenizer", config)
    else:
        source = _directory(config, context.base)
        require_loadable(source)
        require_kind(source, kind)
        if is_adapter(source):
            given = context.inputs.get(BASE, ())
            require_fitting(source, _as_inputs(given), kind, config.dtype)
            copy_adapter(source, output, base_of(source, given, context))
        else:
            _copy(source, output, config.dtype)
        if config.template is None and config.template_file is None:
            _keep_template(source, output)
    if config.template is not None or config.template_file is not None:
        file = None if config.template_file is None else context.base / config.template_file
        with _of(config, output):
            put_template(output, config.template, file)
    facts = facts_of(output)
    context.describe(MODEL, kind, facts)
    summary = f"{facts.architecture}, {facts.parameters:,} parameters in {facts.dtype}"
    return Outcome(figures={"parameters": float(facts.parameters or 0)}, summary=summary)


def _convert(file: Path, output: Path, scratch: Path, config: LoadConfig) -> None:
    """Write what a GGUF file holds; its tokenizer is looked at before the weights, which take longer."""
    from posttrain_plugins.models.gguf import convert, require_gguf, write_tokenizer

    require_gguf(file)
    scratch.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file, scratch)
    if config.template is not None:
        with _of(config, scratch):
            fitted(scratch, named_template(config.template))
    convert(file, output, scratch, config.dtype or "float32")


@contextmanager
def _of(config: LoadConfig, directory: Path) -> Iterator[None]:
    """Let errors about a directory that is only there for a while name what the model is loaded from."""
    try:
        yield
    except DataError as error:
        if error.where != str(directory):
            raise
        name = next(name for name in SOURCES if getattr(config, name) is not None)
        raise DataError(
            error.message,
            where=f"{name}: {getattr(config, name)}",
            found=error.found,
            expected=error.expected,
            fix=error.fix,
        ) from error


def _gguf(config: LoadConfig, base: Path) -> Path | None:
    if config.gguf is not None:
        return base / config.gguf
    if config.package is None:
        return None
    return gguf_of_version(config.package, config.package_version)


def _directory(config: LoadConfig, base: Path) -> Path:
    if config.path is not None:
        return base / config.path
    return hub.model_directory(str(config.id), revision=config.revision, download=config.download)


def _copy(source: Path, directory: Path, dtype: str | None) -> None:
    from posttrain_plugins.models.policy import copy_companions, load_model, save_policy

    if dtype is not None and dtype != weights_dtype(source):
        save_policy(directory, load_model(source, dtype), source)
    else:
        for file in weight_files(source):
            shutil.copyfile(file, directory / file.name)
        if (source / _INDEX).is_file():
            shutil.copyfile(source / _INDEX, directory / _INDEX)
        write_config(directory / CONFIG, read_json(source / CONFIG))
        copy_companions(source, directory)
        copy_beside(source, directory, VALUES)
    if not (source / TOKENIZER).is_file():
        _convert_tokenizer(source, directory)


def _convert_tokenizer(source: Path, directory: Path) -> None:
    """Write `tokenizer.json` for a model that only has the files of a slow tokenizer."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, local_files_only=True).backend_tokenizer.save(
        str(directory / TOKENIZER)
    )


def _keep_template(source: Path, directory: Path) -> None:
    """Write the template to the one file that is copied from stage to stage; older layouts have others."""
    template = chat_template(source)
    if template is not None:
        (directory / TEMPLATE).write_text(template, encoding="utf-8", newline="")


def _absolute(config: LoadConfig, base: Path) -> LoadConfig:
    return config if config.path is None else config.model_copy(update={"path": str(base / config.path)})


def _as_inputs(given: Sequence[Artifact]) -> Inputs:
    return {BASE: [Input(each.ref, each.kind, each.facts, each) for each in given]}
