"""Facts about conversations and weights that are read from files alone, on models changed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import HEADERS_AND_DATE
from helpers.models import END_ID, save_tiny_model
from safetensors.torch import load_file, save_file

from posttrain.artifacts.kinds import PolicyFacts
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.dialogue import forget_overruled
from posttrain_plugins.models.weights import missing, shape_of

UNOPENED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
REASONED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def made(directory: Path, **options: Any) -> Path:
    directory.mkdir(exist_ok=True)
    save_tiny_model(directory, **options)
    return directory


def patch(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def test_a_sound_model(tmp_path: Path) -> None:
    facts = facts_of(made(tmp_path / "m"))
    assert facts.overruled == () and facts.missing == ()
    assert (facts.opens, facts.bos_twice) == (True, False)
    assert facts.end_of_turn == END_ID and facts.declared_eos == (END_ID,)


@pytest.mark.parametrize(
    ("template", "opens"), [(UNOPENED, False), (INSTRUCT, True), (REASONED, True), (None, None)]
)
def test_whether_a_generation_prompt_leads_up_to_an_answer(
    tmp_path: Path, template: str | None, opens: bool | None
) -> None:
    assert facts_of(made(tmp_path / "m", template=template)).opens is opens


def test_templates_that_are_overruled(tmp_path: Path) -> None:
    directory = made(tmp_path / "m")
    own = (directory / "chat_template.jinja").read_text()
    patch(directory / "tokenizer_config.json", chat_template=own + "\n")
    assert facts_of(directory).overruled == (), "white space at the end is no other template"
    patch(directory / "tokenizer_config.json", chat_template=[{"name": "default", "template": INSTRUCT}])
    patch(directory / "chat_template.json", chat_template=UNOPENED)
    assert facts_of(directory).overruled == ("chat_template.json", "tokenizer_config.json")
    kept = json.loads((directory / "tokenizer_config.json").read_text())
    forget_overruled(directory)
    assert facts_of(directory).overruled == ()
    assert json.loads((directory / "tokenizer_config.json").read_text()) == {
        key: value for key, value in kept.items() if key != "chat_template"
    }


def test_bos_from_both(tmp_path: Path) -> None:
    directory = made(tmp_path / "m", template="{{ bos_token }}" + UNOPENED)
    patch(directory / "tokenizer_config.json", bos_token="a", add_bos_token=True)
    assert facts_of(directory).bos_twice is True
    patch(directory / "tokenizer_config.json", bos_token="a", add_bos_token=False)
    assert facts_of(directory).bos_twice is False


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([7, 5], 9, (5, 7)),
        (6, 9, (6,)),
        (None, 9, (9,)),
        (None, None, (END_ID,)),
    ],
)
def test_what_other_tools_stop_at(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    directory = made(tmp_path / "m")
    patch(directory / "generation_config.json", eos_token_id=generation)
    patch(directory / "config.json", eos_token_id=config)
    assert facts_of(directory).declared_eos == expected


def reweighted(directory: Path, change: Any) -> PolicyFacts:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)
    return facts_of(directory)


def test_weights_that_are_missing(tmp_path: Path) -> None:
    directory = made(tmp_path / "m", tie_word_embeddings=False)
    assert facts_of(directory).missing == ()
    facts = reweighted(directory, lambda w: {name: each for name, each in w.items() if "lm_head" not in name})
    assert facts.missing == ("lm_head.weight",)
    facts = reweighted(directory, lambda w: {name: each for name, each in w.items() if ".0." not in name})
    assert facts.missing == ("layers.0", "lm_head.weight")
    facts = reweighted(made(tmp_path / "n"), lambda w: {f"module.{name}": each for name, each in w.items()})
    assert facts.missing is not None and facts.missing[0] == "model.embed_tokens.weight"


def test_heads_by_the_name_of_the_architecture() -> None:
    def lost(head: str, *names: str, **config: Any) -> tuple[str, ...]:
        return missing({"architectures": [head], **config}, names, None)

    assert lost("LlamaForSequenceClassification", "model.norm.weight") == ("score.weight",)
    assert lost("LlamaForSequenceClassification", "score.weight") == ()
    assert lost("LlamaForCausalLM", "model.norm.weight") == (), "tied, for all that is known"
    assert lost("LlamaForCausalLM", "model.norm.weight", tie_word_embeddings=False) == ("lm_head.weight",)
    assert lost("GPTNeoXForCausalLM", "embed_out.weight", tie_word_embeddings=False) == ()
    assert lost("SomethingNew", "model.norm.weight") == ()


def test_both_spellings_of_rotary_embeddings_are_one_shape() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_size": 8}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, "hidden_size": 8}
    assert shape_of(old) == shape_of(new) == {
        "hidden_size": 8, "rope.theta": 5e5, "rope.type": "linear", "rope.factor": 2.0
    }  # fmt: skip
    assert shape_of({"hidden_size": 8, "vocab_size": 9, "use_cache": True}) == {"hidden_size": 8}


def test_a_dated_template_has_facts_like_any(tmp_path: Path) -> None:
    facts = facts_of(made(tmp_path / "m", template=HEADERS_AND_DATE))
    assert facts.template is not None and facts.template.dated
