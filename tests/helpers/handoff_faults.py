"""Failures at the hand-offs of SFT → DPO, each put into the lab's pipeline; and pipelines in which nothing is wrong.

`DOCUMENTED` are failures that were reported of other tools. `INVENTED` were written down before the rules were; what
that is worth, and what was changed since, stands in `docs/evidence/handoff-faults.md`. `FOR_RULES` were written for a
rule that neither list tries: that they are found says that the rule works, and nothing of what else would be found.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.foreign_stages import ZEPHYR
from helpers.handoff_lab import (
    SYSTEM,
    Lab,
    answer,
    base_model,
    demonstrations,
    preferences,
    questions,
    rows_of,
    user,
)

Apply = Callable[[Lab], None]


@dataclass(frozen=True)
class Fault:
    """One failure.

    Args:
        name: What it is called in the table.
        title: What goes wrong.
        apply: Puts it into a lab; None where the pipeline has no place for it.
        reason: Why it does not apply.
    """

    name: str
    title: str
    apply: Apply | None = None
    reason: str = ""


# Pieces


def on_policy(lab: Lab, by: str = "sft") -> None:
    """Let a policy of the pipeline make the pairs, instead of reading them."""
    lab.files["ask"] = [
        {"prompt": [SYSTEM, user(word)], "answer": answer(right)["content"]}
        for word, right, _ in rows_of(48, 1)
    ]
    del lab.stages["prefs"], lab.files["prefs"]
    lab.stages["ask"] = {"uses": "data.load", "with": {"path": "ask.jsonl"}}
    lab.stages["prefs"] = {
        "uses": "data.best_of_n",
        "inputs": {"model": by, "prompts": "ask"},
        "with": {"reward": "exact", "n": 6, "max_new_tokens": 16, "allow_ties": True},
    }


def adapters(lab: Lab) -> None:
    """Train an adapter, and go on training it."""
    lab.options("sft", lora={"r": 4})


def tokenized(lab: Lab, change: str | None = None, model: str = "base") -> None:
    """Tokenize the demonstrations ahead; a foreign stage may change what is learned."""
    lab.stages["tokens"] = {"uses": "data.tokenize", "inputs": {"data": "chats", "model": "base"}}
    source = "tokens"
    if change is not None:
        lab.stages["masked"] = {
            "uses": "foreign/mask",
            "inputs": {"data": "tokens", "model": model},
            "with": {"change": change},
        }
        source = "masked"
    lab.connect("sft", data=source)


def with_bos(lab: Lab) -> None:
    """Take a base model whose template prints BOS, and whose padding token is its end of turn."""
    shutil.rmtree(lab.model)
    shutil.copytree(base_model(bos=True), lab.model)


def map_rows(lab: Lab, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lab.files[name] = [change(row) for row in lab.files[name]]


def map_turns(lab: Lab, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    map_rows(lab, "chats", lambda row: {"messages": [change(turn) for turn in row["messages"]]})


def shifted(values: Sequence[Any]) -> list[Any]:
    return [*values[1:], values[0]]


# Documented failures


def _template_overruled(lab: Lab) -> None:
    lab.json("tokenizer_config.json", chat_template=ZEPHYR)


def _other_eos(lab: Lab) -> None:
    lab.json("tokenizer_config.json", eos_token="<|endoftext|>")
    lab.json("generation_config.json", eos_token_id=80)
    lab.json("config.json", eos_token_id=80)


def _pad_masked(lab: Lab) -> None:
    lab.json("tokenizer_config.json", pad_token="<|im_end|>")
    tokenized(lab, "padding ids masked")


def _double_bos(lab: Lab) -> None:
    with_bos(lab)
    tokenized(lab, "BOS added")


def _base_as_start(lab: Lab) -> None:
    adapters(lab)
    on_policy(lab)
    lab.connect("dpo", model="base")


def _zero_steps(lab: Lab) -> None:
    lab.stages["sft"]["uses"] = "foreign/idle"


def _eval_broken(lab: Lab) -> None:
    lab.options("eval", max_new_tokens=2, metrics=["exact_match"])


def _noise(lab: Lab) -> None:
    lab.files["test"] = questions(8)
    lab.options("gate", min_improvement=0.0)


def _contaminated(lab: Lab) -> None:
    lab.files["test"] = demonstrations(48)


def _stale_tokens(lab: Lab) -> None:
    tokenized(lab)
    lab.stages["altered"] = {
        "uses": "foreign/alter",
        "inputs": {"model": "base"},
        "with": {"change": "another template"},
    }
    lab.connect("sft", model="altered")


def _inverted(lab: Lab) -> None:
    map_rows(lab, "prefs", lambda row: {**row, "chosen": row["rejected"], "rejected": row["chosen"],
                                        "chosen_score": 0.0, "rejected_score": 1.0})  # fmt: skip


def _inverted_without_scores(lab: Lab) -> None:
    map_rows(
        lab,
        "prefs",
        lambda row: {"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]},
    )


def _drifted(lab: Lab) -> None:
    lab.drifted = True


def _altered(change: str, reader: str = "dpo", stage: str = "sft", lora: bool = False) -> Apply:
    def apply(lab: Lab) -> None:
        if lora:
            adapters(lab)
        lab.between(change, stage, reader)

    return apply


_NO_REWARD = "there is no reward model in SFT → DPO; the rule for it is tested by itself"
_NO_SAMPLER = "there is one process: nothing samples with other weights or kernels than it trains with"

DOCUMENTED: tuple[Fault, ...] = (
    Fault("1", "another template between SFT and DPO", _altered("another template")),
    Fault("2", "`chat_template.jinja` and the tokenizer's config disagree", _template_overruled),
    Fault("3", "end of sequence is not the template's end of turn", _other_eos),
    Fault("4", "padding is the end of turn, and masked with it", _pad_masked),
    Fault("5", "BOS twice", _double_bos),
    Fault("6a", "tokens added to the tokenizer alone", _altered("three more tokens")),
    Fault("6b", "embeddings resized in one stage alone", _altered("eight more embeddings")),
    Fault("7", "reward model and policy have different tokenizers", reason=_NO_REWARD),
    Fault("8", "reward head missing or made up", reason=_NO_REWARD),
    Fault("9", "the base as reference, not the SFT policy (adapters chained)", _base_as_start),
    Fault("10", "merged in 16 bits", _altered("bfloat16")),
    Fault("11", "a layer lost in a conversion of formats", _altered("a layer dropped")),
    Fault("12", "rollouts tokenized anew", reason=_NO_SAMPLER),
    Fault("13", "sampler and trainer disagree about log-probs", reason=_NO_SAMPLER),
    Fault("14", "a resume that does nothing ends with success", _zero_steps),
    Fault("15", "a broken evaluation that reports success", _eval_broken),
    Fault("16", "noise taken for progress: eight evaluation rows", _noise),
    Fault("17", "evaluation rows in the training data", _contaminated),
    Fault(
        "18",
        "over-optimization of a proxy",
        reason="no reward is optimized against; a held-out reward would be needed",
    ),
    Fault("19", "tokenized data older than the template", _stale_tokens),
    Fault("20a", "pairs the wrong way round, with scores", _inverted),
    Fault("20b", "pairs the wrong way round, without scores", _inverted_without_scores),
    Fault("21", "libraries changed between two stages", _drifted),
)
"""The failures of a survey of pipelines; a letter tells variants apart."""


# Invented failures, written down before the rules


def _roles(lab: Lab) -> None:
    other = {"user": "assistant", "assistant": "user", "system": "system"}
    map_turns(lab, lambda turn: {**turn, "role": other[turn["role"]]})


def _rendered_twice(lab: Lab) -> None:
    def render(row: dict[str, Any]) -> dict[str, Any]:
        system, asked, given = row["messages"]
        text = f"<|im_start|>system\n{system['content']}<|im_end|>\n<|im_start|>user\n{asked['content']}<|im_end|>\n"
        return {"messages": [{"role": "user", "content": text + "<|im_start|>assistant\n"}, given]}

    map_rows(lab, "chats", render)


def _answers(change: Callable[[str], str]) -> Apply:
    def apply(lab: Lab) -> None:
        map_turns(
            lab,
            lambda turn: (
                {**turn, "content": change(turn["content"])} if turn["role"] == "assistant" else turn
            ),
        )

    return apply


def _one_row(lab: Lab) -> None:
    lab.files["chats"] = lab.files["chats"][:1] * 160


def _shifted_answers(lab: Lab) -> None:
    answers = shifted([row["messages"][-1] for row in lab.files["chats"]])
    lab.files["chats"] = [
        {"messages": [*row["messages"][:-1], given]}
        for row, given in zip(lab.files["chats"], answers, strict=True)
    ]


def _answer_in_prompt(lab: Lab) -> None:
    def leak(row: dict[str, Any]) -> dict[str, Any]:
        system, asked, given = row["messages"]
        return {
            "messages": [
                system,
                {**asked, "content": f"{asked['content']} (answer: {given['content']})"},
                given,
            ]
        }

    map_rows(lab, "chats", leak)


def _failed_server(lab: Lab) -> None:
    failed = [{"role": "assistant", "content": "Error: 503 upstream"}]
    map_rows(lab, "prefs", lambda row: {**row, "rejected": failed})


def longer(lab: Lab) -> None:
    """Give every side of a pair a text of its own, as real answers have."""
    lab.files["prefs"] = [
        {"prompt": [SYSTEM, user(word)],
         "chosen": [{"role": "assistant", "content": f"{right} is the first letter of {word}."}],
         "rejected": [{"role": "assistant", "content": f"the word {word} has {wrong} as its first."}],
         "chosen_score": 1.0, "rejected_score": 0.0}
        for word, right, wrong in rows_of(64, 1)
    ]  # fmt: skip


def _shifted_rejected(lab: Lab) -> None:
    longer(lab)
    rejected = shifted([row["rejected"] for row in lab.files["prefs"]])
    lab.files["prefs"] = [
        {**row, "rejected": each} for row, each in zip(lab.files["prefs"], rejected, strict=True)
    ]


def _both_orders(lab: Lab) -> None:
    lab.files["prefs"] += [
        {"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"],
         "chosen_score": 1.0, "rejected_score": 0.0}
        for row in lab.files["prefs"]
    ]  # fmt: skip


def _by_length(lab: Lab) -> None:
    longer(lab)

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        text = row["chosen"][0]["content"]
        return {**row, "rejected": [{"role": "assistant", "content": text[: len(text) // 2]}]}

    map_rows(lab, "prefs", cut)


def _no_system(lab: Lab) -> None:
    map_rows(lab, "prefs", lambda row: {**row, "prompt": row["prompt"][1:]})


def _other_letters(lab: Lab) -> None:
    letters = str.maketrans("abcdefghijklmnopqrstuvwxyz", "абцдефгхийклмнопярстувщхчз")
    map_turns(lab, lambda turn: {**turn, "content": turn["content"].translate(letters)})


def _context_raised(lab: Lab) -> None:
    lab.between("a longer context in the config")
    long = "x " * 150
    map_rows(
        lab,
        "prefs",
        lambda row: {
            **row,
            "prompt": [row["prompt"][0], {"role": "user", "content": long + row["prompt"][1]["content"]}],
        },
    )


def _no_generation_prompt(lab: Lab) -> None:
    path = lab.model / "chat_template.jinja"
    text = path.read_text()
    path.write_text(text[: text.index("{%- if add_generation_prompt")] if "{%- if add_g" in text else
                    text[: text.index("{% if add_generation_prompt")])  # fmt: skip


def _scaled_adapter(lab: Lab) -> None:
    adapters(lab)
    lab.between("another lora_alpha")


def _itself(lab: Lab) -> None:
    lab.connect("gate", baseline="dpo")


def _near_duplicates(lab: Lab) -> None:
    lab.files["test"] = [
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": f"First  of {word}"},
                answer(right),
            ]
        }
        for word, right, _ in rows_of(48, 0)
    ]


def _held_out(lab: Lab) -> None:
    lab.stages["dpo"]["inputs"]["eval"] = "prefs2"
    lab.stages["prefs2"] = {"uses": "data.load", "with": {"path": "prefs2.jsonl"}}
    lab.files["prefs2"] = lab.files["prefs"][:16]
    lab.options("dpo", eval_steps=1)


def _dated(lab: Lab) -> None:
    path = lab.model / "chat_template.jinja"
    path.write_text(
        "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + path.read_text()
    )


def _no_weight(lab: Lab) -> None:
    map_rows(lab, "chats", lambda row: {**row, "weight": 0.0})
    lab.options("sft", weight_column="weight")


def _rejected_demonstrations(lab: Lab) -> None:
    lab.files["chats"] = [
        {"messages": [*row["prompt"], *row["rejected"]]} for row in [*preferences(), *preferences(160)]
    ][:160]


def _mojibake(lab: Lab) -> None:
    map_turns(
        lab,
        lambda turn: {
            **turn,
            "content": turn["content"].replace("is", "ïs").encode().decode("latin-1"),
        },
    )


def _promoted_other(lab: Lab) -> None:
    lab.connect("promote", model="sft")


INVENTED: tuple[Fault, ...] = (
    Fault("I01", "roles exchanged in the demonstrations", _roles),
    Fault("I02", "prompts are rendered already, and are rendered again", _rendered_twice),
    Fault("I03", "answers carry the end-of-turn marker as text", _answers(lambda text: text + "<|im_end|>")),
    Fault("I04", "a broken join: one conversation 160 times", _one_row),
    Fault("I05", "answers shifted by one row", _shifted_answers),
    Fault("I06", "answers were cut off after four characters", _answers(lambda text: text[:4])),
    Fault("I07", "the answer stands in the prompt", _answer_in_prompt),
    Fault("I08", "every rejected side is the error message of a server", _failed_server),
    Fault("I09", "rejected sides shifted by one row", _shifted_rejected),
    Fault("I10", "every pair is there in both orders", _both_orders),
    Fault("I11", "the rejected side is the chosen one cut in half", _by_length),
    Fault("I12", "pairs lack the system message of the demonstrations", _no_system),
    Fault("I13", "demonstrations in letters that the tokenizer does not know", _other_letters),
    Fault("I14", "a tensor of NaN", _altered("not a number")),
    Fault("I15", "a layer of zeros", _altered("a layer of zeros")),
    Fault("I16", "a wrapper's prefix in the names of weights", _altered("a wrapper's prefix")),
    Fault("I17", "SFT changed nothing", lambda lab: lab.stages["sft"].update(uses="foreign/frozen")),
    Fault("I18", "a conversion lost `rope_theta`", _altered("another rope_theta")),
    Fault("I19", "context raised in the config alone, with rows that long", _context_raised),
    Fault("I20", "the tokenizer was rebuilt: same tokens, other ids", _altered("permuted ids")),
    Fault("I21", "the tokenizer lower-cases after SFT", _altered("lower case")),
    Fault("I22", "the template has no generation prompt", _no_generation_prompt),
    Fault("I23", "the adapter's `lora_alpha` changed on the way", _scaled_adapter),
    Fault("I24", "the gate compares the candidate with itself", _itself),
    Fault("I25", "evaluation prompts are training prompts in other case and spaces", _near_duplicates),
    Fault("I26", "held-out pairs are training pairs", _held_out),
    Fault("I27", "the tokenizer was saved with truncation switched on", _altered("truncation switched on")),
    Fault("I28", "the template prints the date", _dated),
    Fault("I29", "every row has the weight 0", _no_weight),
    Fault("I30", "the demonstrations are what DPO rejects", _rejected_demonstrations),
    Fault("I31", "UTF-8 read as Latin-1", _mojibake),
    Fault("I32", "the SFT model is promoted on the verdict about the DPO model", _promoted_other),
)


def _merged_coarsely(lab: Lab) -> None:
    """An adapter that changed little is merged, and what it changed is rounded away."""
    lab.options("sft", lora={"r": 4}, learning_rate=1e-6, max_steps=2)
    lab.stages["merged"] = {
        "uses": "model.merge",
        "inputs": {"adapter": "sft"},
        "with": {"dtype": "bfloat16"},
    }
    lab.connect("dpo", model="merged")


FOR_RULES: tuple[Fault, ...] = (
    Fault("R-H043", "an adapter that changed little, merged in 16 bits", _merged_coarsely),
)

HARMLESS = {
    "I27": "harmless here: rows are tokenized without the tokenizer's own truncation",
    "I28": "harmless here: every template is told the same date, and a note says so",
}
"""Faults that cannot change a result here."""


# Pipelines in which nothing is wrong


def _plain(lab: Lab) -> None:
    """Files of demonstrations and pairs, full fine-tuning, evaluation, gate and promotion."""


def _adapters(lab: Lab) -> None:
    """An adapter that is trained on, with held-out pairs."""
    adapters(lab)
    lab.files["more"] = preferences(80)[64:]
    lab.stages["more"] = {"uses": "data.load", "with": {"path": "more.jsonl"}}
    lab.stages["dpo"]["inputs"]["eval"] = "more"
    lab.options("dpo", eval_steps=1)


def _strings(lab: Lab) -> None:
    """Text first, then prompts with completions, then pairs: strings without a template."""
    lab.files["corpus"] = [{"text": f"the first of {w} is {a}."} for w, a, _ in rows_of(96, 4)]
    lab.stages["corpus"] = {"uses": "data.load", "with": {"path": "corpus.jsonl"}}
    lab.stages["more"] = {
        "uses": "train.sft",
        "inputs": {"model": "base", "data": "corpus"},
        "with": {"learning_rate": 1e-3, "batch_size": 16, "max_steps": 3},
    }
    lab.connect("sft", model="more")
    lab.files["chats"] = [{"prompt": f"first of {w}: ", "completion": a} for w, a, _ in rows_of(160, 0)]
    lab.files["prefs"] = [
        {"prompt": f"first of {w}: ", "chosen": right, "rejected": wrong}
        for w, right, wrong in rows_of(64, 1)
    ]
    lab.files["test"] = [{"prompt": f"first of {w}: ", "completion": a} for w, a, _ in rows_of(48, 2)]
    lab.options("eval", metrics=["perplexity"])
    lab.options("gate", metric="perplexity")


def _bos_and_tokens(lab: Lab) -> None:
    """A template that prints BOS, padding that is the end of turn, bfloat16 weights, rows tokenized ahead."""
    with_bos(lab)
    lab.options("base", dtype="bfloat16")
    tokenized(lab)


HEALTHY: tuple[Fault, ...] = (
    Fault("H-a", "files, full fine-tuning, evaluation, gate, promotion", _plain),
    Fault("H-b", "the policy's own pairs", on_policy),
    Fault("H-c", "an adapter that is trained on, held-out pairs", _adapters),
    Fault("H-d", "text, then strings, then pairs of strings", _strings),
    Fault(
        "H-e", "BOS in the template, padding is the end of turn, bfloat16, tokenized ahead", _bos_and_tokens
    ),
)
