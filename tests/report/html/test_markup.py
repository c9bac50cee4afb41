"""Tests that markup always escapes."""

import html
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.report.html.markup import Html, join, table, tag


class Reader(HTMLParser):
    """Content of an element as a browser would see it: its text and its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = "", [], {}

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


VISIBLE = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=30)


@pytest.mark.slow
@given(text=VISIBLE, value=VISIBLE)
def test_whatever_the_text_it_is_read_back_and_makes_no_element(text: str, value: str) -> None:
    found = read(tag("p", text, title=value))
    assert found.text == text
    assert found.tags == ["p"]
    assert found.attributes["title"] == value


@pytest.mark.slow
@given(cells=st.lists(VISIBLE, min_size=1, max_size=4))
def test_cells_of_a_table_are_text(cells: list[str]) -> None:
    found = read(table(cells, [cells]))
    assert found.text == "".join(cells) * 2
    assert found.tags.count("td") == len(cells)


def test_markup_inside_markup_is_kept() -> None:
    assert tag("p", tag("b", "<")) == "<p><b>&lt;</b></p>"


def test_children_may_be_nested_and_missing() -> None:
    assert join(["a", None, ["b", tag("i", "&")]]) == "ab<i>&amp;</i>"
    assert isinstance(join([]), Html)


def test_attributes_without_a_value_and_left_out_ones() -> None:
    assert tag("i", hidden=True, open=False, title=None, data_zoom="in", class_="x") == (
        '<i hidden data-zoom="in" class="x"></i>'
    )


def test_numbers_of_attributes_are_short() -> None:
    assert tag("rect", width=1 / 3) == '<rect width="0.333333"/>'


def test_escaping_is_that_of_the_standard_library() -> None:
    assert tag("p", "<&>\"'") == f"<p>{html.escape('<&>', quote=False)}\"'</p>"
