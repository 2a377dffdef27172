"""What trl 1.16.0 and posttrain make of foreign formats, cuts and packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import OPEN_ENDED
from helpers.contexts import FakeContext, catalogue, configured
from helpers.row_parity import AFFIXES, Labelled, labelled, prepared, sequences
from helpers.scripts import assistant, user
from helpers.tokenizers_of_all_kinds import KINDS
from helpers.training import dataset_artifact, model_artifact
from helpers.trl_masks import (
    ORIGINALS,
    Prepared,
    Subject,
    dpo,
    opened,
    sft,
    streamed,
)
from tokenizers import Tokenizer, processors

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import load_target
from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.tokens.token_rows import TokenRows
from posttrain_plugins.templates.encoder import Encoder

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module", params=KINDS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models of one kind of tokenizer that put something around texts."""
    made = Subject("plain", OPEN_ENDED, (), "</s>").write(
        tmp_path_factory.mktemp("plain") / "0", request.param
    )

    def around(affix: str) -> Path:
        tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
        tokens = [
            (token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>") if token in AFFIXES[affix]
        ]
        tokenizer.post_processor = processors.TemplateProcessing(AFFIXES[affix], special_tokens=tokens)
        tokenizer.save(str(made / "tokenizer.json"))
        return made

    return around


# Everything learned, arguments, dates, tools


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return ORIGINALS["llama3"].write(tmp_path / "llama")


# Foreign formats


def test_roles_of_sharegpt_are_renamed(llama: Path):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    named = [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]
    tokenizer, encoder = opened(llama), Encoder.open(llama)
    foreign = format_of("sharegpt")
    (row,) = foreign.rows({"conversations": turns})
    (passage,) = format_of("messages").passages(row)
    (mine,) = encoder.encode([passage])
    assert not isinstance(mine, DataError)
    (same,) = sft(tokenizer, streamed([{"conversations": named}]))
    assert mine.tokens == same["input_ids"]
    (theirs,) = sft(tokenizer, streamed([{"conversations": turns}]))
    assert "gpt" in tokenizer.decode(theirs["input_ids"])


def test_an_implicit_prompt_is_the_same_history(llama: Path):
    shared = [user(), assistant("ναι"), user("и")]
    row = {"chosen": [*shared, assistant("όχι")], "rejected": [*shared, assistant("άλφα βήτα")]}
    (theirs,) = dpo(opened(llama), streamed([row]))
    (canonical,) = format_of("implicit_preference").rows(row)
    (example,) = sequences(prepared(llama, [canonical], "preference", "train.dpo"))
    for side, mine in zip(("chosen", "rejected"), example, strict=True):
        pair = Prepared.answer(theirs, side)
        assert mine == labelled(pair.tokens, pair.learned)


def test_strings_without_a_prompt_are_not_parted_in_a_word(llama: Path):
    row = {"chosen": "The quick brown fox", "rejected": "The quiet fox"}
    (theirs,) = dpo(opened(llama), streamed([row]))
    parted = opened(llama).decode(theirs["prompt_ids"], skip_special_tokens=True)
    assert "The qui".startswith(parted) and parted
    assert "need a column `prompt`" in str(format_of("hh_rlhf").problem(row))


# Truncation


def asked(*lengths: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows whose prompts and answers have as many words."""
    return [{"prompt": "q" + " q" * (prompt - 1), "completion": " z" * answer} for prompt, answer in lengths]


LENGTHS = ((1, 2), (3, 30), (20, 4), (24, 1), (40, 3), (9, 13), (12, 12), (2, 60))

LIMIT = 16


@pytest.mark.parametrize("affix", ["beginning", "nothing"])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_answers_are_truncated_alike_as_far_as_they_stay_whole(
    plain: Callable[[str], Path], affix: str, mode: str
):
    directory = plain(affix)
    rows, encoder = asked(*LENGTHS), Encoder.open(directory)
    theirs = {
        place: Prepared.of(each[0])
        for place, row in enumerate(rows)
        if (each := sft(opened(directory), streamed([row]), max_length=LIMIT, truncation_mode=mode))
    }
    mine = prepared(directory, rows, "prompt_completion", max_length=LIMIT, truncation=mode)
    kept = {e.row: labelled(e.sequences[0].tokens, e.sequences[0].supervised) for e in mine.examples}
    if mode == "keep_start":
        assert kept == {place: labelled(each.tokens, each.learned) for place, each in theirs.items()}
        return
    for place, each in theirs.items():
        if all(each.learned[1:]) and len(each.tokens) == LIMIT:
            assert place not in kept, "an answer without its beginning is no demonstration"
        elif affix == "beginning" and len(each.tokens) == LIMIT:
            assert kept[place] == labelled([encoder.bos_id, *each.tokens[1:]], each.learned)
        else:
            assert kept[place] == labelled(each.tokens, each.learned)
    assert set(kept) < set(theirs)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_pairs_are_truncated_alike_as_far_as_they_keep_one_prompt(llama: Path, mode: str):
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    rows = [
        {
            "prompt": [user("q" * prompt)],
            "chosen": [assistant("a" * chosen)],
            "rejected": [assistant("b" * rejected)],
        }
        for prompt, chosen, rejected in ((3, 4, 9), (40, 4, 4), (40, 4, 9), (3, 50, 2), (70, 2, 2))
    ]
    limit = 60
    theirs: dict[int, list[Labelled]] = {}
    for place, row in enumerate(rows):
        for each in dpo(opened(llama), streamed([row]), max_length=limit, truncation_mode=mode):
            batch = DataCollatorForPreference(0, limit, mode)([each])
            theirs[place] = [
                labelled(
                    batch["input_ids"][side][seen].tolist(), batch["completion_mask"][side][seen].tolist()
                )
                for side in range(2)
                for seen in [batch["attention_mask"][side].bool()]
            ]
    mine = prepared(llama, rows, "preference", "train.dpo", max_length=limit, truncation=mode)
    kept = {e.row: [labelled(s.tokens, s.supervised) for s in e.sequences] for e in mine.examples}
    if mode == "keep_start":
        assert kept == theirs
        return
    assert set(kept) <= set(theirs) and kept[0] == theirs[0]
    for place, sides in kept.items():
        for (tokens, learned), (whole, counts) in zip(sides, theirs[place], strict=True):
            answer = sum(learned)
            assert tokens[-answer:] == whole[-answer:] and sum(counts) == answer, "no answer is cut"
        assert sides[0][0][: sides[0][1].index(True)] == sides[1][0][: sides[1][1].index(True)], "one prompt"


# Packing


def test_packing_keeps_the_same_documents_whole(tmp_path: Path):
    from datasets import Dataset

    model = model_artifact(tmp_path / "model", hidden_size=32)
    rows = asked(*((2 + n % 7, 3 + n * 5 % 11) for n in range(40)))
    limit = 24
    theirs = sft(
        opened(model.path), Dataset.from_list(rows), packing=True, max_length=limit, packing_strategy="bfd"
    )
    documents: list[list[Labelled]] = []
    for row in theirs:
        starts = [sum(row["seq_lengths"][:n]) for n in range(len(row["seq_lengths"]) + 1)]
        documents.append(
            [
                labelled(row["input_ids"][a:b], [label != -100 for label in row["labels"][a:b]])
                for a, b in pairwise(starts)
            ]
        )
    mine = packed(tmp_path, model, rows, limit)
    assert sorted(each for row in mine for each in row) == sorted(each for row in documents for each in row)
    assert len(mine) == len(documents), "as few rows as TRL needs"
    assert all(sum(len(tokens) for tokens, _ in row) <= limit for row in mine)


def packed(
    directory: Path, model: Artifact, rows: Sequence[Mapping[str, Any]], limit: int
) -> list[list[Labelled]]:
    """Run `data.tokenize` and `data.pack`, and return the documents of each row."""
    data = dataset_artifact(directory / "data", rows, "prompt_completion")
    for name, inputs, options in (
        ("data.tokenize", {"data": [data], "model": [model]}, {"max_length": limit}),
        ("data.pack", {}, {"length": limit}),
    ):
        stage = catalogue().stage(name)
        context = FakeContext(
            directory / name, stage, configured(stage, **options), inputs or {"data": [data]}
        )
        load_target(stage.target)(context)
        data = context.result("data")
    return [
        [labelled(s.tokens, s.supervised) for example in row for s in example.sequences]
        for row in TokenRows(data.path).examples()
    ]
