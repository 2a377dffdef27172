"""Rules about what changed on the way: a policy beside the one it was made from."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.sites import adapter, data, findings, policy, reward, site, summary

from posttrain.artifacts.kinds import TemplateFingerprint
from posttrain.contracts.rule import Rule, Site
from posttrain_plugins.handoffs.adapters import AdapterChanged, ReferenceOther
from posttrain_plugins.handoffs.lineage import generator_of, parent, trainings
from posttrain_plugins.handoffs.special_tokens import EndOfTurnUndeclared, EndsChanged, GenerationLost
from posttrain_plugins.handoffs.templates import (
    CallsUnshown,
    TemplateChanged,
    TemplateDated,
    TemplateOverruled,
    TemplateUnopened,
)
from posttrain_plugins.handoffs.tokenizers import EmbeddingsResized, TokenizerChanged
from posttrain_plugins.handoffs.weights import (
    DtypeNarrowed,
    HeadWrong,
    ShapeChanged,
    TrainingIdle,
    WeightsMissing,
)

ERROR, WARNING, NOTE = ("error", "predicted"), ("warning", "predicted"), ("note", "predicted")
VERIFIED = ("warning", "verified")


def fingerprint(text: str, dated: bool = False) -> TemplateFingerprint:
    return TemplateFingerprint(tokens=f"tokens of {text}", text=text, dated=dated)


def changed(before: dict[str, Any], after: dict[str, Any], make: Any = policy) -> Site:
    """A trainer whose policy went through a stage that handed it on."""
    between = site("alter", node="between", model=make("sft.model", **before))
    return site("train", between, model=make("between.model", **after), data=data())


CHANGES = [
    (TemplateChanged, {"template": fingerprint("a")}, {"template": fingerprint("b")}),
    (TemplateChanged, {"has_template": True}, {"has_template": False}),
    (EndsChanged, {"eos": (2, 3)}, {"eos": (3,)}),
    (GenerationLost, {"generation": {"eos_token_id": 2}}, {"generation": {"eos_token_id": 3}}),
    (GenerationLost, {"generation": {"top_p": 0.9, "eos_token_id": 2}}, {"generation": {"eos_token_id": 2}}),
    (TokenizerChanged, {"tokenizer": "a"}, {"tokenizer": "b"}),
    (EmbeddingsResized, {"embeddings": 64}, {"embeddings": 72}),
    (DtypeNarrowed, {"dtype": "float32"}, {"dtype": "bfloat16"}),
    (DtypeNarrowed, {"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn"}),
    (ShapeChanged, {"shape": {"rope.theta": 1e4, "width": 8}}, {"shape": {"rope.theta": 5e2}}),
]


@pytest.mark.parametrize(("rule", "before", "after"), CHANGES)
def test_what_changed_is_a_warning(rule: type[Rule], before: dict[str, Any], after: dict[str, Any]) -> None:
    assert summary(rule, changed(before, after)) == [WARNING]
    seen = [{**facts, "verified": True} for facts in (before, after)]
    assert summary(rule, changed(*seen)) == [VERIFIED]
    (found,) = findings(rule, changed(before, after))
    assert (found.port, found.fix) == ("model", rule.fix)
    assert "between.model" in found.message and "sft.model" in found.message


@pytest.mark.parametrize(("rule", "before", "after"), CHANGES)
def test_what_stayed_or_is_not_known_is_not(
    rule: type[Rule], before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert summary(rule, changed(before, before)) == summary(rule, changed(after, after)) == []
    assert summary(rule, changed({}, after)) == summary(rule, changed(before, {})) == []
    alone = site("train", model=policy(**after), data=data())
    assert summary(rule, alone) == [], "there is nothing to compare with"


def test_more_of_a_thing_is_no_loss() -> None:
    assert summary(EndsChanged, changed({"eos": (3,)}, {"eos": (2, 3)})) == []
    assert summary(DtypeNarrowed, changed({"dtype": "bfloat16"}, {"dtype": "float32"})) == []
    assert summary(DtypeNarrowed, changed({"dtype": "bfloat16"}, {"dtype": "float16"})) == []
    single = {"shape": {"eps": 9.999999747378752e-06, "act": "silu"}}
    assert summary(ShapeChanged, changed({"shape": {"eps": 1e-5, "act": "silu"}}, single)) == []
    more = {"generation": {"eos_token_id": 2, "top_p": 0.9}}
    assert summary(GenerationLost, changed({"generation": {"eos_token_id": 2}}, more)) == []


def test_a_generation_config_that_is_gone_is_only_known_of_artifacts() -> None:
    before = {"generation": {"eos_token_id": 2}}
    assert summary(GenerationLost, changed(before, {})) == []
    lost = changed({**before, "verified": True}, {"verified": True})
    (found,) = findings(GenerationLost, lost)
    assert "`eos_token_id`" in found.message


def test_an_adapter_in_16_bits_on_a_model_in_32_is_no_narrowing() -> None:
    between = site("train", node="between", model=policy("base.model", dtype="float32"), data=data())
    at = site("train", between, model=adapter("between.model", dtype="bfloat16"), data=data())
    assert summary(DtypeNarrowed, at) == []


def test_an_adapter_that_changed() -> None:
    before, after = ({"adapter": {"r": 8, "lora_alpha": alpha}} for alpha in (16, 128))
    (found,) = findings(AdapterChanged, changed(before, after, adapter))
    assert "`lora_alpha` 128 instead of 16" in found.message
    assert summary(AdapterChanged, changed(before, before, adapter)) == []
    new = site("train", node="between", model=policy("base.model"), data=data())
    assert summary(AdapterChanged, site("train", new, model=adapter("between.model", **after))) == []


def test_data_made_under_another_template() -> None:
    maker = site("sample", node="pairs", model=policy("a.model", template=fingerprint("a")), prompts=data())
    for own, expected in (("a", []), ("b", [WARNING])):
        reader = policy("b.model", template=fingerprint(own))
        assert (
            summary(TemplateChanged, site("train", maker, model=reader, data=data("pairs.data"))) == expected
        )


def test_templates_of_two_names_differ_before_they_are_read() -> None:
    def check(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str]]:
        return summary(TemplateChanged, changed(first, second))

    one, other = {"template_name": "chatml"}, {"template_name": "llama-3"}
    assert check(one, other) == [WARNING]
    assert check(one, one) == check(one, {}) == check(one, {"template": fingerprint("a")}) == []


def test_calls_that_the_template_leaves_out() -> None:
    def check(shows: bool | None, calls: bool | None, stage: str = "train") -> list[tuple[str, str]]:
        given = {"data": data(format="messages", calls=calls)}
        return summary(CallsUnshown, site(stage, model=policy(calls=shows), **given))

    assert check(False, True) == [WARNING]
    assert check(True, True) == check(None, True) == check(False, False) == check(False, None) == []


@pytest.mark.parametrize(
    ("rule", "facts", "level"),
    [
        (TemplateOverruled, {"overruled": ("tokenizer_config.json",)}, WARNING),
        (TemplateUnopened, {"opens": False}, WARNING),
        (TemplateDated, {"template": fingerprint("a", dated=True)}, NOTE),
        (EndOfTurnUndeclared, {"end_of_turn": 3, "declared_eos": (2,)}, WARNING),
        (WeightsMissing, {"missing": ("layers.1",)}, ERROR),
        (HeadWrong, {"head": "LlamaForSequenceClassification"}, ERROR),
    ],
)
def test_a_policy_by_itself(rule: type[Rule], facts: dict[str, Any], level: tuple[str, str]) -> None:
    assert summary(rule, site("train", model=policy(**facts), data=data())) == [level]
    sound = {"overruled": (), "opens": True, "template": fingerprint("a"), "end_of_turn": 3,
             "declared_eos": (2, 3), "missing": (), "head": "LlamaForCausalLM"}  # fmt: skip
    assert summary(rule, site("train", model=policy(**sound), data=data())) == []


def test_a_reward_model_without_its_head() -> None:
    lost = reward(missing=("score.weight",), head="LlamaForSequenceClassification")
    at = site("score", model=policy(), reward=lost)
    (found,) = findings(WeightsMissing, at)
    assert "score.weight" in found.message and found.port == "reward"
    assert summary(HeadWrong, at) == []
    assert summary(HeadWrong, site("score", model=policy(), reward=reward(head="LlamaForCausalLM"))) == [
        ERROR
    ]


def test_training_that_changed_nothing() -> None:
    def check(uses: str, after: str) -> list[tuple[str, str]]:
        before = policy("base.model", architecture="a", verified=True)
        maker = site(uses, node="sft", model=before, **({"data": data()} if uses == "train" else {}))
        return summary(
            TrainingIdle, site("train", maker, model=policy("sft.model", architecture=after, verified=True))
        )

    assert check("train", "a") == [VERIFIED]
    assert check("train", "b") == check("alter", "a") == [], "a stage that hands on may change nothing"


def test_a_reference_that_is_not_the_start() -> None:
    start, base = policy("sft.model"), policy("base.model")
    assert summary(ReferenceOther, site("train", model=start, reference=base)) == [WARNING]
    assert summary(ReferenceOther, site("train", model=start, reference=start)) == []
    twin = policy("copy.model", architecture="a", verified=True)
    same = policy("sft.model", architecture="a", verified=True)
    assert summary(ReferenceOther, site("train", model=same, reference=twin)) == [], "one artifact, two names"


def test_the_parent_is_the_policy_at_the_port_of_the_output_s_name() -> None:
    student, teacher = policy("base.model"), policy("big.model")
    maker = site("train", node="sft", model=student, teacher=teacher, data=data())
    at = site("train", maker, model=policy("sft.model"), data=data())
    assert parent(at, at.inputs["model"][0]) == student
    merged = site("judge", node="sft", candidate=student, baseline=teacher)
    assert parent(site("train", merged, model=policy("sft.model")), policy("sft.model")) is None
    assert parent(at, policy("unheard.model")) is None


def test_trainings_are_counted_back_to_the_first() -> None:
    first = site("train", node="first", model=policy("base.model"), data=data())
    between = site("alter", first, node="between", model=policy("first.model"))
    last = site("train", between, node="last", model=policy("between.model"), data=data())
    at = site("measure", last, models=policy("last.model"))
    assert [each.node for each in trainings(at, policy("last.model"))] == ["last", "first"]


def test_what_tokenizes_is_no_generator() -> None:
    sampled = site("sample", node="pairs", model=policy("sft.model"), prompts=data())
    tokens: dict[str, Any] = {"tokens": {"tokenizer": "a"}}
    tokenized = site(
        "sample", sampled, node="tokens", model=policy("other.model"), prompts=data("pairs.data")
    )
    given = data("tokens.data", **tokens)
    made = generator_of(site("train", tokenized, data=given), given)
    assert made is not None and made.policy.origin == "sft.model"


def test_a_mixture_has_a_generator_where_all_come_from_one() -> None:
    one, other = (
        site("sample", node=f"pairs{n}", model=policy(f"m{n}.model"), prompts=data()) for n in (1, 2)
    )
    mixed = site("split", one, other, node="mix", data=[data("pairs1.data"), data("pairs2.data")])
    given = data("mix.data")
    assert generator_of(site("train", mixed, data=given), given) is None, "of two policies it is neither's"
    half = site("split", one, node="mix", data=[data("pairs1.data"), data("load.data")])
    made = generator_of(site("train", half, data=given), given)
    assert made is not None and made.policy.origin == "m1.model"


def test_a_generator_whose_prompts_were_generated_is_the_one_that_answered() -> None:
    asked = site("sample", node="prompts", model=policy("asker.model"), prompts=data())
    answered = site("sample", asked, node="pairs", model=policy("sft.model"), prompts=data("prompts.data"))
    given = data("pairs.data")
    made = generator_of(site("train", answered, data=given), given)
    assert made is not None and made.policy.origin == "sft.model"
