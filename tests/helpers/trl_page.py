"""What `docs/parity.md` says of all comparisons with TRL, made from the comparisons themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.scripts import CONVERSATIONS, Conversation, assistant, user
from helpers.trl_comparison import EQUAL, Bench, Found, standing_clock
from helpers.trl_differences import Difference
from helpers.trl_masks import LIBRARY, ORIGINALS, SMOLLM2, Subject, smollm2

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
WRITE = ".venv/bin/python tests/parity/generate_parity.py"

SPELLED = "control-token"
NAMES = (*CONVERSATIONS, SPELLED)
"""The conversations of every row."""

ROWS: Mapping[str, Callable[[Bench, Conversation], Found]] = {
    "messages": Bench.messages,
    "completion": Bench.completion,
    "preference": Bench.preference,
}
"""What is prepared: conversations with `assistant_only_loss`, prompts with an answer, and with two."""

_MANY = ("deepseek_r1_distill", "gemma", "glm4moe", "muse_glimmer", "qwen3_8", "smolvlm")
OTHER_KINDS: Mapping[str, Sequence[str]] = {
    "metaspace-bpe": _MANY,
    "unigram": _MANY,
    "word-piece": _MANY,
    SMOLLM2: (SMOLLM2, *_MANY),
}
"""The templates that are compared with other kinds of tokenizers too."""
AMONG_TOKENIZERS = ("messages", "completion")
"""And on which rows."""

UNCOMPARED = frozenset({Difference.NO_PATCH, Difference.DECLINED})
"""What leaves nothing to compare."""


def subjects(rows: str) -> Mapping[str, Subject]:
    """The templates that are compared on rows; TRL has no masks for posttrain's own."""
    return ORIGINALS if rows == "messages" else {**ORIGINALS, **LIBRARY}


def conversation(name: str, subject: Subject) -> Conversation:
    """Return a conversation of a name; one has the template's own end of text in it."""
    if name == SPELLED:
        return Conversation([user(f"да {subject.eos} да"), assistant()])
    return CONVERSATIONS[name]


@dataclass
class Findings:
    """Compares when asked, once.

    Args:
        directory: Where models are written to.
    """

    directory: Path
    _benches: dict[tuple[str, str], Bench] = field(default_factory=dict)
    _found: dict[tuple[str, str, str], dict[str, Found]] = field(default_factory=dict)

    def of(self, rows: str, name: str, kind: str = "byte-level") -> Mapping[str, Found]:
        """Return what was found for a template, by conversation."""
        place = (rows, name, kind)
        if place not in self._found:
            bench = self._bench(name, kind)
            with standing_clock():
                self._found[place] = {
                    each: ROWS[rows](bench, conversation(each, bench.subject)) for each in NAMES
                }
        return self._found[place]

    def _bench(self, name: str, kind: str) -> Bench:
        if (name, kind) not in self._benches:
            subject = smollm2() if name == SMOLLM2 else {**ORIGINALS, **LIBRARY}[name]
            place = self.directory / kind / re.sub(r"\W+", "-", name)
            self._benches[name, kind] = Bench(subject, kind, place)
        return self._benches[name, kind]


def sections(findings: Findings) -> dict[str, str]:
    """Return the generated parts of the page, by the name between whose marks they stand."""
    return {
        "figures": _figures(findings),
        "kinds": "\n".join(_kinds()),
        **{rows: "\n".join(_table(findings, rows)) for rows in ROWS},
        "tokenizers": "\n".join(_tokenizers(findings)),
    }


def held(page: str, section: str) -> str:
    """Return a generated part as a page has it."""
    found = _marks(section).search(page)
    assert found is not None, f"docs/parity.md has no section {section}"
    return found.group().strip()


def written(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with its generated parts in place."""
    for section, text in parts.items():
        held(page, section)
        page = _marks(section).sub(lambda _, text=text: f"{text}\n", page)  # type: ignore[misc]
    return page


def cell(found: Mapping[str, Found]) -> str:
    """Say what was found for a template: what is most common last, the other conversations by name."""
    groups: dict[str, list[str]] = {}
    for name, kinds in found.items():
        groups.setdefault(_titles(kinds), []).append(name)
    ranked = sorted(groups.items(), key=lambda group: len(group[1]))
    (common, _), rest = ranked[-1], ranked[:-1]
    told = [f"{', '.join(each)}: {titles}" for titles, each in rest]
    return " · ".join([*told, f"others: {common}"]) if rest else f"all: {common}"


def _titles(found: Found) -> str:
    return ", ".join(f"`{kind.title}`" for kind in Difference if kind in found) or "equal"


def _marks(section: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {section} -->\n).*?(?=<!-- /{section} -->)", re.DOTALL)


def _figures(findings: Findings) -> str:
    columns = {
        **{
            f"`{rows}`": [found for name in subjects(rows) for found in findings.of(rows, name).values()]
            for rows in ROWS
        },
        "other tokenizers": [
            found
            for kind, names in OTHER_KINDS.items()
            for name in names
            for rows in AMONG_TOKENIZERS
            for found in findings.of(rows, name, kind).values()
        ],
    }
    counted = [_counted(pairs) for pairs in columns.values()]
    lines = [f"| pairs | {' | '.join(columns)} | all |", "|---" + "|---:" * (len(columns) + 1) + "|"]
    for name in counted[0]:
        counts = [column[name] for column in counted]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    return "\n".join(lines)


def _counted(pairs: Sequence[Found]) -> dict[str, int]:
    compared = [found for found in pairs if not found & UNCOMPARED]
    kinds = {f"`{kind.title}`": sum(kind in found for found in pairs) for kind in Difference}
    return {"compared": len(compared), "equal": compared.count(EQUAL), **kinds}


def _kinds() -> Iterator[str]:
    yield "| kind | what differs | why |"
    yield "|---|---|---|"
    for kind in Difference:
        yield f"| `{kind.title}` | {kind.explained.what} | {kind.explained.why} |"


def _grouped(cells: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for all templates of which the same is said."""
    groups: dict[str, list[str]] = {}
    for name, text in cells.items():
        groups.setdefault(text, []).append(name)
    for text, names in groups.items():
        yield f"| {', '.join(names)} | {text} |"


def _table(findings: Findings, rows: str) -> Iterator[str]:
    yield "| template | conversations |"
    yield "|---|---|"
    yield from _grouped({name: cell(findings.of(rows, name)) for name in subjects(rows)})


def _tokenizers(findings: Findings) -> Iterator[str]:
    yield "| tokenizer | template | `messages` | `completion` |"
    yield "|---|---|---|---|"
    for kind, names in OTHER_KINDS.items():
        for name in names:
            yield tokenizer_line(findings, kind, name)


def tokenizer_line(findings: Findings, kind: str, name: str) -> str:
    """Say what was found for a template with another kind of tokenizer."""
    both = (cell(findings.of(rows, name, kind)) for rows in AMONG_TOKENIZERS)
    return f"| {kind} | {name} | {' | '.join(both)} |"
