"""Rules about what meets at one node: where each fires, where it does not, and where it cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.sites import adapter, data, findings, policy, real, reward, site, summary

from posttrain.artifacts.kinds import Kind, PolicyFacts, TemplateFingerprint
from posttrain.contracts.rule import Rule, Site
from posttrain_plugins.handoffs.adapters import AdapterBase
from posttrain_plugins.handoffs.datasets import DatasetFormat
from posttrain_plugins.handoffs.evaluations import Leakage
from posttrain_plugins.handoffs.preferences import OffPolicy
from posttrain_plugins.handoffs.special_tokens import (
    EndMissing,
    PadIsEnd,
    PadIsUnknown,
    PadMissing,
    TokenOutOfRange,
)
from posttrain_plugins.handoffs.templates import TemplateMissing, TemplatesDiffer
from posttrain_plugins.handoffs.tokenizers import (
    DataTokenizer,
    EmbeddingsShort,
    RewardTokenizer,
    TeacherVocabulary,
    TokenizersDiffer,
)

ERROR, WARNING, NOTE = ("error", "predicted"), ("warning", "predicted"), ("note", "predicted")
VERIFIED, UNKNOWN = ("error", "verified"), ("note", "unknown")
Expected = list[tuple[str, str]]


def test_dataset_format() -> None:
    def check(**facts: Any) -> Expected:
        return summary(DatasetFormat, site("measure", data=data(**facts)))

    assert check(format="prompt") == []
    assert check(format="text") == [ERROR]
    assert check(format="text", verified=True) == [VERIFIED]
    assert check() == [UNKNOWN]
    assert summary(DatasetFormat, site("split", data=data(format="text"))) == []
    (found,) = findings(DatasetFormat, site("measure", data=data(format="text")))
    assert (
        found.message
        == "chats.data has the format `text`, but `data` of measure takes `messages` or `prompt`"
    )
    assert found.port == "data"


def fingerprint(text: str) -> TemplateFingerprint:
    return TemplateFingerprint(tokens="t", text=text)


@pytest.mark.parametrize(
    ("has", "format", "expected"),
    [
        (False, "messages", [ERROR]),
        (True, "messages", []),
        (False, "prompt", [UNKNOWN]),
        (False, "text", []),
        (None, "messages", [UNKNOWN]),
        (False, None, [UNKNOWN]),
        (None, None, []),
        (None, "prompt", []),
    ],
)
@pytest.mark.parametrize("uses", ["train", "measure"])
def test_missing_template(uses: str, has: bool | None, format: str | None, expected: Expected) -> None:
    port = "model" if uses == "train" else "models"
    at = site(uses, **{port: policy(has_template=has), "data": data(format=format)})
    assert summary(TemplateMissing, at) == expected


@pytest.mark.parametrize("format", ["prompt", "prompt_completion", "preference"])
def test_conversations_in_any_format_need_a_template(format: str) -> None:
    def check(has: bool | None, turns: bool | None) -> Expected:
        given = data(format=format, conversational=turns)
        return summary(TemplateMissing, site("train", model=policy(has_template=has), data=given))

    assert check(False, True) == [ERROR]
    assert check(None, True) == [UNKNOWN]
    assert check(True, True) == check(False, False) == check(None, None) == []


def test_missing_template_is_verified_by_artifacts() -> None:
    at = site(
        "train", model=policy(has_template=False, verified=True), data=data(format="messages", verified=True)
    )
    assert summary(TemplateMissing, at) == [VERIFIED]


def test_templates_that_differ() -> None:
    one, same, other = (policy(f"m{i}.model", template=fingerprint(text)) for i, text in enumerate("aab"))
    none = policy("m3.model")
    assert (
        summary(TemplatesDiffer, site("measure", models=[one, same, none], data=data(format="prompt"))) == []
    )
    assert summary(TemplatesDiffer, site("measure", models=[one, other], data=data(format="prompt"))) == [
        WARNING
    ]
    assert summary(
        TemplatesDiffer, site("train", model=one, teacher=other, data=data(format="preference"))
    ) == [ERROR]
    assert summary(TemplatesDiffer, site("judge", candidate=one, baseline=other)) == []


def test_vocabulary_and_embeddings() -> None:
    def check(vocabulary: int | None, embeddings: int | None) -> Expected:
        given = policy(vocabulary=vocabulary, embeddings=embeddings)
        return summary(EmbeddingsShort, site("judge", candidate=given))

    assert check(101, 100) == [ERROR]
    assert check(100, 100) == check(100, 128) == check(None, 100) == check(101, None) == []
    idle = policy(vocabulary=101, reachable=100, embeddings=100)
    assert summary(EmbeddingsShort, site("judge", candidate=idle)) == [NOTE], "as Gemma 3 comes"
    used = policy(vocabulary=101, reachable=101, embeddings=100)
    assert summary(EmbeddingsShort, site("judge", candidate=used)) == [ERROR]
    short = reward(vocabulary=101, embeddings=100)
    assert summary(EmbeddingsShort, site("score", model=policy(), reward=short)) == [ERROR]


def test_tokenizers_that_differ() -> None:
    one, same, other = (policy(f"m{i}.model", tokenizer=text) for i, text in enumerate("aab"))
    assert summary(TokenizersDiffer, site("judge", candidate=one, baseline=same)) == []
    assert summary(TokenizersDiffer, site("judge", candidate=one, baseline=other)) == [WARNING]
    assert summary(TokenizersDiffer, site("measure", models=[one, same, other], data=data())) == [WARNING] * 2
    assert summary(TokenizersDiffer, site("judge", candidate=one, baseline=policy())) == []


def test_teacher_and_student_need_one_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = policy("a.model", tokenizer="a"), policy("b.model", tokenizer="b")
    at = site("train", model=one, teacher=other, data=data())
    assert summary(TeacherVocabulary, at) == [ERROR]
    assert summary(TokenizersDiffer, at) == []
    assert summary(TeacherVocabulary, site("judge", candidate=one, baseline=other)) == []
    monkeypatch.setattr(type(at.stage), "across_tokenizers", True, raising=False)
    assert summary(TeacherVocabulary, at) == []


def test_policy_and_reward_model_need_one_tokenizer() -> None:
    def check(uses: str, tokenizer: str | None) -> Expected:
        at = site(uses, model=policy(tokenizer="a"), reward=reward(tokenizer=tokenizer))
        return summary(RewardTokenizer, at)

    assert check("score", "b") == [WARNING]
    assert check("train", "b") == [ERROR]
    assert check("score", "a") == check("score", None) == []


def generated(by: Any, through_split: bool = False) -> tuple[Site, str]:
    """The site that hands on a dataset that `by` generated, and the dataset's origin."""
    made = site("sample", node="pairs", model=by, prompts=data())
    if not through_split:
        return made, "pairs.data"
    return site("split", made, node="half", data=data("pairs.data")), "half.data"


@pytest.mark.parametrize("through_split", [False, True])
def test_data_of_another_tokenizer(through_split: bool) -> None:
    made, origin = generated(policy("a.model", tokenizer="a"), through_split)
    for own, expected in (("a", []), ("b", [WARNING]), (None, [])):
        at = site("train", made, model=policy("b.model", tokenizer=own), data=data(origin))
        assert summary(DataTokenizer, at) == expected
        demonstrations = site("train-tokens", made, model=policy("b.model", tokenizer=own), data=data(origin))
        assert summary(DataTokenizer, demonstrations) == [NOTE] * len(expected), "a teacher's, most probably"


@pytest.mark.parametrize(
    ("rule", "facts", "expected"),
    [
        (EndMissing, {"eos": (3,)}, []),
        (EndMissing, {"eos": ()}, [ERROR]),
        (EndMissing, {}, [UNKNOWN]),
        (EndMissing, {"verified": True}, [VERIFIED]),
        (PadMissing, {"pad": 0, "verified": True}, []),
        (PadMissing, {}, []),
        (PadMissing, {"verified": True}, [("note", "verified")]),
        (PadIsEnd, {"eos": (2, 3), "pad": 3}, [NOTE]),
        (PadIsEnd, {"eos": (2, 3), "pad": 0}, []),
        (PadIsEnd, {"pad": 3}, []),
        (PadIsUnknown, {"pad": 0, "unk": 0}, [NOTE]),
        (PadIsUnknown, {"pad": 0, "unk": 1}, []),
        (PadIsUnknown, {"eos": (0,), "pad": 0, "unk": 0}, []),
        (TokenOutOfRange, {"eos": (3, 100), "vocabulary": 100, "embeddings": 128}, [ERROR]),
        (TokenOutOfRange, {"eos": (99,), "pad": 0, "vocabulary": 100, "embeddings": 128}, []),
        (TokenOutOfRange, {"pad": 128, "embeddings": 128}, [ERROR]),
        (TokenOutOfRange, {"bos": 500, "vocabulary": 100}, [ERROR]),
        (TokenOutOfRange, {"eos": (-1,), "vocabulary": 100}, [ERROR]),
        (TokenOutOfRange, {"eos": (500,), "bos": 7}, []),
    ],
)
def test_special_tokens(rule: type[Rule], facts: dict[str, Any], expected: Expected) -> None:
    assert summary(rule, site("train", model=policy(**facts), data=data())) == expected
    assert summary(rule, site("measure", models=policy(**facts), data=data())) == expected
    assert summary(rule, site("judge", candidate=policy(**facts))) == [], "nothing is trained or asked"


def digest(kind: Kind = Kind.MODEL, **facts: Any) -> str:
    return real(kind, PolicyFacts(**facts)).digest


SFT = {"architecture": "sft", "verified": True}


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (digest(architecture="sft"), []),
        (digest(architecture="other"), [("warning", "verified")]),
        (None, []),
    ],
)
def test_pairs_by_digest(by: str | None, expected: Expected) -> None:
    at = site("train", model=policy(**SFT), data=data(policy=by, verified=True))
    assert summary(OffPolicy, at) == expected
    token = site("train-tokens", model=policy(**SFT), data=data(policy=by, verified=True))
    assert summary(OffPolicy, token) == []


def test_off_policy_pairs_name_both_digests() -> None:
    other = digest(architecture="other")
    (found,) = findings(OffPolicy, site("train", model=policy(**SFT), data=data(policy=other, verified=True)))
    assert other[:12] in found.message
    assert digest(architecture="sft")[:12] in found.message


def test_an_adapter_is_its_own_reference_and_its_base_is_not() -> None:
    model = adapter(base="b" * 64, verified=True)
    own = data(policy=model.artifact.digest, verified=True)
    assert summary(OffPolicy, site("train", model=model, data=own)) == []
    (found,) = findings(OffPolicy, site("train", model=model, data=data(policy="b" * 64, verified=True)))
    assert (found.level, found.certainty) == ("warning", "verified")
    assert "generated by the policy bbbbbbbbbbbb" in found.message


@pytest.mark.parametrize("through_split", [False, True])
def test_pairs_by_origin_before_digests_are_known(through_split: bool) -> None:
    made, origin = generated(policy("sft.model"), through_split)
    assert summary(OffPolicy, site("train", made, model=policy("sft.model"), data=data(origin))) == []
    assert summary(OffPolicy, site("train", made, model=policy("base.model"), data=data(origin))) == [WARNING]
    human = site("load", node="chats")
    assert summary(OffPolicy, site("train", human, model=policy("base.model"), data=data("chats.data"))) == []


def test_pairs_of_the_model_that_an_adapter_was_trained_on() -> None:
    made, origin = generated(policy("base.model"))
    lora = site("train-tokens", node="lora", model=policy("base.model"), data=data())
    assert summary(OffPolicy, site("train", made, lora, model=adapter("lora.model"), data=data(origin))) == [
        WARNING
    ]
    made, origin = generated(adapter("lora.model"))
    assert summary(OffPolicy, site("train", made, lora, model=adapter("lora.model"), data=data(origin))) == []


def evaluation(test: Any, train: Any, uses: str = "measure") -> Site:
    trained = site("train", node="sft", model=policy("base.model"), data=train)
    port = "models" if uses == "measure" else "model"
    return site(
        uses, trained, **{port: policy("sft.model"), "data" if uses == "measure" else "prompts": test}
    )


def test_leakage() -> None:
    test = {"origin": "chats.test", "prompts": ["a", "b", "c", "d", "e"]}
    clean, leaky = ({"origin": "chats.train", "prompts": prompts} for prompts in (["x"], list("xabde")))
    assert summary(Leakage, evaluation(data(**test), data(**clean))) == []
    (found,) = findings(Leakage, evaluation(data(**test), data(**leaky)))
    assert (found.level, found.certainty) == ERROR
    assert found.message == (
        "4 of 5 evaluation prompts also occur in the training data of sft (chats.train), "
        "with the hashes a, b, d"
    )
    verified = evaluation(data(**test, verified=True), data(**leaky, verified=True))
    assert summary(Leakage, verified) == [VERIFIED]


def test_leakage_counts_earlier_prompts_of_what_was_trained_on_and_not_of_what_is_asked() -> None:
    asked, trained = {"origin": "chats.test"}, {"origin": "chats.train"}
    (found,) = findings(
        Leakage, evaluation(data(**asked, prompts=["a", "b"]), data(**trained, prompts=["x", "~a"]))
    )
    assert "1 of 2 evaluation prompts" in found.message
    assert "split_by: prompt" in str(found.fix)
    opening = data(**asked, prompts=["b", "~a"])
    assert summary(Leakage, evaluation(opening, data(**trained, prompts=["a"]))) == []


def test_plain_text_cannot_be_compared_with_prompts() -> None:
    def check(asked: str | None, trained: str | None) -> Expected:
        test = data("chats.test", prompts=["a"], format=asked)
        return summary(Leakage, evaluation(test, data("chats.train", prompts=["b"], format=trained)))

    assert check("prompt", "text") == check("text", "messages") == [UNKNOWN]
    assert check("text", "text") == check("prompt", "messages") == []


def test_leakage_is_unknown_until_both_sets_of_prompts_are_known() -> None:
    known, unknown = data("chats.test", prompts=["a"]), data("chats.test")
    assert summary(Leakage, evaluation(unknown, data("pairs.data", prompts=["a"]))) == [UNKNOWN]
    assert summary(Leakage, evaluation(known, data("pairs.data"))) == [UNKNOWN]
    assert summary(Leakage, evaluation(known, data("chats.test"))) == [ERROR], "the very same dataset"


def test_leakage_looks_at_every_ancestor_that_trains_and_at_nothing_else() -> None:
    sft = site("train", node="sft", model=policy("base.model"), data=data("chats.train", prompts=["a"]))
    dpo = site("train", sft, node="dpo", model=policy("sft.model"), data=data("chats.train", prompts=["a"]))
    at = site(
        "measure", dpo, models=[policy("dpo.model"), policy("base.model")], data=data("t.data", prompts=["a"])
    )
    (found,) = findings(Leakage, at)
    assert "the training data of dpo, sft (chats.train)" in found.message
    sampled, origin = generated(policy("base.model"))
    assert (
        summary(Leakage, evaluation(data("t.data", prompts=["a"]), data("x.data", prompts=["a"]), "sample"))
        == []
    )
    only_read = site("measure", sampled, models=policy("base.model"), data=data(origin, prompts=["a"]))
    assert summary(Leakage, only_read) == []


def test_adapter_and_base() -> None:
    base = policy("base.model", architecture="base", verified=True)
    own = digest(architecture="base")
    assert summary(AdapterBase, site("merge", adapter=adapter(base=own, verified=True), model=base)) == []
    assert summary(AdapterBase, site("merge", adapter=adapter(base="c" * 64, verified=True), model=base)) == [
        VERIFIED
    ]
    assert summary(AdapterBase, site("merge", adapter=adapter(), model=base)) == [UNKNOWN]
    compared = site("measure", models=[adapter(base="c" * 64, verified=True), base], data=data())
    assert summary(AdapterBase, compared) == []


def test_adapter_and_base_by_origin() -> None:
    lora = site("train", node="lora", model=policy("base.model"), data=data())
    assert (
        summary(AdapterBase, site("merge", lora, adapter=adapter("lora.model"), model=policy("base.model")))
        == []
    )
    (found,) = findings(
        AdapterBase, site("merge", lora, adapter=adapter("lora.model"), model=policy("other.model"))
    )
    assert (found.level, found.certainty) == ERROR
    assert found.message == "lora.model was trained on base.model, but is combined with other.model"
