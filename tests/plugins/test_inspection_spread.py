from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain_plugins.inspection.bars import svg_bars, text_bars
from posttrain_plugins.inspection.spread import Bin, Spread, quantile


def test_quantiles_are_values_that_occur() -> None:
    ordered = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert [quantile(ordered, share) for share in (0.0, 0.1, 0.5, 0.95, 1.0)] == [1, 1, 5, 10, 10]


def test_a_spread_by_hand() -> None:
    spread = Spread.of([7, 3, 3, 11])
    assert spread is not None
    assert (spread.least, spread.median, spread.mean, spread.p95, spread.most) == (3, 3, 6.0, 11, 11)
    assert [(each.label, each.count) for each in spread.bins] == [
        ("3", 2), ("4", 0), ("5", 0), ("6", 0), ("7", 1), ("8", 0), ("9", 0), ("10", 0), ("11", 1),
    ]  # fmt: skip


def test_nothing_has_no_spread() -> None:
    assert Spread.of([]) is None


def test_one_far_value_does_not_flatten_the_rest() -> None:
    spread = Spread.of([*range(1, 200), 1_000_000])
    assert spread is not None
    assert spread.bins[-1].high is None
    assert spread.bins[-1].count == 1
    assert len(spread.bins) > 5


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=300))
def test_every_value_is_in_one_bin(values: list[int]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    for each in spread.bins:
        upper = float("inf") if each.high is None else each.high
        assert each.count == sum(each.low <= value < upper for value in values)
    assert sum(each.count for each in spread.bins) == len(values)
    assert len(spread.bins) <= 15


@pytest.mark.parametrize(
    ("bin", "label"), [(Bin(0, 100, 1), "0–99"), (Bin(7, 8, 1), "7"), (Bin(400, None, 1), "400 or more")]
)
def test_labels(bin: Bin, label: str) -> None:
    assert bin.label == label


def test_bars_are_as_long_as_their_counts() -> None:
    lines = text_bars([Bin(0, 10, 8), Bin(10, 20, 4), Bin(20, 30, 0), Bin(30, 40, 1)], width=8)
    assert [line.count("█") for line in lines] == [8, 4, 0, 1]
    assert lines[0] == "  0–9  ████████  8"


def test_a_small_count_still_shows() -> None:
    assert "▏" in text_bars([Bin(0, 1, 10_000), Bin(1, 2, 1)])[1]


def test_svg_bars() -> None:
    class Reader(HTMLParser):
        widths: list[float] = []
        texts: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "rect":
                self.widths.append(float(dict(attrs)["width"] or 0))

        def handle_data(self, data: str) -> None:
            self.texts.append(data)

    reader = Reader()
    reader.feed(svg_bars([Bin(0, 10, 8), Bin(10, 20, 4), Bin(20, 30, 0)], 'lengths "of" <rows>'))
    assert reader.widths[0] == pytest.approx(2 * reader.widths[1])
    assert reader.widths[2] == 0
    assert "0–9: 8" in reader.texts
