"""`--set`."""

from __future__ import annotations

import pytest

from posttrain.errors import SpecError
from posttrain.planning.overrides import apply, override
from posttrain.planning.parsing import parse, resolved
from posttrain.planning.problems import SpecProblems
from posttrain.planning.source import read

TEXT = """\
defaults: {train.*: {with: {epochs: 3}}}
stages:
  sft: {uses: train.sft, with: {learning_rate: 2e-5, epochs: 5}}
  dpo:
    uses: train.dpo
    inputs: {model: sft, data: [sft, sft]}
    matrix: {seed: [0, 1], loss.beta: [0.1, 0.2]}
    with: {loss: sigmoid, rate: null}
"""


def data() -> dict:
    return read(TEXT, "p.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("no", "no"),
        ("010", 10),
        ("null", None),
        ('""', ""),
        ("[1, 2]", [1, 2]),
        ("{name: hinge, beta: 1}", {"name": "hinge", "beta": 1}),
        ("a: b", "a: b"),
        ("#fff", "#fff"),
        ("'1'", "1"),
        ("a=b", "a=b"),
        ("*x", "*x"),
        (" 5 ", 5),
    ],
)
def test_values_are_scalars_or_flow_collections(text: str, value: object) -> None:
    found = apply(data(), [f"stages.sft.with.x={text}"])[0]["stages"]["sft"]["with"]["x"]
    assert found == value
    assert type(found) is type(value)


def test_the_given_data_is_not_changed() -> None:
    original = data()
    apply(original, ["stages.sft.with.epochs=1", "stages.dpo.with.loss.beta=1"])
    assert original == data()


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (
            "stages.dpo.with.loss.beta=0.2",
            ("stages", "dpo", "with", "loss"),
            {"name": "sigmoid", "beta": 0.2},
        ),
        ("stages.dpo.with.rate.warmup=1", ("stages", "dpo", "with", "rate"), {"warmup": 1}),
        ("stages.dpo.with.new.deep.key=1", ("stages", "dpo", "with", "new"), {"deep": {"key": 1}}),
        ("stages.dpo.matrix.seed.0=7", ("stages", "dpo", "matrix", "seed"), [7, 1]),
        ("stages.dpo.matrix.loss.beta=[1]", ("stages", "dpo", "matrix", "loss.beta"), [1]),
        ("stages.dpo.matrix.loss.beta.1=3", ("stages", "dpo", "matrix", "loss.beta"), [0.1, 3]),
        ("stages.dpo.matrix.loss.tau=[3]", ("stages", "dpo", "matrix", "loss.tau"), [3]),
        ("defaults.train.*.with.epochs=9", ("defaults", "train.*", "with", "epochs"), 9),
        ('defaults."train.*".with.epochs=9', ("defaults", "train.*", "with", "epochs"), 9),
        ("defaults.data.*.resources.cpus=2", ("defaults", "data.*", "resources", "cpus"), 2),
        ("name=run", ("name",), "run"),
    ],
)
def test_paths(text: str, path: tuple, value: object) -> None:
    result, _ = apply(data(), [text])
    for part in path:
        result = result[part]
    assert result == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages.dop.with.x=1", "did you mean `dpo`"),
        ("stage.dpo.with.x=1", "did you mean `stages`"),
        ("stages.dpo.uses.x=1", "nothing below it"),
        ("stages.sft.with.epochs.x=1", "nothing below it"),
        ("stages.dpo.inputs.data.5=sft", "from 0 to 1"),
        ("stages.dpo.inputs.data.x=sft", "from 0 to 1"),
        ("stages.dpo.with.x", "KEY.PATH=VALUE"),
        ("=1", "KEY.PATH=VALUE"),
        ("stages..x=1", "KEY.PATH=VALUE"),
        ("stages.dpo.with.x=", "no value"),
        ("stages.dpo.with.x=[1", "this is not YAML"),
        ("stages.dpo.with.x=.inf", "not finite"),
        ("stages.dpo.with.x='a': 1", "no scalar"),
    ],
)
def test_refusals(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        apply(data(), [text])
    assert says in str(caught.value)
    assert str(caught.value.where).startswith("--set")


def test_an_override_wins_also_when_it_equals_the_default() -> None:
    source = override(read(TEXT, "p.yaml"), ["stages.sft.with.epochs=3"])
    merged = resolved(parse(source), source)
    assert merged.spec.stages["sft"].with_["epochs"] == 3
    assert str(merged.position(("stages", "sft", "with", "epochs"))) == "--set stages.sft.with.epochs"
    file = resolved(parse(read(TEXT, "p.yaml")))
    assert (file.spec.stages["sft"].with_["epochs"], file.spec.stages["dpo"].with_["epochs"]) == (5, 3)


def test_the_last_override_wins_and_gives_the_place() -> None:
    result, origins = apply(data(), ["stages.dpo.with.loss.beta=1", "stages.dpo.with.loss=hinge"])
    assert result["stages"]["dpo"]["with"]["loss"] == "hinge"
    assert list(map(str, origins.values())) == ["--set stages.dpo.with.loss"]


def test_problems_name_the_override_and_not_a_secret() -> None:
    source = override(read(TEXT, "p.yaml"), ["stages.dpo.wiht.x=1", "stages.sft.with.api_key=s3cr3t-value"])
    with pytest.raises(SpecProblems) as caught:
        parse(source)
    assert "--set stages.dpo.wiht.x: unknown key `wiht`" in str(caught.value)
    assert "did you mean `with`?" in str(caught.value)
    assert "--set stages.sft.with.api_key" in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_an_override_inside_a_list_gives_the_place() -> None:
    source = override(read(TEXT, "p.yaml"), ["stages.dpo.inputs.data.1=stf"])
    with pytest.raises(SpecProblems) as caught:
        parse(source)
    assert str(caught.value).startswith("--set stages.dpo.inputs.data.1: there is no stage `stf`")
    assert "did you mean `sft`?" in str(caught.value)
