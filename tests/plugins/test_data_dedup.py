"""`data.dedup` and `posttrain data dedup`: copies are found, and nothing else is dropped."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from helpers.planning import command
from helpers.stages import StageRun, configured, contents, run_stage

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact, digest_of
from posttrain.contracts.stage import Level
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.dedup import Dedup
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.similarity.duplicates import Bands, Copy, Rule, find_copies
from posttrain_plugins.data.similarity.shingles import Hasher, content_of, folded, words

Row = dict[str, Any]
PAIR = "prompt_completion"


def pair(prompt: str, completion: str, **others: Any) -> Row:
    return {"prompt": prompt, "completion": completion, **others}


def text(seed: int, count: int = 60) -> str:
    chosen = random.Random(seed)
    return " ".join(f"w{chosen.randrange(5000)}" for _ in range(count))


def changed(told: str, *places: int) -> str:
    parts = told.split()
    for place in places:
        parts[place] = "other"
    return " ".join(parts)


def copies(rows: Sequence[Row], format: str = PAIR, **rule: Any) -> list[Copy]:
    return find_copies(rows, format, Rule(**rule))


def groups(rows: Sequence[Row], format: str = PAIR, **rule: Any) -> list[list[int]]:
    """The places of rows that are taken for one, those of single rows left out."""
    found: dict[int, list[int]] = {}
    for copy in copies(rows, format, **rule):
        found.setdefault(copy.of, [copy.of]).append(copy.row)
    return sorted(sorted(places) for places in found.values())


# Words and shingles


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("Hello, WORLD!  it's 3.5", ["hello", "world", "it", "s", "3", "5"]),
        ("ﬁne ½", ["fine", "1", "2"]),
        ("你好 world", ["你", "好", "world"]),
        ("Straße", ["strasse"]),
        ("+ -", ["+", "-"]),
        (" \n", []),
    ],
)
def test_words_have_neither_case_nor_punctuation(told: str, expected: list[str]) -> None:
    assert words(told) == expected


def test_shingles_are_the_different_runs_of_words() -> None:
    hasher = Hasher(2)
    assert len(hasher.shingles("a b a b c")) == 3  # a b, b a, b c
    assert len(Hasher(5).shingles("a b c")) == 1
    assert len(Hasher(5).shingles("")) == 0
    more = hasher.shingles("x, A B; a b C!")  # and x a
    assert len(more) == 4
    assert set(hasher.shingles("a b a b c").tolist()) < set(more.tolist())


def test_shingles_of_characters_see_folded_text() -> None:
    one, other = (Hasher(3, characters=True).shingles(told) for told in ("Ab  c", "ab C"))
    assert one.tolist() == other.tolist() and len(one) == 2  # "ab ", "b c"


def test_shingles_are_the_same_on_every_machine() -> None:
    assert Hasher(2).shingles("one two three").tolist() == sorted(GOLDEN)


GOLDEN = [14513193064728508331, 16756998254569676072]


def test_what_a_row_says_is_taken_apart() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]},
            {"role": "assistant", "content": "a cat", "reasoning_content": "fur", "weight": 1},
        ],
        "tools": [{"name": "zoom"}],
        "id": 3,
    }
    found = content_of(row, "messages", "row")
    assert found.texts == {
        ("messages", "system"): ["be brief"],
        ("messages", "user"): ["what is it"],
        ("messages", "assistant"): ["a cat"],
        ("messages", "assistant", "reasoning_content"): ["fur"],
    }
    assert found.rest == [
        ["messages", "user", {"type": "image"}],
        ["messages", "assistant", "weight", 1],
        ["tools", [{"name": "zoom"}]],
    ]
    asked = content_of(row, "messages", "prompt").texts
    assert asked == {("prompt", "system"): ["be brief"], ("prompt", "user"): ["what is it"]}


# Which rows are copies


def test_equal_rows_are_found_whatever_their_case_and_white_space() -> None:
    rows = [pair("Ask me", "Yes"), pair("ask  ME\n", "yes"), pair("ask me", "no"), pair("Ask me", "Yes")]
    assert groups(rows, threshold=None) == [[0, 1, 3]]
    assert groups(rows, threshold=None, fold=False) == [[0, 3]]


def test_columns_beside_the_format_do_not_make_rows_differ() -> None:
    assert groups([pair("a", "b", id=1), pair("a", "b", id=2)]) == [[0, 1]]


def test_the_row_that_is_kept_does_not_depend_on_the_order() -> None:
    rows = [pair(text(n % 7), text(100 + n % 7), id=n) for n in range(40)]
    rows += [pair(text(n), changed(text(100 + n), 30), id=50 + n) for n in range(7)]
    kept = None
    for seed in range(4):
        random.Random(seed).shuffle(rows)
        dropped = {copy.row for copy in copies(rows, threshold=0.7)}
        left = sorted(digest_of(row) for place, row in enumerate(rows) if place not in dropped)
        assert len(left) == 7
        assert left == (kept or left)
        kept = left


def test_of_equal_rows_the_one_with_the_lowest_hash_is_kept() -> None:
    rows = [pair("a", "b", id=n) for n in range(10)]
    (kept,) = {copy.of for copy in copies(rows)}
    assert digest_of(rows[kept]) == min(map(digest_of, rows))


def test_near_rows_are_found_and_measured() -> None:
    told = text(1)
    rows = [pair("ask", told), pair("ask", changed(told, 59)), pair("ask", changed(told, 20, 40))]
    near = copies(rows, threshold=0.6)
    assert len(near) == 2 and not any(copy.equal for copy in near)
    # 56 shingles of 5 words each; a change at the end spoils one of them, one within spoils five.
    kept = near[0].of
    expected = {
        frozenset((0, 1)): 55 / 57,
        frozenset((0, 2)): 46 / 66,
        frozenset((1, 2)): 45 / 67,
    }
    for copy in near:
        assert copy.similarity == pytest.approx(expected[frozenset((copy.row, kept))])


def test_the_threshold_is_that_of_the_true_similarity() -> None:
    told = text(2)
    rows = [pair("ask", told), pair("ask", changed(told, 59))]
    exact = 55 / 57
    assert groups(rows, threshold=exact) == [[0, 1]]
    assert groups(rows, threshold=exact + 1e-9) == []


def test_a_chain_of_neighbours_is_not_taken_for_one() -> None:
    """Each is near the next one; the ends are not near each other, and must not vanish for each other."""
    rows = [pair("ask", text(3))]
    for step in range(12):
        rows.append(pair("ask", changed(rows[-1]["completion"], 5 * step)))
    found = copies(rows, threshold=0.75)
    assert found
    kept = [place for place in range(len(rows)) if place not in {copy.row for copy in found}]
    for copy in found:
        assert jaccard(rows[copy.row]["completion"], rows[copy.of]["completion"]) >= 0.75
        assert copy.of in kept
    for one in kept:
        for other in kept:
            if one < other:
                assert jaccard(rows[one]["completion"], rows[other]["completion"]) < 0.75


def jaccard(one: str, other: str) -> float:
    """The similarity, counted without hashes."""

    def shingles(told: str) -> set[tuple[str, ...]]:
        parts = told.split()
        return {tuple(parts[i : i + 5]) for i in range(len(parts) - 4)}

    mine, theirs = shingles(one), shingles(other)
    return len(mine & theirs) / len(mine | theirs)


LONG = text(4, 200)


@pytest.mark.parametrize(
    ("format", "rows"),
    [
        (PAIR, [pair(LONG, "yes indeed"), pair(LONG, "no never")]),
        (
            "preference",
            [
                {"prompt": LONG, "chosen": text(5), "rejected": text(6)},
                {"prompt": LONG, "chosen": text(6), "rejected": text(5)},
            ],
        ),
        (PAIR, [pair("f", LONG, tools=[{"name": "a"}]), pair("f", changed(LONG, 9), tools=[{"name": "b"}])]),
        (
            "messages",
            [
                {
                    "messages": [
                        {"role": role, "content": told}
                        for role, told in zip(("user", "assistant"), turns, strict=True)
                    ]
                }
                for turns in ((LONG, text(7)), (text(7), LONG))
            ],
        ),
        (PAIR, [pair("what is 3 + 4?", "7"), pair("what is 3 + 5?", "8")]),
    ],
)
def test_rows_that_differ_in_one_part_are_both_kept(format: str, rows: list[Row]) -> None:
    assert copies(rows, format, threshold=0.5) == []


def test_labels_that_contradict_each_other_are_both_kept() -> None:
    rows = [{"prompt": "ask", "completion": LONG, "label": label} for label in (True, False)]
    assert copies(rows, "unpaired_preference", threshold=0.5) == []
    assert groups([rows[0], rows[0]], "unpaired_preference") == [[0, 1]]


def test_prompts_alone_or_one_column_may_be_compared() -> None:
    rows = [pair("Same?", text(8)), pair("same?", text(9)), pair("other?", text(8))]
    assert groups(rows, on="prompt") == [[0, 1]]
    assert groups(rows, on="completion") == [[0, 2]]
    with pytest.raises(DataError, match="no column `answer`"):
        copies(rows, on="answer")


def test_short_texts_are_near_by_their_characters() -> None:
    rows = [pair("reverse abcdefghijklmnopqrst", "x"), pair("reverse abcdefghijklmnopqrsu", "x")]
    assert copies(rows, threshold=0.8) == []
    assert groups(rows, threshold=0.8, characters=True, size=4) == [[0, 1]]


def test_rows_without_text_are_equal_or_nothing() -> None:
    rows = [pair("…", "…", id=1), pair("!", "?"), pair("…", "…", id=2)]
    assert groups(rows) == [[0, 2]]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95, 1.0])
def test_bands_hardly_miss_a_pair_at_the_threshold(threshold: float) -> None:
    bands = Bands.of(threshold, 128)
    assert bands.count * bands.rows <= 128
    assert 1 - (1 - threshold**bands.rows) ** bands.count >= 0.99
    longer = bands.rows + 1
    assert longer > 128 or 1 - (1 - threshold**longer) ** (128 // longer) < 0.99


def test_too_few_permutations_are_refused() -> None:
    with pytest.raises(DataError, match="too few permutations"):
        Bands.of(0.05, 16)


def planted(count: int) -> tuple[list[Row], list[list[int]]]:
    """Rows of which every tenth has a near copy and every twentieth an equal one."""
    rows = [pair(text(n, 20), text(n + count)) for n in range(count)]
    expected = []
    for n in range(0, count, 10):
        group = [n, len(rows)]
        rows.append(pair(rows[n]["prompt"], changed(rows[n]["completion"], 30)))
        if n % 20 == 0:
            group.append(len(rows))
            rows.append(pair(rows[n]["prompt"].upper(), rows[n]["completion"]))
        expected.append(group)
    return rows, sorted(expected)


def test_all_planted_copies_among_five_thousand_rows_are_found_and_nothing_else() -> None:
    rows, expected = planted(4400)
    assert len(rows) == 5060
    assert groups(rows, threshold=0.8) == expected


def test_templates_that_are_almost_near_take_no_forever() -> None:
    """Rows of one template share three shingles in four: all of them are candidates of each other."""
    frame = text(11, 110)
    rows = [pair("ask", f"{frame} {text(1000 + n, 12)}") for n in range(800)]
    assert copies(rows, threshold=0.83) == []


# The stage


def loaded(directory: Path, rows: Sequence[Row]) -> Artifact:
    directory.mkdir(parents=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_stage(Load(), directory, path="rows.jsonl").result("data")


def ran(directory: Path, rows: Sequence[Row], **options: Any) -> StageRun:
    return run_stage(Dedup(), directory, {"data": [loaded(directory / "in", rows)]}, **options)


def test_the_stage_writes_what_is_left_and_reports_the_clusters(tmp_path: Path) -> None:
    rows, expected = planted(60)
    run = ran(tmp_path, rows)
    left = read_rows(run.result("data"))
    assert len(left) == 60 and all(row in rows for row in left)
    assert run.outcome is not None
    figures = {"rows": 69.0, "kept": 60.0, "equal": 3.0, "near": 6.0, "clusters": 6.0}
    assert dict(run.outcome.figures) == {**figures, "duplicate_rate": pytest.approx(9 / 69)}
    assert run.outcome.summary == "69 rows, 60 kept: 3 equal and 6 near copies"
    kind, facts = run.described["report"]
    assert kind is Kind.REPORT and facts.report == "deduplication" and facts.figures == run.outcome.figures
    lines = (run.output("report") / "clusters.jsonl").read_text().splitlines()
    clusters = [json.loads(line) for line in lines]
    found = [sorted([c["kept"] - 1, *(each["row"] - 1 for each in c["copies"])]) for c in clusters]
    assert sorted(found) == expected
    report = json.loads((run.output("report") / "report.json").read_text())
    assert report["figures"] == run.outcome.figures and report["options"]["threshold"] == 0.8
    first = report["examples"][0]
    assert first["size"] == 3
    assert first["kept"]["text"].lower().startswith(rows[first["kept"]["row"] - 1]["prompt"].lower()[:40])


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows, _ = planted(40)
    one, other = (ran(tmp_path / name, rows) for name in "ab")
    for port in ("data", "report"):
        assert contents(one.output(port)) == contents(other.output(port))


def test_equal_rows_are_found_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    rows = [pair("a", "b"), pair("A", "b"), pair("c", "d")]
    assert ran(tmp_path / "exact", rows, near=False).described["data"][1].rows == 2
    with pytest.raises(DataError, match="`datasketch`, which is not installed") as error:
        ran(tmp_path / "near", rows)
    assert error.value.fix == "install datasketch, or look for equal rows alone"


def test_the_plan_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (few,) = Dedup().check(configured(Dedup(), threshold=0.05, permutations=16), {})
    assert few.level is Level.ERROR and "too few permutations" in few.message
    assert list(Dedup().check(configured(Dedup(), near=False, threshold=0.05, permutations=16), {})) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (missing,) = Dedup().check(configured(Dedup()), {})
    assert missing.level is Level.WARNING and "datasketch" in missing.message


@pytest.mark.parametrize(
    "options", [{"threshold": 0}, {"threshold": 1.1}, {"size": 0}, {"shingles": "lines"}]
)
def test_impossible_options_are_refused(options: Row) -> None:
    with pytest.raises(ConfigProblems):
        configured(Dedup(), **options)


def test_similarities_do_not_depend_on_the_seed() -> None:
    rows, _ = planted(40)
    one, other = (copies(rows, threshold=0.7, seed=seed) for seed in (0, 1))
    assert one == other


def test_the_hashes_are_spread() -> None:
    found = numpy.concatenate([Hasher(3).shingles(text(n, 200)) for n in range(20)])
    assert len(numpy.unique(found)) > 3900
    assert abs((found >> numpy.uint64(63)).mean() - 0.5) < 0.05


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows, _ = planted(40)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_command_writes_what_is_left(here: Path) -> None:
    told = command("data", "dedup", "rows.jsonl", "--output", "left.jsonl", "--clusters", "clusters.jsonl")
    assert told.code == 0, told.err
    assert "46 rows, 40 kept: 2 equal and 4 near copies" in told.out
    assert "3 alike: row " in told.out
    assert len((here / "left.jsonl").read_text().splitlines()) == 40
    assert len((here / "clusters.jsonl").read_text().splitlines()) == 4
    again = command("data", "dedup", "left.jsonl", "--json")
    assert json.loads(again.out)["figures"]["kept"] == 40 == json.loads(again.out)["figures"]["rows"]


def test_the_command_looks_for_equal_rows_alone(here: Path) -> None:
    answer = json.loads(command("data", "dedup", "rows.jsonl", "--exact", "--json").out)
    assert (answer["figures"]["equal"], answer["figures"]["near"]) == (2, 0)
    verbatim = json.loads(command("data", "dedup", "rows.jsonl", "--exact", "--verbatim", "--json").out)
    assert verbatim["figures"]["equal"] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--threshold", "2"], "threshold: Input should be less than or equal to 1"),
        (["--threshold", "0.05", "--permutations", "16"], "too few permutations"),
        (["--on", "page"], "no column `page`"),
        (["--output", "rows.jsonl"], "the output is there already"),
    ],
)
def test_the_command_says_what_is_wrong(here: Path, arguments: list[str], told: str) -> None:
    before = (here / "rows.jsonl").read_bytes()
    result = command("data", "dedup", "rows.jsonl", *arguments)
    assert result.code == 2 and told in result.err
    assert (here / "rows.jsonl").read_bytes() == before


def test_folding_reaches_every_string() -> None:
    assert folded({"A": ["B  c", 3, {"d": "E\n"}]}) == {"A": ["b c", 3, {"d": "e"}]}
