from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.looking import HOSTILE, model_at, turns
from PIL import Image

from posttrain_plugins.data.formats import format_of
from posttrain_plugins.inspection.gathering import Subject, inspect
from posttrain_plugins.inspection.models import open_model
from posttrain_plugins.inspection.page import page
from posttrain_plugins.inspection.trainers import preparation
from posttrain_plugins.inspection.views import Inspection, ModelView, Remark, RowView, Side
from posttrain_plugins.trainers.dpo import Dpo

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = frozenset({"meta", "input", "br"})
LEARNED, DARK = (201, 242, 214), (20, 24, 31)
"""Colours of `page.css`: what is learned, and the paper of the dark page."""


class Document(HTMLParser):
    """Elements and text of a page; fails at one that is not closed in its turn."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        classes = next((each["class"] for _, each in reversed(self.open) if each.get("class")), None)
        self.texts.append((classes or "", data))

    def text(self, of: str) -> str:
        return "".join(text for classes, text in self.texts if of in classes.split())


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    directory = tmp_path_factory.mktemp("model")
    model = open_model(str(model_at(directory)), directory)
    row = {
        "prompt": turns(HOSTILE),
        "chosen": [{"role": "assistant", "content": f"{HOSTILE} yes"}],
        "rejected": [{"role": "assistant", "content": "no"}],
        HOSTILE: HOSTILE,
    }
    rows = [row, {**row, "rejected": row["chosen"]}, {**row, "rejected": turns("", "never")[1:]}]
    form = format_of("preference")
    config = Dpo.config.model_validate({})
    subject = Subject(HOSTILE, "preference", form, lambda: iter(rows), lambda _: HOSTILE)
    seen = inspect(subject, model, preparation(Dpo(), config, form, model, None), HOSTILE, range(3))
    first = seen.shown[0]
    remark = Remark("dropped-field", HOSTILE, 0, HOSTILE)
    noted = replace(first, sides=tuple(replace(side, remarks=(remark,)) for side in first.sides))
    named: ModelView = replace(seen.model, label=HOSTILE)
    return replace(seen, model=named, shown=(noted, *seen.shown[1:]))


@pytest.fixture(scope="module")
def source(hostile: Inspection) -> str:
    return page(hostile)


def test_the_page_is_closed_and_needs_nothing(source: str) -> None:
    document = Document(source)
    names = {name for name, _ in document.elements}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form", "a"})
    for _, attributes in document.elements:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "href", "style")]
    style = "".join(text for _, text in document.texts if "--ink" in text)
    assert "url(" not in style and "@import" not in style
    policy = [each for name, each in document.elements if name == "meta" and "http-equiv" in each]
    assert policy[0]["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert re.search(r"https?://", source) is None


def test_no_character_acts_or_hides(source: str) -> None:
    assert all(character.isprintable() or character in "\n\u200c\u200d" for character in source)


def test_the_text_is_all_there(source: str) -> None:
    document = Document(source)
    whole = "".join(text for _, text in document.texts)
    for part in ("<script>document.title = 'owned'</script>", "[red]x[/red]", "</pre></style>&amp;", "שלום"):
        assert part in whole
    assert "yes" in document.text("s")
    assert "⟨ESC⟩" in document.text("e")


def test_tokens_say_their_ids(source: str, hostile: Inspection) -> None:
    titles = [
        each["title"]
        for name, each in Document(source).elements
        if name == "span" and "t" in str(each.get("class")).split() and "title" in each
    ]
    expected = []
    for row in hostile.shown:
        prompt = row.sides[0].pieces[: row.common] if row.sides else ()
        answers = [piece for side in row.sides for piece in side.pieces[row.common :]]
        expected += [str(piece.id) for piece in (*prompt, *answers) if piece.id is not None]
    assert [str(title).split(" ")[0] for title in titles] == expected


def test_what_is_learned_is_what_is_marked(source: str, hostile: Inspection) -> None:
    spans = [str(each.get("class")).split() for name, each in Document(source).elements if name == "span"]
    marked = sum("s" in classes and "t" in classes for classes in spans) - 1  # one is in the legend
    assert marked == sum(side.counts["supervised"] for row in hostile.shown for side in row.sides)


def test_rows_left_out_say_why(source: str) -> None:
    assert "left out of training: chosen and rejected are the same" in Document(source).text("bad")


def test_notes_fold_away(source: str) -> None:
    document = Document(source)
    assert [each for name, each in document.elements if name == "details" and each.get("class") == "notes"]
    assert "1 note" in [text for _, text in document.texts]


def rendered(browser: str, path: Path, *options: str) -> str:
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={path.parent / 'profile'}", *options, path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def colours(path: Path) -> dict[tuple[int, ...], int]:
    with Image.open(path) as image:
        found = image.convert("RGB").getcolors(maxcolors=1 << 24) or []
    return {tuple(colour): count for count, colour in found}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_real_browser_runs_nothing_and_shows_the_masks(source: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    path = tmp_path / "page.html"
    path.write_text(source, encoding="utf-8")
    document = Document(rendered(BROWSER, path, "--dump-dom"))
    assert {"script", "img"}.isdisjoint(name for name, _ in document.elements)
    title = next(text for _, text in document.texts if text.strip())
    assert title.startswith("<script>document.title"), "a script of the data changed the title"
    assert len([each for _, each in document.elements if str(each.get("class")).startswith("t ")]) > 50
    pictures = {}
    for scheme in ("light", "dark"):
        picture = tmp_path / f"{scheme}.png"
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        rendered(BROWSER, path, f"--screenshot={picture}", "--window-size=1000,2500", *dark)
        pictures[scheme] = colours(picture)
    assert max(pictures["light"], key=lambda colour: pictures["light"][colour]) == (255, 255, 255)
    assert pictures["light"].get(LEARNED, 0) > 500
    assert max(pictures["dark"], key=lambda colour: pictures["dark"][colour]) == DARK


def test_a_row_without_sequences_is_shown(hostile: Inspection) -> None:
    bare = RowView(9, "row 9", (), dropped="no assistant turn")
    document = Document(page(replace(hostile, shown=(bare,))))
    assert "left out of training: no assistant turn" in document.text("bad")
    alone = replace(bare, sides=(Side("completion", ()),), dropped=None)
    assert "0 tokens, 0 learned" in "".join(
        text for _, text in Document(page(replace(hostile, shown=(alone,)))).texts
    )
