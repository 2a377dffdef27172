from __future__ import annotations

import io
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.looking import HOSTILE, model_at, turns
from rich.console import Console

from posttrain_plugins.data.formats import format_of
from posttrain_plugins.inspection.gathering import Subject, inspect
from posttrain_plugins.inspection.models import open_model
from posttrain_plugins.inspection.painting import paint
from posttrain_plugins.inspection.summary import training_lines
from posttrain_plugins.inspection.terminal import show
from posttrain_plugins.inspection.trainers import preparation
from posttrain_plugins.inspection.views import Inspection, Kept, Piece, Remark, RowView, Side, Turn
from posttrain_plugins.trainers.sft import Sft

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
PIECES = (
    Piece("", 0, "<s>", special=True),
    Piece("Q:", 1, "Q:"),
    Piece("\nA", 2, "A", straddling=True),
    Piece("ns", 3, "ns", supervised=True),
    Piece("wer\n", 4, "wer", supervised=True),
    Piece("<end>", 5, "<end>", supervised=True, special=True),
    Piece(" rest", 6, "rest", supervised=True, cut=True),
)


def console(colours: bool) -> Console:
    system = "truecolor" if colours else None
    return Console(
        file=io.StringIO(), force_terminal=colours, color_system=system, width=200, highlight=False,
        markup=False, emoji=False,
    )  # fmt: skip


def printed(inspection: Inspection, colours: bool = False, tokens: bool = False) -> str:
    target = console(colours)
    show(inspection, target, tokens=tokens)
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    directory = tmp_path_factory.mktemp("model")
    model = open_model(str(model_at(directory)), directory)
    rows = [{"messages": turns(HOSTILE, f"{HOSTILE} answer"), HOSTILE: HOSTILE}]
    form = format_of("messages")
    config = Sft.config.model_validate({})
    subject = Subject(HOSTILE, "messages", form, lambda: iter(rows), lambda _: HOSTILE)
    return inspect(subject, model, preparation(Sft(), config, form, model, None), HOSTILE, [0])


def test_marks_take_the_place_of_colours() -> None:
    assert paint(PIECES, marks=True).plain == "<s>Q:⟪↵\nA⟫⟦nswer↵\n<end>⟧⟨cut:  rest⟩"


def test_token_boundaries() -> None:
    later = Piece("", 9, "x", supervised=True)
    assert paint([*PIECES[1:4], later], tokens=True).plain == "Q:│↵\nA│ns│·│"


def test_the_many_tokens_of_an_image_are_one_with_their_number() -> None:
    image = Piece("", 9, "<image>", special=True)
    assert paint([PIECES[1], image, image, image, PIECES[1]]).plain == "Q:<image>×3Q:"
    assert paint([image, image], tokens=True).plain == "<image>│<image>│"
    assert paint([PIECES[1], PIECES[1]]).plain == "Q:Q:"


def test_colours_follow_the_masks() -> None:
    painted = paint(PIECES)
    styles = {painted.plain[span.start : span.end]: str(span.style) for span in painted.spans}
    assert styles == {
        "<s>": "dim reverse",
        "Q:": "dim",
        "↵\nA": "black on yellow",
        "ns": "bold green",
        "wer↵\n": "bold green",
        "<end>": "bold green reverse",
        " rest": "red strike",
    }


@pytest.mark.parametrize("tokens", [False, True])
def test_hostile_text_cannot_act_on_the_terminal(hostile: Inspection, tokens: bool) -> None:
    coloured = printed(hostile, colours=True, tokens=tokens)
    plain = _STYLES.sub("", coloured)
    for character in plain:
        assert character in "\n\t\u200c\u200d" or unicodedata.category(character)[0] != "C", repr(character)
    assert "⟨ESC⟩]0;owned⟨BEL⟩" in plain.replace("│", "")
    assert "[red]x[/red]" in plain.replace("│", "")
    # Only this module's own styles are left: no cursor movement, no title, no hyperlink.
    assert coloured.count("\x1b") == len(_STYLES.findall(coloured))


def test_hostile_text_is_all_there(hostile: Inspection) -> None:
    shown = printed(hostile)
    answer = HOSTILE.replace("\x1b", "⟨ESC⟩").replace("\x07", "⟨BEL⟩").replace("\x00", "⟨NUL⟩")
    answer = answer.replace("\x9b", "⟨U+009B⟩").replace("\u202e", "⟨U+202E⟩").replace("\u202c", "⟨U+202C⟩")
    assert f"⟦{answer} answer<|im_end|>⟧" in shown


def test_a_row_with_everything() -> None:
    remark = Remark("trimmed", "white space is lost", 1, "take it away")
    row = RowView(
        7, "line 9", (), ("{tool}",), {"who": "me"}, (Side("chosen", PIECES, (remark,)),), 0, "too long"
    )
    from posttrain_plugins.inspection import terminal

    target = console(colours=False)
    terminal.show_row(row, target)
    assert isinstance(target.file, io.StringIO)
    lines = target.file.getvalue().splitlines()
    assert "── row 7 · line 9" in lines
    assert "left out of training: too long" in lines
    assert "chosen · 6 tokens, 3 learned, 1 straddling, 1 cut" in lines
    assert "  ! trimmed (message 2): white space is lost" in lines
    assert "    fix: take it away" in lines


def test_tools_come_before_the_turns() -> None:
    from posttrain_plugins.inspection import terminal

    row = RowView(1, "row 1", (Turn("prompt", "user", "hi"),), ('{"name": "f"}',))
    target = console(colours=False)
    terminal.show_row(row, target)
    assert isinstance(target.file, io.StringIO)
    lines = target.file.getvalue().splitlines()
    assert lines[-4:] == ["tools", '  {"name": "f"}', "prompt", "  user  hi"]


def test_nothing_is_said_of_masks_where_no_row_is_left(hostile: Inspection) -> None:
    training = replace(hostile.training, usable=0, masked=Kept(0), unmasked=Kept(0))
    names = [line.name for line in training_lines(replace(hostile, training=training))]
    assert "usable" in names
    assert not {"fully masked", "all learned"} & set(names)


def test_examples_of_packed_rows_are_counted_as_such(hostile: Inspection) -> None:
    training = replace(hostile.training, usable=99, examples=100, dropped={"too long": Kept(1, (7,))})
    lines = {line.name: line.text for line in training_lines(replace(hostile, rows=36, training=training))}
    assert lines["usable"] == "99 of 100 examples in 36 rows"
    assert lines["dropped"] == "1 example (7): too long"


def test_the_summary(hostile: Inspection, tmp_path: Path) -> None:
    shown = printed(hostile)
    for line in ("usable        1 of 1 row", "fully masked  no row that training takes", "stops"):
        assert line in shown
