"""Steps in free text, and what they come to for a whole answer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence

import pytest

from posttrain.errors import DataError
from posttrain_plugins.rewards.aggregation import AGGREGATIONS, aggregate, log_probability, probability
from posttrain_plugins.rewards.process import answered
from posttrain_plugins.rewards.steps import STYLES, steps_of, style_of

LATEX = r"""We argue by cases.
\begin{enumerate}
  \item If $x > 0$, then
    \begin{itemize} \item $x^2 > 0$ \item and so on \end{itemize}
  \item \itemsep is no item
\end{enumerate}
So it holds."""

WRITTEN = [
    ("named", "Step 1: a\nStep 2: b\nb again\n\nStep 3: c", ["Step 1: a", "Step 2: b\nb again", "Step 3: c"]),
    ("named", "**Step 1:** a\n\n**Step 2:** b", ["**Step 1:** a", "**Step 2:** b"]),
    ("named", "## STEP 1 - a\n\nb\n\n## Step 2\nc", ["## STEP 1 - a\n\nb", "## Step 2\nc"]),
    ("named", "> Step 0. a\n> Step 1. b", ["> Step 0. a", "> Step 1. b"]),
    ("named", "Step 1: a. Step 2: b. Step 3: c", ["Step 1: a.", "Step 2: b.", "Step 3: c"]),
    ("named", "Step 1: as in Step 2: not yet. Step 2: b", ["Step 1: as in Step 2: not yet.", "Step 2: b"]),
    ("named", "Step 1: a\nStep 2: b\n\nThe answer is 4.", ["Step 1: a", "Step 2: b", "The answer is 4."]),
    ("named", "Let us see.\nStep 1: a\nStep 2: b", ["Let us see.\nStep 1: a", "Step 2: b"]),
    ("named", "Step 1.5 is odd\nStep 1: a\nStep 2: b", ["Step 1.5 is odd\nStep 1: a", "Step 2: b"]),
    ("numbered", "1. a\n2. 3.14 is pi\n3. c", ["1. a", "2. 3.14 is pi", "3. c"]),
    ("numbered", "1) a\n2) b", ["1) a", "2) b"]),
    ("numbered", "(1) a\n(2) b", ["(1) a", "(2) b"]),
    ("numbered", "**1.** a\n**2.** b", ["**1.** a", "**2.** b"]),
    ("numbered", "1. a\n   1. in a\n   2. in a\n2. b", ["1. a\n   1. in a\n   2. in a", "2. b"]),
    ("numbered", "1. In\n2024. was a year\n2. b", ["1. In\n2024. was a year", "2. b"]),
    (
        "numbered",
        "1. a\n\n   more\n\n2. b\n\n   more\n\nSo c.",
        ["1. a\n\n   more", "2. b\n\n   more", "So c."],
    ),
    ("numbered", "1. a\r\n2. b\r\n\r\nc", ["1. a", "2. b", "c"]),
    ("numbered", "  1. a\n  2. b", ["1. a", "2. b"]),
    ("latex", r"\begin{enumerate}\item a\item b", [r"\begin{enumerate}\item a", r"\item b"]),
    ("paragraphs", "a\nb\n\nc\n \n\t\nd\n", ["a\nb", "c", "d"]),
    ("paragraphs", "a\n\n$$\nx\n\n= y\n$$\n\nb", ["a", "$$\nx\n\n= y\n$$", "b"]),
    ("paragraphs", "a\n\n```\n1. no\n\n2. no\n```\n\nb", ["a", "```\n1. no\n\n2. no\n```", "b"]),
    ("lines", "a\nb\n  c\n", ["a", "b", "c"]),
    ("lines", "3.14 is pi\n2.72 is e", ["3.14 is pi", "2.72 is e"]),
    ("lines", "1. a\n1. b", ["1. a", "1. b"]),
    (
        "lines",
        "a\n\\begin{align}\nx\n= y\n\\end{align}\nb",
        ["a", "\\begin{align}\nx\n= y\n\\end{align}", "b"],
    ),
    ("lines", "a\u2028b\x0bc\nd", ["a\u2028b\x0bc", "d"]),
    (None, "all at once", ["all at once"]),
    (None, "1. only one", ["1. only one"]),
    (None, "```\na\n\nb", ["```\na\n\nb"]),
    (None, "", []),
    (None, " \n\t\n ", []),
]


@pytest.mark.parametrize(("style", "text", "steps"), WRITTEN)
def test_steps_are_found_by_how_the_text_is_written(style: str | None, text: str, steps: list[str]):
    assert steps_of(text) == steps
    assert style_of(text) == style


def test_lists_in_lists_are_part_of_a_step_of_latex():
    first, second, last = steps_of(LATEX)
    assert first.startswith("We argue by cases.") and first.endswith(r"\end{itemize}")
    assert second == "\\item \\itemsep is no item\n\\end{enumerate}"
    assert last == "So it holds."


def test_a_style_can_be_named():
    text = "Step 1: a\nStep 2: b\n\nc\nd"
    assert steps_of(text, "lines") == ["Step 1: a", "Step 2: b", "c", "d"]
    assert steps_of(text, "paragraphs") == ["Step 1: a\nStep 2: b", "c\nd"]
    assert steps_of(text, "latex") == [text], "what is not written so is one step"


@pytest.mark.parametrize("style", [None, *STYLES])
def test_nothing_is_lost_but_white_space(style):
    draw = random.Random(str(style))
    bits = [
        "Step 1: ",
        "Step 2. ",
        "1. ",
        "2) ",
        "(3) ",
        "\n",
        "\n\n",
        "  ",
        "a",
        "b.",
        "```",
        "$$",
        "\\item ",
        "99999",
    ]
    bits += [
        "\\begin{enumerate}",
        "\\end{enumerate}",
        "\\[",
        "\\]",
        "\r\n",
        "é",
        "👍",
        "%",
        "**",
        "\\begin{align}",
    ]
    for _ in range(300):
        text = "".join(draw.choices(bits, k=draw.randint(0, 25)))
        steps = steps_of(text, style)
        assert re.sub(r"\s", "", "".join(steps)) == re.sub(r"\s", "", text)
        assert all(step.strip() == step and step for step in steps)


NASTY = [
    *["\\begin{a}" * 20_000, "$$" * 50_000 + "$", "\n" * 100_000 + "x", " \n" * 50_000, "1. " * 30_000],
    *["*" * 100_000 + "step", "```\n" * 30_000, "> " * 50_000, "\\[ " * 30_000, "Step " + "9" * 5000 + ":"],
    *["(" * 100_000, "\\begin{enumerate}" * 10_000 + "\\item a", "\n1)" * 30_000, "step 1 " * 20_000],
]


@pytest.mark.parametrize("text", NASTY, ids=lambda text: repr(text[:8]))
def test_long_and_nasty_texts_are_read_in_one_go(text: str):
    assert re.sub(r"\s", "", "".join(steps_of(text))) == re.sub(r"\s", "", text)


ODDS = [0.0, math.log(3), math.log(9)]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("min", 0.5), ("product", 0.3375), ("log_product", math.log(0.3375)), ("mean", 2.15 / 3), ("last", 0.9)],
)
def test_an_answer_comes_to_what_its_steps_say(aggregation, expected: float):
    assert aggregate(ODDS, aggregation) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_step_is_the_answer_and_more_certainty_is_never_worth_less(aggregation):
    one = aggregate([1.5], aggregation)
    assert one == pytest.approx(
        math.log(probability(1.5)) if aggregation == "log_product" else probability(1.5)
    )
    raised = [aggregate([0.3, 0.2 + more, 0.1 + more], aggregation) for more in (0.0, 0.5, 5.0)]
    assert raised == sorted(raised)


@pytest.mark.parametrize("odds", [[-1e4, 1e4], [1e4] * 10_000, [-800.0] * 3, [math.inf, -math.inf]])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_extreme_steps_keep_their_meaning(odds: Sequence[float], aggregation):
    found = aggregate(odds, aggregation)
    assert not math.isnan(found)
    if aggregation != "log_product":
        assert 0 <= found <= 1


def test_log_probabilities_keep_their_digits():
    assert log_probability(800.0) == pytest.approx(-math.exp(-800.0), abs=0.0)
    assert log_probability(40.0) == pytest.approx(-math.exp(-40.0), rel=1e-9)
    assert log_probability(-1e6) == -1e6
    assert aggregate([-1.0] * 2000, "product") == 0.0
    assert aggregate([-1.0] * 2000, "log_product") == pytest.approx(2000 * math.log(probability(-1.0)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_step_and_no_number_are_no_reward(aggregation):
    with pytest.raises(DataError, match="an answer without steps has no reward"):
        aggregate([], aggregation)
    with pytest.raises(DataError, match="a step has no number"):
        aggregate([0.0, math.nan], aggregation)


def test_answers_become_steps_of_their_own_kind():
    say = {"role": "assistant", "content": "1. a\n2. b"}
    tool = {"role": "tool", "content": "4"}
    assert answered("q", "1. a\n2. b") == {"prompt": "q", "completions": ["1. a", "2. b"]}
    ask = [{"role": "user", "content": "q"}]
    assert answered(ask, [say]) == {"prompt": ask, "completions": ["1. a", "2. b"]}
    assert answered("q", [say]) == {"prompt": ask, "completions": ["1. a", "2. b"]}
    assert answered(ask, [say, tool, say])["completions"] == [[say, tool], [say]]
    thought = {**say, "reasoning_content": "hm"}
    assert answered(ask, [thought])["completions"] == [[thought]]
    assert answered(ask, " \n ")["completions"] == []
