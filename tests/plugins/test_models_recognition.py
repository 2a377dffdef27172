"""What `model.load` takes a directory for, and that what commands copy out comes in again as what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.adapters import Bench
from helpers.contexts import configured
from helpers.judges import judge_artifact
from helpers.models import save_tiny_model
from helpers.planning import command
from helpers.stages import StageRun, contents, run_stage
from helpers.stores import commit
from helpers.training import model_artifact

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.contracts.registration import load_target
from posttrain.contracts.stage import Input
from posttrain.errors import DataError
from posttrain.planning.source import read
from posttrain_plugins.commands.train import _copy
from posttrain_plugins.evaluation.preferences import Preferences
from posttrain_plugins.models.load import Load
from posttrain_plugins.models.policy import open_policy
from posttrain_plugins.models.valued import open_valued
from posttrain_plugins.rewards.judging import JUDGE
from posttrain_plugins.trainers.reward import Reward

VALUED = (Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL)


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def stored(store: Store, made: Artifact) -> Artifact:
    return commit(store, contents(made.path), made.kind, made.facts)


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Store, Artifact]:
    """An adapter and its base in a store."""
    store = Store(tmp_path / ".posttrain")
    base = stored(store, model_artifact(tmp_path / "policy"))
    bench = Bench(base)
    return store, stored(store, bench.saved(tmp_path / "adapter", bench.fresh({"lora": {"r": 2}})))


def loaded(directory: Path, store: Store, **options: Any) -> StageRun:
    run = StageRun(directory, Load(), configured(Load(), **options), {})
    run.known = {each.digest: each for each in store.artifacts()}
    run.outcome = load_target(Load.target)(run)
    return run


def problem(path: Path, inputs: Any = None, **options: Any) -> str:
    (found,) = Load().check(configured(Load(), path=str(path), **options), inputs or {})
    return found.message


def test_an_adapter_that_was_copied_out_comes_in_again(
    tmp_path: Path, adapter: tuple[Store, Artifact]
) -> None:
    store, made = adapter
    out = tmp_path / "out"
    _copy(made.digest, store.workspace, out)
    config = configured(Load(), path=str(out))
    assert list(Load().check(config, {})) == []
    (port,) = Load().outputs(config)
    predicted = Load().predict(config, {})["model"]
    run = loaded(tmp_path / "run", store, path=str(out))
    kind, facts = run.described["model"]
    assert {kind, predicted.kind} == port.kinds == {Kind.ADAPTER}
    assert facts == made.facts == predicted.facts
    files = contents(run.output("model"))
    assert files == {name: data for name, data in contents(made.path).items() if name in files}
    again = Artifact(made.digest, made.manifest, run.output("model"))
    assert open_policy(again, run).base == store.get(str(made.facts.base))


def test_a_command_goes_on_with_an_adapter_that_was_copied_out(
    tmp_path: Path, adapter: tuple[Store, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = adapter
    monkeypatch.chdir(tmp_path)
    _copy(made.digest, store.workspace, tmp_path / "out")
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({**row, "prompt": text}) + "\n" for text in "abcd")
    )
    words = ("dpo", "--model", "out", "--dataset", "pairs.jsonl", "--max_steps", "1", "--print")
    told = command(*words)
    assert told.code == 0, told.err
    assert set(read(told.out, "printed").data["stages"]) == {"model", "data", "train"}
    elsewhere = command(*words, "--workspace", "other")
    assert elsewhere.code == 0, elsewhere.err
    stages = read(elsewhere.out, "printed").data["stages"]
    assert stages["base"]["uses"] == "store.load"
    assert stages["model"]["inputs"] == {"base": "base.artifact"}
    save_tiny_model(tmp_path / "plain")
    edited(tmp_path / "out" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "plain"))
    told = command(*words)
    assert told.code == 0, told.err
    assert read(told.out, "printed").data["stages"]["base"]["uses"] == "model.load"


def test_an_adapter_gets_what_its_directory_lacks_from_the_base_that_is_connected(
    tmp_path: Path, adapter: tuple[Store, Artifact]
) -> None:
    store, made = adapter
    base = store.get(str(made.facts.base))
    out = tmp_path / "foreign"
    out.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(made.path / name, out / name)
    edited(out / "adapter_config.json", base_model_name_or_path="acme/base")
    given = Input("base", base.kind, base.facts, base)
    config = configured(Load(), path=str(out))
    assert list(Load().check(config, {"base": [given]})) == []
    assert Load().predict(config, {"base": [given]})["model"].facts.base == base.digest
    run = run_stage(Load(), tmp_path / "run", {"base": [base]}, path=str(out))
    assert run.described["model"] == (Kind.ADAPTER, made.facts)


def test_what_is_said_of_an_adapter_whose_base_is_unknown(
    tmp_path: Path, adapter: tuple[Store, Artifact]
) -> None:
    _, made = adapter
    out = shutil.copytree(made.path, tmp_path / "out", copy_function=shutil.copyfile)
    for recorded, stage in (
        ("acme/base", "base: {uses: model.load, with: {id: acme/base}}"),
        (str(tmp_path), f"base: {{uses: model.load, with: {{path: {tmp_path}}}}}"),
        (None, "base: {uses: model.load, with: {path: DIRECTORY}}"),
    ):
        edited(out / "adapter_config.json", base_model_name_or_path=recorded)
        found = problem(out)
        assert "is not in the store" in found
        assert f"`{stage}`, and `inputs: {{base: base.model}}` here" in found
    edited(out / "adapter_config.json", base_model_name_or_path="f" * 64)
    with pytest.raises((DataError, KeyError)):
        loaded(tmp_path / "run", Store(tmp_path / "empty"), path=str(out))
    other = model_artifact(tmp_path / "other")
    given = {"base": [Input("base", other.kind, other.facts, other)]}
    assert "trained on another base" in problem(out, given)
    assert "leave `dtype` out" in problem(out, dtype="bfloat16")
    assert "a whole model, and no adapter" in problem(other.path, given)


@pytest.mark.parametrize("kind", VALUED)
def test_a_model_that_gives_numbers_comes_in_as_what_it_is(tmp_path: Path, kind: Kind) -> None:
    judge = judge_artifact(tmp_path, kind)
    run = run_stage(Load(), tmp_path / "run", path=str(judge.path))
    found, facts = run.described["model"]
    config = configured(Load(), path=str(judge.path))
    assert found is kind
    assert Load().outputs(config)[0].kinds == {kind}
    assert Load().predict(config, {})["model"].facts == facts == judge.facts
    assert facts.scores is not None
    assert contents(run.output("model")) == contents(judge.path)
    again = Artifact(judge.digest, judge.manifest, run.output("model"))
    assert open_valued(again, run, kind).model is not None
    assert "leave `dtype` out" in problem(judge.path, dtype="bfloat16")
    assert f"set `kind: {kind}`" in problem(judge.path, kind="model")


def test_every_port_for_reward_models_takes_it() -> None:
    ports = [Reward.inputs[0], JUDGE, *(port for port in Preferences.inputs if port.name == "models")]
    assert len(ports) == 3
    assert all(Kind.REWARD_MODEL in port.kinds for port in ports)


def test_a_classifier_of_several_classes_is_no_reward_model(tmp_path: Path) -> None:
    judge = judge_artifact(tmp_path)
    edited(judge.path / "config.json", id2label={"0": "bad", "1": "so", "2": "good"})
    assert "has a head with 1 output" in problem(judge.path)
    with pytest.raises(DataError, match="name a reward model"):
        run_stage(Load(), tmp_path / "run", path=str(judge.path))


def test_the_kind_may_be_said(tmp_path: Path) -> None:
    config = configured(Load(), id="acme/judge", revision="f" * 40, kind="reward-model")
    assert Load().outputs(config)[0].kinds == {Kind.REWARD_MODEL}
    save_tiny_model(tmp_path / "policy")
    assert "set `kind: model`" in problem(tmp_path / "policy", kind="reward-model")
