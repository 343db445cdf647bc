"""The page at `/` in a real browser; skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cramlm.serving.app import PAGE_HEADERS, page
from server_process import LABELS, serving

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tiny_export: Path) -> Iterator[str]:
    folder = Path(shutil.copytree(tiny_export, tmp_path_factory.mktemp("paged") / "<i>export"))
    with serving(folder, "--token", TOKEN) as server:
        yield server.url


def test_the_page_loads_nothing_external_and_escapes_the_name() -> None:
    content = page("<script>alert(1)</script>", needs_token=False, reads_pairs=True).decode()
    assert "<script>alert" not in content
    assert content.count("&lt;script&gt;alert(1)") == 2
    assert "://" not in content
    assert "innerHTML" not in content
    assert "unsafe" not in PAGE_HEADERS["content-security-policy"]


def assert_bars_are_beside_long_labels(article: Any) -> None:
    """The longest label is made longer than the page is wide."""
    article.get_by_role("term").first.evaluate("term => { term.textContent = 'a label of many words '.repeat(20) }")
    bars = article.locator("meter").evaluate_all("bars => bars.map(bar => bar.offsetWidth)")
    assert len(set(bars)) == 1
    assert bars[0] > 50
    figures = article.locator("dd:nth-of-type(even)").evaluate_all("figures => figures.map(figure => figure.offsetHeight)")
    assert max(figures) < 40, "in one line"


def test_texts_are_classified_in_a_browser(url: str, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 380, "height": 800})
    try:
        tab = context.new_page()
        messages: list[str] = []
        requested: list[str] = []
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: requested.append(request.url))
        tab.goto(url)
        tab.get_by_label("Texts", exact=True).fill("<img src=x onerror=alert(1)> river\n\nkinase " + "water " * 60)
        tab.get_by_role("button", name="Predict").click()
        tab.get_by_text("the token is missing or wrong").wait_for()
        status = tab.get_by_role("status")
        assert status.inner_text() == "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
        assert status.locator("code").all_inner_texts() == ["Authorization: Bearer TOKEN"]
        tab.get_by_label("Token").fill(TOKEN)
        tab.keyboard.press("Enter")
        tab.get_by_text("2 texts in").wait_for()
        articles = tab.get_by_role("article")
        assert articles.count() == 2
        assert articles.first.get_by_text("<img src=x onerror=alert(1)> river").is_visible()
        assert articles.nth(1).get_by_text("the end was cut off").is_visible()
        assert articles.first.get_by_role("term").count() == len(LABELS)
        assert articles.first.get_by_text("très <b>bien</b>").first.is_visible()
        assert_bars_are_beside_long_labels(articles.first)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            assert (tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)") == (scheme == "dark")
        assert all(address.startswith((url, "data:")) for address in requested), requested
        assert not [line for line in messages if "401" not in line], messages
    finally:
        context.close()


@pytest.fixture(scope="module")
def url_of_pairs(tmp_path_factory: pytest.TempPathFactory, tiny_export: Path) -> Iterator[str]:
    folder = Path(shutil.copytree(tiny_export, tmp_path_factory.mktemp("paged") / "export"))
    (folder / "provenance.json").write_text(json.dumps({"config": {"task": {"text_pair_column": "second"}}}), "utf-8")
    with serving(folder) as server:
        yield server.url


def test_pairs_are_classified_in_a_browser(url_of_pairs: str, browser: Any) -> None:
    tab = browser.new_page()
    try:
        tab.goto(url_of_pairs)
        first, second = tab.get_by_label("First texts"), tab.get_by_label("Second texts")
        first.fill("a river\n\nwater\n")
        second.fill("the sea\n\n")
        tab.get_by_role("button", name="Predict").click()
        tab.get_by_text("Line 3 has one text only").wait_for()
        second.fill("the sea\n\nkinase <b>")
        tab.get_by_role("button", name="Predict").click()
        tab.get_by_text("2 pairs in").wait_for()
        last = tab.get_by_role("article").nth(1)
        assert last.get_by_text("water").is_visible()
        assert last.get_by_text("kinase <b>").is_visible()
        for width in (400, 1300):
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            beside = first.bounding_box()["y"] == second.bounding_box()["y"]
            assert beside == (width > 400)
    finally:
        tab.close()


def test_texts_from_right_to_left_are_shown_as_such_and_one_text_is_not_many(url: str, browser: Any) -> None:
    tab = browser.new_page()
    try:
        tab.goto(url)
        tab.get_by_label("Token").fill(TOKEN)
        field = tab.get_by_label("Texts", exact=True)
        field.fill("שלום, עולם! (kinase)")
        tab.get_by_role("button", name="Predict").click()
        tab.get_by_text("1 text in").wait_for()
        for shown in (field, tab.get_by_role("article").locator("p").first):
            assert shown.evaluate("element => getComputedStyle(element).direction") == "rtl"
        field.fill("kinase (שלום)")
        assert field.evaluate("element => getComputedStyle(element).direction") == "ltr"
    finally:
        tab.close()


def test_the_page_says_how_many_labels_it_does_not_show(url: str, browser: Any) -> None:
    tab = browser.new_page()
    try:
        tab.goto(url)
        for labels in (10, 14):
            prediction = {"label": "0", "probabilities": {f"{number}": 1 / labels for number in range(labels)}}
            tab.evaluate("prediction => show(['a text'], prediction)", prediction)
        all_shown, some_shown = tab.get_by_role("article").all()
        assert [article.get_by_role("term").count() for article in (all_shown, some_shown)] == [10, 10]
        assert "not shown" not in all_shown.inner_text()
        assert some_shown.get_by_text("The 10 most probable labels; 4 more are not shown.").is_visible()
    finally:
        tab.close()


def test_the_page_of_a_model_of_single_texts_has_no_field_for_second_ones(url: str, browser: Any) -> None:
    tab = browser.new_page()
    try:
        tab.goto(url)
        assert tab.get_by_label("Texts", exact=True).is_visible()
        assert not tab.get_by_label("Second texts").is_visible()
    finally:
        tab.close()
