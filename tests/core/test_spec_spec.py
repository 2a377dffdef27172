"""The spec: every problem at once, with places; defaults merged; one snapshot for YAML and Python."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from posttrain.errors import SpecError
from posttrain.planning.parsing import parse, resolved, snapshot, spec_digest
from posttrain.planning.problems import SpecProblems
from posttrain.planning.references import Ref
from posttrain.planning.source import Source, problem_at, read
from posttrain.planning.spec import PipelineSpec, Resources, StageDefaults, StageSpec

TEXT = """\
plugins: [./rewards.py]
defaults: {train.*: {resources: {gpus: 1}}}
stages:
  base: {uses: model.load, with: {id: org/m, revision: 3f2c}}
  chats: {uses: data.load, with: {path: chats.jsonl, split: {test: 0.05}}}
  sft: {uses: train.sft, inputs: {model: base, data: chats.train}, with: {learning_rate: 2e-5}}
  pairs: {uses: data.best_of_n, inputs: {model: sft, prompts: chats.train}, with: {reward: exact, n: 4}}
  dpo:
    uses: train.dpo
    inputs: {model: sft, data: pairs}
    matrix: {seed: [0, 1, 2]}
    with: {loss: {name: sigmoid, beta: 0.1}}
  eval: {uses: evaluate, inputs: {models: [sft, "dpo[*]"], data: chats.test}}
  gate: {uses: gate, inputs: {report: eval, candidate: "dpo[seed=1].model", baseline: sft}, needs: [pairs]}
"""


def of(text: str) -> PipelineSpec:
    return parse(read(text, "p.yaml"))


def problems(text: str) -> str:
    with pytest.raises(SpecProblems) as caught:
        of(text)
    return str(caught.value)


def stage(rest: str) -> str:
    others = "  a: {uses: x.y}\n  m: {uses: x.y, matrix: {seed: [0, 1]}}\n"
    return f"stages:\n{others}  b: {{uses: x.z, {rest}}}\n"


@pytest.mark.parametrize("name", ["a\\0b.py", "a\\nb.py", "a\\u009bb.py"])
def test_names_that_no_file_has_are_refused(name: str) -> None:
    found = problems(f'plugins: [a.py, "{name}"]\nstages: {{a: {{uses: x.y}}}}')
    assert "p.yaml:1:17: this cannot be the name of a file" in found and found.isascii()
    found = problems(f'stages: {{a: {{uses: x.y, runtime: {{python: "{name}"}}}}}}')
    assert "this cannot be the name of a file" in found


def test_a_variable_of_the_environment_holds_no_nul() -> None:
    found = problems('stages: {a: {uses: x.y, runtime: {env: {MODE: "a\\0b"}}}}')
    assert "this holds a NUL character" in found and "p.yaml:1:" in found
    of('stages: {a: {uses: x.y, runtime: {env: {MODE: "two\\nlines"}}}}')


def test_the_example_of_the_design_is_valid() -> None:
    spec = of(TEXT)
    assert spec.stages["dpo"].matrix == {"seed": [0, 1, 2]}
    assert [str(ref) for _, ref in spec.stages["eval"].references()] == ["sft", "dpo[*]", "chats.test"]
    assert resolved(spec).spec.stages["sft"].resources.gpus == 1
    assert resolved(spec).spec.stages["eval"].resources.gpus == 0


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("sft", Ref("sft")),
        ("chats.train", Ref("chats", None, "train")),
        ("dpo[*]", Ref("dpo", "*")),
        ("dpo[*].model", Ref("dpo", "*", "model")),
        ("dpo[seed=1]", Ref("dpo", {"seed": "1"})),
        ("dpo[seed=1, loss.beta=1e-1].model", Ref("dpo", {"seed": "1", "loss.beta": "0.1"}, "model")),
        ("dpo[flag=True]", Ref("dpo", {"flag": "true"})),
    ],
)
def test_references(text: str, ref: Ref) -> None:
    assert Ref.parse(text) == ref
    assert Ref.parse(str(ref)) == ref


@pytest.mark.parametrize(
    "text", ["", "1a", "a.", ".a", "a[]", "a[x]", "a[x=]", "a[x=1,x=2]", "a.b.c", "a b", "a[*", "a[x=.inf]"]
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(SpecError):
        Ref.parse(text)


def test_a_selection_compares_as_nodes_are_named() -> None:
    ref = Ref.parse("dpo[seed=1,flag=true]")
    assert ref.selects({"seed": 1, "flag": True})
    assert not ref.selects({"seed": 2, "flag": True})
    assert not ref.selects({"seed": 1})
    assert Ref.parse("dpo[*]").selects({"seed": 5})


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        (stage("input: {model: a}"), "p.yaml:4:18", "did you mean `inputs`?"),
        (stage("wiht: {x: 1}"), "p.yaml:4:18", "did you mean `with`?"),
        (stage("with_: {x: 1}"), "p.yaml:4:18", "unknown key `with_`"),
        (stage("gpus: 1"), "p.yaml:4:18", "under `resources`"),
        (stage("depends_on: [a]"), "p.yaml:4:18", "`needs`"),
        ("stages: {a: {use: x}}", "p.yaml:1:14", "did you mean `uses`?"),
        ("stages: {a: {use: x}}", "p.yaml:1:10", "`uses` is missing"),
        ("stagse: {}\n", "p.yaml:1:1", "did you mean `stages`?"),
        ("stages: {}", "p.yaml:1:9", "stages"),
        ("stages: [a]", "p.yaml:1:9", "expected: a mapping"),
        ("[a]", "p.yaml:1:1", "a mapping"),
        ("stages: {a: }", "p.yaml:1:12", "found: nothing"),
        ("stages: {1a: {uses: x}}", "p.yaml:1:10", "`1a` cannot be a name here"),
        ("stages: {a: {uses: 3}}", "p.yaml:1:20", 'quote it: "3"'),
        (stage("needs: [aa]"), "p.yaml:4:26", "did you mean `a`?"),
        (stage("needs: [b]"), "p.yaml:4:26", "depends on itself"),
        (stage("needs: [a, a]"), "p.yaml:4:29", "twice"),
        (stage("inputs: {x: c.y}"), "p.yaml:4:30", "there is no stage `c`"),
        (stage("inputs: {x: [a, 'a b']}"), "p.yaml:4:34", "no reference"),
        (stage("inputs: {x: []}"), "p.yaml:4:30", "connected to nothing"),
        (stage("inputs: {x: 3}"), "p.yaml:4:30", "no reference"),
        (stage("inputs: {x: 'a[*]'}"), "p.yaml:4:30", "no matrix"),
        (stage("inputs: {x: 'm[sed=1]'}"), "p.yaml:4:30", "did you mean `seed`?"),
        (stage("inputs: {x: 'm[seed=7]'}"), "p.yaml:4:30", "one of 0, 1"),
        (stage("matrix: {seed: []}"), "p.yaml:4:33", "the list of its values"),
        (stage("matrix: {seed: 1}"), "p.yaml:4:33", "the list of its values"),
        (stage("matrix: {seed: [1, [2]]}"), "p.yaml:4:37", "a scalar"),
        (stage("matrix: {seed: [1, 1]}"), "p.yaml:4:37", "twice"),
        (stage("matrix: {seed: [1, '1']}"), "p.yaml:4:37", "twice"),
        (stage("matrix: {x: ['a,b']}"), "p.yaml:4:31", "part of a node's name"),
        (stage("matrix: {x..y: [1]}"), "p.yaml:4:33", "no option"),
        (stage("matrix: {l.b: [1]}, with: {l: {b: 2}}"), "p.yaml:4:49", "under `with` and under `matrix`"),
        (stage("resources: {cpus: 0}"), "p.yaml:4:36", "greater than or equal to 1"),
        (stage("resources: {gpus: true}"), "p.yaml:4:36", "a whole number"),
        (stage("resources: {memory: 8 gigs}"), "p.yaml:4:38", "8 gigs"),
        (stage("resources: {gpu: 1}"), "p.yaml:4:30", "did you mean `gpus`?"),
        (stage("runtime: {env: {OMP_NUM_THREADS: 1}}"), "p.yaml:4:51", 'quote it: "1"'),
        ("defaults: {tran.*: {}}\n" + stage("needs: [a]"), "p.yaml:1:12", "match no stage"),
        ("plugins: [a.py, a.py]\n" + stage("needs: [a]"), "p.yaml:1:17", "twice"),
    ],
)
def test_problems_have_a_place_and_a_way_out(text: str, where: str, says: str) -> None:
    report = problems(text)
    assert f"{where}: " in report
    assert says in report


def test_all_problems_come_together_in_the_order_of_the_file() -> None:
    report = problems(
        "stages:\n  a: {uses: x, needs: [zz]}\n  b: {use: x}\n  c: {uses: x, matrix: {s: []}}\nplugin: []\n"
    )
    places = [line.split(": ")[0] for line in report.splitlines() if line.startswith("p.yaml")]
    assert places == ["p.yaml:2:24", "p.yaml:3:3", "p.yaml:3:7", "p.yaml:4:28", "p.yaml:5:1"]


def test_at_most_twenty_are_shown() -> None:
    stages = "".join(f"  s{n}: {{uses: x, needs: [nowhere]}}\n" for n in range(30))
    report = problems("stages:\n" + stages)
    assert report.count("there is no stage") == 20
    assert report.endswith("… and 10 more")


def test_problems_survive_pickling_and_become_json() -> None:
    with pytest.raises(SpecProblems) as caught:
        of("stages: {a: {use: x}}")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert len(caught.value.as_dict()["problems"]) == 2


@pytest.mark.parametrize(
    "place",
    [
        "with: {api_key: VALUE}",
        "with: {a: [{hub_token: VALUE}]}",
        "runtime: {env: {HF_TOKEN: VALUE}}",
        "matrix: {password: [VALUE]}",
        "inputs: {x: [VALUE]}",
        "resources: {memory: VALUE}",
    ],
)
def test_a_secret_is_refused_and_never_repeated(place: str) -> None:
    canary = "hf_" + "c4naryC4NARY" * 3
    report = problems(stage(place.replace("VALUE", canary)))
    assert canary not in report
    assert canary[3:15] not in report


def test_references_to_secrets_are_kept() -> None:
    spec = of(stage("with: {api_key: env:KEY, eos_token: <|end|>}, runtime: {env: {HF_TOKEN: env:HF_TOKEN}}"))
    assert snapshot(spec)["stages"]["b"]["with"]["api_key"] == "env:KEY"


LAYERED = """\
defaults:
  "*": {with: {seed: 1, loss: {name: sigmoid, beta: 0.2}}, resources: {cpus: 2}, runtime: {env: {A: x}}}
  train.*: {with: {optim: {lr: 1, eps: 2}, seed: 2}, resources: {gpus: 1}}
stages:
  same: {uses: train.dpo, with: {loss: {name: sigmoid, tau: 1}, optim: {lr: 3}}, runtime: {env: {B: y}}}
  bare: {uses: train.dpo, with: {loss: sigmoid}}
  other: {uses: train.dpo, with: {loss: {name: hinge}, seed: null}, resources: {cpus: null}}
  plain: {uses: data.load}
"""


def test_defaults_are_merged_deeply_and_components_replaced() -> None:
    stages = resolved(of(LAYERED)).spec.stages
    assert stages["same"].with_ == {
        "seed": 2,
        "loss": {"name": "sigmoid", "beta": 0.2, "tau": 1},
        "optim": {"lr": 3, "eps": 2},
    }
    assert stages["bare"].with_["loss"] == {"name": "sigmoid", "beta": 0.2}
    assert stages["other"].with_["loss"] == {"name": "hinge"}
    assert stages["other"].with_["seed"] is None
    assert stages["plain"].with_ == {"seed": 1, "loss": {"name": "sigmoid", "beta": 0.2}}
    assert stages["same"].resources == Resources(cpus=2, gpus=1)
    assert stages["other"].resources == Resources(cpus=None, gpus=1)
    assert stages["same"].runtime.env == {"A": "x", "B": "y"}


@pytest.mark.parametrize(
    ("path", "line", "key", "value"),
    [
        (("same", "with", "seed"), 3, "seed: ", "2"),
        (("same", "with", "loss", "beta"), 2, "beta: ", "0.2"),
        (("same", "with", "loss", "tau"), 5, "tau: ", "1"),
        (("same", "with", "optim", "lr"), 5, "lr: ", "3"),
        (("same", "with", "optim", "eps"), 3, "eps: ", "2"),
        (("other", "with", "loss", "name"), 7, "name: ", "hinge"),
        (("plain", "with", "seed"), 2, "seed: ", "1"),
        (("same", "with", "missing"), 5, "", "with: {loss"),
        (("plain", "with", "missing"), 8, "", "plain:"),
        (("same", "runtime", "env", "A"), 2, "A: ", "x"),
    ],
)
def test_every_option_knows_where_it_was_written(
    path: tuple[str, ...], line: int, key: str, value: str
) -> None:
    column = LAYERED.splitlines()[line - 1].index(key + value) + len(key) + 1
    where = f"p.yaml:{line}:{column}"
    source = read(LAYERED, "p.yaml")
    merged = resolved(parse(source), source)
    assert str(merged.position(("stages", *path))) == where
    assert problem_at(merged, ("stages", *path), "bad").where == where


def python_built() -> PipelineSpec:
    return PipelineSpec(
        plugins=["./rewards.py"],
        defaults={"train.*": StageDefaults(resources=Resources(gpus=1))},
        stages={
            "gate": StageSpec(
                uses="gate",
                inputs={"baseline": "sft", "report": "eval", "candidate": "dpo[seed=1].model"},
                needs=["pairs"],
            ),
            "base": StageSpec(uses="model.load", with_={"revision": "3f2c", "id": "org/m"}),
            "chats": StageSpec(uses="data.load", with_={"path": "chats.jsonl", "split": {"test": 0.05}}),
            "sft": StageSpec(
                uses="train.sft",
                inputs={"model": "base", "data": "chats.train"},
                with_={"learning_rate": 2e-5},
            ),
            "pairs": StageSpec(
                uses="data.best_of_n",
                inputs={"model": "sft", "prompts": "chats.train"},
                with_={"reward": "exact", "n": 4},
            ),
            "dpo": StageSpec(
                uses="train.dpo",
                inputs={"model": "sft", "data": "pairs"},
                matrix={"seed": [0, 1, 2]},
                with_={"loss": {"name": "sigmoid", "beta": 0.1}},
            ),
            "eval": StageSpec(uses="evaluate", inputs={"models": ["sft", "dpo[*]"], "data": "chats.test"}),
        },
    )


def test_yaml_and_python_have_one_digest() -> None:
    spec = of(TEXT)
    assert snapshot(python_built()) == snapshot(spec)
    assert spec_digest(python_built()) == spec_digest(spec)
    assert list(snapshot(spec)) == sorted(snapshot(spec))


def test_the_digest_sees_meaning_only() -> None:
    spec = of(TEXT)
    written_out = TEXT.replace("defaults: {train.*: {resources: {gpus: 1}}}\n", "")
    written_out = written_out.replace("uses: train.dpo", "uses: train.dpo\n    resources: {gpus: 1}")
    written_out = written_out.replace("{uses: train.sft,", "{uses: train.sft, resources: {gpus: 1},")
    assert spec_digest(of("# a comment\n" + written_out)) == spec_digest(spec)
    assert spec_digest(resolved(spec).spec) == spec_digest(spec)
    assert spec_digest(of(TEXT.replace("beta: 0.1", "beta: 0.2"))) != spec_digest(spec)


def test_python_problems_name_key_paths() -> None:
    spec = PipelineSpec(stages={"a": StageSpec(uses="x", needs=["b"])})
    with pytest.raises(SpecProblems, match=r"stages\.a\.needs\.0: there is no stage `b`"):
        resolved(spec)
    with pytest.raises(SpecProblems, match=r"stages\.a\.wiht: unknown key"):
        parse(Source("pipeline", {"stages": {"a": {"uses": "x", "wiht": {}}}}))


def test_python_values_must_be_plain_and_secrets_are_hidden() -> None:
    assert StageSpec(uses="x", with_={"a": (1, 2)}).with_ == {"a": [1, 2]}
    for value in (object(), {1, 2}, float("nan"), b"x", {1: 2}):
        with pytest.raises(ValidationError):
            StageSpec(uses="x", with_={"a": value})
    with pytest.raises(ValidationError) as caught:
        StageSpec(uses="x", with_={"api_key": "s3cr3t-value"})
    assert "s3cr3t" not in str(caught.value)


def test_memory_in_bytes() -> None:
    assert Resources(memory="8GiB").memory_bytes == 8 * 2**30
    assert Resources(memory="512 MiB").memory_bytes == 512 * 2**20
    assert Resources().memory_bytes is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    ["stages", "defaults", "name", "plugins", "a", "uses", "with", "inputs", "matrix", "needs"]
)
_SPECS = st.dictionaries(
    _KEYS, st.dictionaries(_KEYS, st.dictionaries(_KEYS, _JSON, max_size=4) | _JSON) | _JSON
)


@given(_SPECS)
def test_any_data_gives_a_spec_or_problems(data: object) -> None:
    try:
        snapshot(parse(Source("pipeline", data)))
    except SpecProblems as error:
        assert str(error)
