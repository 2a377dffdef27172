"""The documentation says what the code does: generated parts are current, examples work, links lead somewhere."""

from __future__ import annotations

import doctest
import json
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import posttrain
from posttrain.contracts.registration import Group
from posttrain.pipeline import Pipeline
from posttrain.planning.spec import PipelineSpec, Resources, Runtime, StageSpec
from posttrain.registry.examination import GROUP_OF

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
CODE = [ROOT / "core", ROOT / "plugins", ROOT / "pipelines"]

generator = runpy.run_path(str(Path(__file__).with_name("generate_reference.py")), run_name="generator")

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, the comment right above it, its language and its text."""

    page: Path
    note: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, match["note"] or "", match["language"], match["text"], line)


BLOCKS = [block for page in PAGES for block in blocks(page)]
PIPELINES = [
    block
    for block in BLOCKS
    if block.language == "yaml" and re.match(r"(name|plugins|defaults|stages):", block.text)
]
SESSIONS = [page for page in PAGES if re.search(r"^>>> ", page.read_text(encoding="utf-8"), re.MULTILINE)]
PLANS = [block for block in BLOCKS if re.search(r"^plan of ", block.text, re.MULTILINE)]
SCRIPTS = [block for block in BLOCKS if block.note == "run"]


def prepare(directory: Path, page: Path) -> None:
    """Put the files that a page's examples speak of into a directory."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number}!"},
            ],
            "answer": f"{number}!",
        }
        for number in range(200)
    ]
    pairs = [{"prompt": f"say {n}", "chosen": f"{n}!", "rejected": f"{n}?"} for n in range(200)]
    files = {
        "thumbs": [{"prompt": f"say {n}", "completion": f"{n}!", "label": n % 3 > 0} for n in range(200)],
        "chats": rows,
        "pairs": pairs,
        "steps": [
            {"prompt": f"say {n}", "completions": [f"{n}", "!"], "labels": [True, n % 2 > 0]}
            for n in range(200)
        ],
        "answers": [{"prompt": f"say {n}", "completion": f"{n}\n!"} for n in range(200)],
        "ranked": [{**row, "reference": f"{row['chosen']}!"} for row in pairs],
    }
    for name, made in files.items():
        lines = [json.dumps(row) + "\n" for row in made]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    for block in blocks(page):
        if block.note.startswith("file: "):
            (directory / block.note.removeprefix("file: ")).write_text(block.text, encoding="utf-8")


def test_there_is_something_to_test() -> None:
    assert len(PAGES) >= 12
    assert len(PIPELINES) >= 6
    assert len(SCRIPTS) >= 2
    assert SESSIONS


def test_the_reference_is_current() -> None:
    expected = generator["reference"](generator["built_in"]())
    hint = "run tests/docs/generate_reference.py"
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == expected, hint


def test_every_rule_is_documented_as_it_is() -> None:
    text = (DOCS / "handoffs.md").read_text(encoding="utf-8")
    assert text == generator["handoffs"](generator["built_in"]()), "run tests/docs/generate_reference.py"
    codes = re.findall(r"^## (\S+):", text, re.MULTILINE)
    assert len(codes) == len(set(codes)) == len(generator["built_in"]().names(Group.RULE))


def test_the_table_of_plugins_is_current() -> None:
    found = generator["TABLE"].findall((ROOT / "README.md").read_text(encoding="utf-8"))
    expected = generator["plugin_table"](generator["built_in"]())
    assert found == [expected], "run tests/docs/generate_reference.py"


def test_the_table_of_speeds_is_that_of_the_evidence() -> None:
    speed = runpy.run_path(str(Path(__file__).with_name("speed_table.py")))
    found = speed["TABLE"].findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found == [speed["table"]()], "run tests/docs/speed_table.py"


def test_every_loss_has_a_page_that_is_current() -> None:
    expected = generator["loss_pages"](generator["built_in"]())
    found = {path: path.read_text(encoding="utf-8") for path in (DOCS / "losses").glob("*.md")}
    assert sorted(path.name for path in found) == sorted(path.name for path in expected)
    stale = [path.name for path, text in expected.items() if found[path] != text]
    assert stale == [], "run tests/docs/generate_reference.py"


def test_every_loss_names_where_it_is_from() -> None:
    catalogue = generator["built_in"]()
    names = catalogue.names(Group.LOSS)
    assert [name for name in names if not catalogue.entry(Group.LOSS, name).registration.reference] == []


def test_every_registered_name_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    catalogue = generator["built_in"]()
    names = [name for group in Group if group is not Group.COMMAND for name in catalogue.names(group)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_hook_and_public_name_is_in_the_plugin_guide() -> None:
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    public = set(posttrain.__all__) - {"__version__"}
    assert [name for name in sorted({*GROUP_OF, *public}) if f"`{name}" not in text] == []


def test_every_key_of_a_pipeline_file_is_described() -> None:
    text = (DOCS / "pipelines.md").read_text(encoding="utf-8")
    parts = (PipelineSpec, StageSpec, Resources, Runtime)
    keys = {name.rstrip("_") for part in parts for name in part.model_fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_every_environment_variable_is_described() -> None:
    names = set()
    for root in CODE:
        for path in root.rglob("*.py"):
            names.update(re.findall(r"\"(POSTTRAIN_[A-Z_]+)\"", path.read_text(encoding="utf-8")))
    assert names - {"POSTTRAIN_API"} == set(generator["VARIABLES"]) | generator["INTERNAL"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    broken = [
        match["target"]
        for match in _LINK.finditer(prose)
        if not match["target"].startswith(("http://", "https://", "mailto:"))
        and _broken(page, match["target"])
    ]
    assert broken == []


def _broken(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists() or not file.is_relative_to(ROOT):
        return True
    return bool(anchor) and anchor not in _anchors(file)


def _anchors(page: Path) -> set[str]:
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("block", PIPELINES, ids=str)
def test_pipelines_can_be_planned(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, block.page)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.yaml").write_text(block.text, encoding="utf-8")
    pipeline = Pipeline.from_file(Path("example.yaml"))
    plan = pipeline.plan(tmp_path / ".posttrain")
    assert pipeline.warnings == []
    assert [(each.node, each.rule, each.message) for each in plan.refused] == []


@pytest.mark.parametrize("block", PLANS, ids=str)
def test_plans_show_what_plugins_are_now(block: Block) -> None:
    catalogue = generator["built_in"]()
    known = {name: catalogue.entry(group, name) for group in Group for name in catalogue.names(group)}
    shown = re.findall(r" ([\w.]+) v(\d+)(?: |$)", block.text, re.MULTILINE)
    assert shown and all(int(version) == known[name].registration.numerics for name, version in shown)
    trainers = [name for name, _ in shown if name.startswith("train.")]
    assert block.text.count(" backend: single (in no key)") == len(trainers)


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_scripts_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, block.page)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "example.py"
    script.write_text(block.text, encoding="utf-8")
    before = set(sys.modules)
    runpy.run_path(str(script), run_name="__main__")
    for name in [name for name in set(sys.modules) - before if name.startswith("_posttrain_local_")]:
        del sys.modules[name]


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sessions_show_what_python_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert attempted > 0
    assert failed == 0


def test_the_design_fits_on_a_page_and_names_every_package() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 270
    packages = [
        path.parent.name
        for root in CODE
        for path in root.glob("*/*/__init__.py")
        if path.parent.name not in ("posttrain", "posttrain_plugins", "posttrain_pipelines")
    ]
    assert len(packages) > 10
    assert [name for name in packages if f"{name}/" not in text] == []
