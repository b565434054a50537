"""The page in a browser, where one is installed: it opens, asks for nothing, and does what it says."""

import pytest

from outsize.reporting.collect import collect
from outsize.reporting.html_page import make_page, page_data
from report.browser import CHROMIUM, Browser
from report.recorded import line, make_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

SECTIONS = [
    "verdict",
    "time",
    "curves",
    "predicted",
    "timeline",
    "units",
    "over-time",
    "memory",
    "gpus",
    "about",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run, a long one, and two beside each other."""
    directory = tmp_path_factory.mktemp("pages")
    first = collect(make_run(directory / "first", 10))
    long = collect(make_run(directory / "long", 1010))
    second = collect(make_run(directory / "second", 10, waits={"optimizer": {"host": 0.4}}))
    for name, runs in {"one": [first], "long": [long], "two": [first, second]}.items():
        (directory / f"{name}.html").write_text(make_page(page_data(runs)))
    return directory


def open_page(browser, path, **options):
    browser.problems.clear()
    browser.open(path.as_uri(), **options)


def ids(browser):
    return browser.run("[...document.querySelectorAll('main section')].map((s) => s.id)")


@pytest.mark.parametrize("name", ["one", "long", "two"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_page_has_every_section_and_asks_for_nothing(browser, pages, name, width, dark):
    open_page(browser, pages / f"{name}.html", width=width, dark=dark)
    assert ids(browser) == SECTIONS
    assert browser.problems == []
    # Nothing is wider than the window.
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(16, 18, 22)" if dark else "rgb(247, 247, 245)"
    )


def test_what_can_be_seen_can_be_heard(browser, pages):
    open_page(browser, pages / "one.html")
    unnamed = browser.run(
        """[...document.querySelectorAll('svg, canvas, [role=img], button, input')].filter((e) =>
        !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('[aria-hidden]'))).map((e) =>
        e.outerHTML)"""
    )
    assert unnamed == []
    assert "loss" in browser.run(
        "document.querySelector('#curves svg').getAttribute('aria-label').toLowerCase()"
    )
    assert browser.run("document.documentElement.lang") == "en"
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1


CONTRASTS = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255);
  const light = (rgb) => rgb.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)|transparent|color\\(/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('h1, h2, p, td, th, dt, dd, .name, .note, .legend span, summary, .pill, .now')]
    .filter((e) => e.textContent.trim()).map((e) => {
      const [a, b] = [light(parse(getComputedStyle(e).color)), light(parse(behind(e)))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.textContent.slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_what_is_behind_it(browser, pages, dark):
    """WCAG 2 asks for a contrast of 4.5 to 1."""
    open_page(browser, pages / "one.html", dark=dark)
    assert browser.run(CONTRASTS) == []


def test_a_unit_is_found_by_its_name_and_by_its_number(browser, pages):
    open_page(browser, pages / "one.html")
    search = """(text) => { const box = document.querySelector('#timeline input'); box.value = text;
      box.dispatchEvent(new Event('input')); return document.querySelector('#timeline output').textContent; }"""
    by_name = browser.run(f"({search})('layers.3')")
    assert by_name == browser.run(f"({search})('4')")
    # Two loads, 4 forwards, 4 backwards, a gradient, a step.
    assert by_name.startswith("12 ops")
    assert browser.run(f"({search})('nothing of the kind')") == "no such unit or op"
    assert browser.run(f"({search})('')") == ""


def test_a_timeline_zooms_by_keys_and_tells_of_an_op_under_the_pointer(browser, pages):
    open_page(browser, pages / "one.html")
    look = "document.querySelector('#timeline canvas').toDataURL()"
    before = browser.run(look)
    press = """(key) => document.querySelector('#timeline canvas')
      .dispatchEvent(new KeyboardEvent('keydown', { key, cancelable: true }))"""
    browser.run(f"({press})('+')")
    assert browser.run(look) != before
    browser.run(f"({press})('0')")
    assert browser.run(look) == before
    told = browser.run(
        """(() => { const canvas = document.querySelector('#timeline canvas'), box = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 110, clientY: box.top + 24 + 26 +
        13 })); return document.getElementById('tip').textContent; })()"""
    )
    assert told.startswith("LOAD 0@w0.0")
    assert "unit model.embed_tokens" in told


def test_light_and_dark_are_switched_by_a_button(browser, pages):
    open_page(browser, pages / "one.html")
    color = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(color)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(color) != light
    assert browser.run("document.getElementById('theme').textContent") == "Light"


def test_two_runs_stand_beside_each_other(browser, pages):
    open_page(browser, pages / "two.html")
    assert browser.run("document.querySelector('h1').textContent") == "first and second"
    verdicts = browser.run("[...document.querySelectorAll('.verdict .lead')].map((e) => e.textContent)")
    assert verdicts == [
        "Limited by the link between host and device",
        "Limited by the optimizer on the host",
    ]
    assert browser.run("document.querySelectorAll('#curves svg')[0].querySelectorAll('path').length") == 2


ROWS = """Object.fromEntries([...document.querySelectorAll('#top tbody tr')].map((row) =>
  [row.cells[0].textContent, row.cells[3].style.color]))"""


def test_steps_of_other_tokens_are_not_called_better_for_being_shorter(browser, tmp_path):
    """The second takes an eighth of the tokens per step, in half the time: a quarter of the throughput."""
    first = collect(make_run(tmp_path / "first", 10, seconds=1.2))
    less = {"tokens": 2048, "tokens_per_s": 2048 / 0.6}
    second = collect(make_run(tmp_path / "second", 10, seconds=0.6, **less))
    (tmp_path / "page.html").write_text(make_page(page_data([first, second])))
    open_page(browser, tmp_path / "page.html")
    tones = browser.run(ROWS)
    assert tones["Step of another size"] == tones["Tokens per step"] == "var(--soft)"
    assert tones["Throughput"] == "var(--bad)"
    alike = collect(make_run(tmp_path / "alike", 10, seconds=0.6))
    (tmp_path / "page.html").write_text(make_page(page_data([first, alike])))
    open_page(browser, tmp_path / "page.html")
    assert browser.run(ROWS)["Step"] == "var(--good)"


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": None, "grad_norm": None},
        {"mfu": None, "gpus": [], "tiers": {}, "waits": {}},
        {"tokens": 0, "tokens_per_s": 0.0},
    ],
    ids=["not-finite", "little-known", "no-tokens"],
)
def test_a_run_of_one_step_and_of_little_is_shown(browser, tmp_path, changes):
    run = collect(make_run(tmp_path / "run", 1, **changes))
    (tmp_path / "page.html").write_text(make_page(page_data([run])))
    open_page(browser, tmp_path / "page.html")
    assert browser.problems == []
    assert "curves" in ids(browser)
    assert line(1)["step"] == 1
