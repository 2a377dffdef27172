from __future__ import annotations

from pathlib import Path

import pytest
from helpers.looking import model_at, shown, turns

from posttrain.artifacts.kinds import DatasetFacts, Kind, TokenFacts
from posttrain.artifacts.manifest import Artifact, Manifest
from posttrain.contracts.trainer import Example
from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.tokens.token_rows import Records, TokenWriter
from posttrain_plugins.inspection.models import Model, open_model
from posttrain_plugins.inspection.tokenized import Fit, inspect_tokens
from posttrain_plugins.inspection.views import Kept, Look
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.trainers.sft import Sft

ROWS = [
    {"messages": turns("The quick?", "It said: no")},
    {"messages": turns("привет", "👍", "word", "name")},
    {"messages": turns("word", "ok " * 30)},
]
FIT = Fit("train.sft", None, "keep_start")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(model_at(tmp_path_factory.mktemp("model"))), Path("nowhere"))


@pytest.fixture(scope="module")
def examples(model: Model) -> list[Example]:
    return prepare(
        Sft(), ROWS, model.encoder, format_of("messages"),
        max_length=None, truncation="error", weight_column=None,
    ).examples  # fmt: skip


def written(
    directory: Path, rows: list[list[Example]], tokenizer: str, template: str | None = None
) -> Artifact:
    directory.mkdir(parents=True)
    records = Records(("completion",))
    for held in rows:
        records.add(held)
    with TokenWriter(directory, ("completion",)) as writer:
        writer.add(records.batch(), [f"{number:016x}" for number in range(len(rows))])
    facts = DatasetFacts(
        format="tokens", rows=len(rows), tokens=TokenFacts(tokenizer=tokenizer, template=template)
    )
    manifest = Manifest(kind=Kind.DATASET, facts=facts, files=())
    return Artifact(manifest.digest, manifest, directory)


def test_tokens_read_as_their_text(tmp_path: Path, model: Model, examples: list[Example]) -> None:
    artifact = written(tmp_path / "data", [[each] for each in examples], model.encoder.files.hash)
    seen = inspect_tokens(artifact, "data", model, FIT, [0, 1])
    assert (seen.rows, seen.training.usable, seen.statistics.equal) == (3, 3, 0)
    assert seen.training.tokens == sum(each.size for each in examples)
    learned = [shown(row.sides[0], Look.LEARNED) for row in seen.shown]
    assert learned == ["It said: no<|im_end|>", "👍<|im_end|>name<|im_end|>"]
    first = seen.shown[0].sides[0]
    assert [piece.id for piece in first.pieces] == list(examples[0].sequences[0].tokens)
    assert "".join(piece.text for piece in first.pieces).startswith("<|im_start|>user\nThe quick?<|im_end|>")


def test_a_packed_row_shows_each_example(tmp_path: Path, model: Model, examples: list[Example]) -> None:
    rows = [examples[:2], [examples[2]], [examples[2]]]
    artifact = written(tmp_path / "data", rows, model.encoder.files.hash)
    seen = inspect_tokens(artifact, "data", model, FIT, [0, 2])
    assert [side.role for side in seen.shown[0].sides] == [
        "completion of example 1", "completion of example 2",
    ]  # fmt: skip
    assert (seen.rows, seen.statistics.equal) == (3, 1)
    assert (seen.training.usable, seen.training.examples) == (4, 4)


def test_another_template_is_remarked(tmp_path: Path, model: Model, examples: list[Example]) -> None:
    fingerprint = model.encoder.fingerprint()
    assert fingerprint is not None
    for name, template, remarked in (
        ("a", "0" * 64, True),
        ("b", fingerprint.tokens, False),
        ("c", None, False),
    ):
        artifact = written(tmp_path / name, [[each] for each in examples], model.encoder.files.hash, template)
        remarks = inspect_tokens(artifact, "data", model, FIT, [0]).model.remarks
        assert any("another chat template (000000000000)" in each.message for each in remarks) is remarked


def test_truncation_of_tokens(tmp_path: Path, model: Model, examples: list[Example]) -> None:
    artifact = written(tmp_path / "data", [[each] for each in examples], model.encoder.files.hash)
    seen = inspect_tokens(artifact, "data", model, Fit("train.sft", 40, "keep_start"), [2])
    assert seen.training.truncated == 1
    assert seen.shown[0].sides[0].counts["tokens"] == 40
    dropped = inspect_tokens(artifact, "data", model, Fit("train.sft", 40, "drop"), [2])
    assert dropped.training.dropped == {"longer than 40 tokens": Kept(1, (3,))}
    assert "longer than 40 tokens" in str(dropped.shown[0].dropped)


def test_another_tokenizer_is_refused(tmp_path: Path, model: Model, examples: list[Example]) -> None:
    artifact = written(tmp_path / "data", [[each] for each in examples], "0" * 64)
    with pytest.raises(DataError, match="another tokenizer"):
        inspect_tokens(artifact, "data", model, FIT, [0])
