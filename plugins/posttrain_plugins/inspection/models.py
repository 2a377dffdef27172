"""What of a model decides how rows are read: its tokenizer, its template, and what ends a generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import POLICY
from posttrain.errors import DataError
from posttrain_plugins.inspection.finding import found
from posttrain_plugins.inspection.views import ModelView, Remark, TokenName
from posttrain_plugins.models.artifact import context_of
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.render import ChatTemplate


@dataclass(frozen=True)
class Model:
    """A model as far as its files say it without torch.

    Args:
        label: How it was named.
        encoder: Its tokenizer and chat template.
        context: The longest sequence that it takes, in tokens; None where it does not say.
    """

    label: str
    encoder: Encoder
    context: int | None


def open_model(what: str, workspace: Path, template: str | None = None) -> Model:
    """Open a model directory or a model of the store.

    Args:
        what: How it is named.
        workspace: The `.posttrain` directory.
        template: Another chat template in the place of its own: a name of the library, or a file.

    Raises:
        DataError: The directory has no tokenizer, or the tokenizer lacks tokens of the other template.
        StoreError: There is no such model.
    """
    model, directory = _opened(what, workspace)
    if template is None:
        return model
    encoder, source = model.encoder, _source(template, directory)
    encoder.files = replace(encoder.files, template=source)
    encoder.template = ChatTemplate(source, encoder.files.special_tokens)
    return replace(model, label=f"{model.label} with the chat template {template}")


def _source(template: str, directory: Path) -> str:
    """Return the source of a chat template for a tokenizer."""
    from posttrain_plugins.models.template import fitted, template_source
    from posttrain_plugins.templates.library import TEMPLATES, named_template

    path = Path(template)
    if template in TEMPLATES:
        return fitted(directory, named_template(template))
    if path.is_file():
        return template_source(None, path)
    raise DataError(
        "there is neither a chat template nor a file of that name",
        where="--template",
        found=template,
        expected=f"a file, or one of {', '.join(sorted(TEMPLATES))}",
    )


def _opened(what: str, workspace: Path) -> tuple[Model, Path]:
    path = Path(what)
    if path.is_dir():
        return Model(what, Encoder.open(path), context_of(path)), path
    if path.exists():
        raise DataError(
            "a model is a directory", where=what, found="a file", expected="config and tokenizer files"
        )
    given = found(what, workspace, POLICY)
    artifact = given.artifact
    of = artifact.ref if given.origin is None else f"{artifact.ref} of {given.origin}"
    label = artifact.ref if artifact.digest.startswith(what) else f"{what} ({of})"
    return Model(label, Encoder.open(artifact.path), artifact.facts.context), artifact.path


def model_view(model: Model) -> ModelView:
    """Look at a model."""
    encoder = model.encoder
    fingerprint = encoder.fingerprint()
    return ModelView(
        label=model.label,
        template=None if fingerprint is None else fingerprint.tokens,
        template_text=None if fingerprint is None else fingerprint.text,
        tokenizer=encoder.files.hash,
        end_of_turn=_named(encoder, encoder.end_of_turn),
        stops=tuple(TokenName(id, _name(encoder, id)) for id in encoder.stop_ids),
        bos=_named(encoder, encoder.bos_id),
        eos=_named(encoder, encoder.eos_id),
        pad=_named(encoder, encoder.declared_pad),
        context=model.context,
        remarks=tuple(_remarks(encoder)),
    )


def _remarks(encoder: Encoder) -> Iterator[Remark]:
    pad, ends = encoder.declared_pad, encoder.stop_ids
    if not encoder.has_template:
        yield Remark(
            "no-template", "there is no chat template: conversations cannot be encoded", None, _TEMPLATE
        )
    elif encoder.end_of_turn is None:
        yield Remark("no-end-of-turn", "the chat template ends an answer with no token", None, _TEMPLATE)
    if pad is None:
        used = _name(encoder, encoder.pad_id)
        yield Remark(
            "no-pad", f"no padding token is named; batches are filled with {used}, which no mask reads"
        )
    elif pad in ends:
        yield Remark(
            "pad-is-end",
            f"{_name(encoder, pad)} pads and ends generations; masks follow the answers, so it is learned as an end",
        )
    if encoder.bos_twice:
        yield Remark(
            "bos-twice",
            "the chat template prints the first token and the tokenizer would add another: one of them is used",
        )


_TEMPLATE = "set one, such as `template: chatml` of `model.load`"


def _named(encoder: Any, id: int | None) -> TokenName | None:
    return None if id is None else TokenName(id, _name(encoder, id))


def _name(encoder: Any, id: int) -> str:
    return str(encoder.files.plain.id_to_token(id))
