"""The report in a browser: headless Chromium with its own driver."""

import base64
import json
import re
import shutil
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from fedagrac.report import find_runs, write_report
from run_folders import record, run_small, small_experiment, write_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
]

STEPS = {"kind": "linear", "first": 1, "increment": 3}
CURVES = ("accuracy-rounds", "accuracy-time", "accuracy-bytes", "test-loss", "train-loss")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report that `fedagrac run` writes."""
    experiment = small_experiment(4, 6, STEPS, ("fedavg", "scaffold", "fedagrac"))
    return run_small(tmp_path_factory.mktemp("browser"), experiment) / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def report(browser, page):
    """The browser with the page open and drawn."""
    opened(browser, page)
    return browser


def opened(browser, page):
    browser.get("about:blank")
    browser.get_log("performance")  # discard the messages of earlier pages
    browser.get_log("browser")
    browser.get(page.as_uri())
    drawn = "return [...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.plot-container'))"
    WebDriverWait(browser, 300).until(lambda b: b.execute_script(drawn))


def until(browser, script, *arguments):
    """Wait until the script returns something true; return it."""
    return WebDriverWait(browser, 300).until(lambda b: b.execute_script(script, *arguments))


@contextmanager
def emulating(browser, **settings):
    """Show the page on another screen; each setting holds the arguments of a browser command."""
    commands = {
        "phone": ("Emulation.setDeviceMetricsOverride", "Emulation.clearDeviceMetricsOverride"),
        "touch": ("Emulation.setTouchEmulationEnabled", None),
        "media": ("Emulation.setEmulatedMedia", None),
    }
    for name, value in settings.items():
        browser.execute_cdp_cmd(commands[name][0], value)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


PHONE = {
    "phone": {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
    "touch": {"enabled": True},
}
DARK = {"media": {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}}


def requests(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_it_loads_without_an_error_and_no_request_leaves(report, page):
    assert report.get_log("browser") == []
    asked = requests(report)
    assert page.as_uri() in asked
    assert [url for url in asked if url != page.as_uri() and not url.startswith("data:")] == []
    assert report.title.startswith("small: 6 clients, 1 to 16 local steps")


def test_every_curve_is_there(report):
    for figure in CURVES:
        drawn = report.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} .scatterlayer .trace .js-line`)]"
            ".map((line) => [line.style.stroke, line.getAttribute('d').length])",
            figure,
        )
        names = [e.text for e in report.find_elements(By.CSS_SELECTOR, f"#{figure} .legendtext")]
        assert names == ["fedavg", "scaffold", "fedagrac"]
        assert len(drawn) == 3 + figure.startswith("accuracy")  # and the target
        assert all(length > 10 for _, length in drawn)
        assert len({stroke for stroke, _ in drawn}) == len(drawn)
    assert report.find_elements(By.CSS_SELECTOR, "#labels-0 .heatmaplayer image")
    assert len(report.find_elements(By.CSS_SELECTOR, "#steps-0 .barlayer .point")) == 6


def test_pointing_at_a_curve_shows_its_values(report):
    plot = report.find_element(By.ID, "accuracy-bytes")
    report.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    x, y, name, value = report.execute_script(
        "const plot = arguments[0], { xaxis, yaxis } = plot._fullLayout, trace = plot.data[1];"
        "const box = plot.getBoundingClientRect();"
        "const x = xaxis._offset + xaxis.d2p(trace.x[2]), y = yaxis._offset + yaxis.d2p(trace.y[2]);"
        "return [box.left + x, box.top + y, trace.name, trace.y[2]]",
        plot,
    )
    for step in (3, 0):
        report.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x - step, "y": y})
    shown = until(report, "return arguments[0].querySelector('.hoverlayer .hovertext')?.textContent", plot)
    assert name in shown
    assert "round 3" in shown
    assert f"test accuracy {float(f'{value:.4g}'):g} %" in shown
    assert "MB moved" in shown


def visible(report):
    return report.execute_script(
        "return arguments[0].map((id) => document.getElementById(id).data.filter((t) => t.legendgroup)"
        ".map((t) => (t.visible ?? true) === true))",
        list(CURVES),
    )


def test_a_click_on_a_name_hides_it_in_all_curves_and_another_shows_it(report):
    assert visible(report) == [[True] * 3] * 5
    plot = report.find_element(By.ID, "accuracy-time")
    report.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    for wanted in (False, True):
        name = plot.find_elements(By.CSS_SELECTOR, ".legendtoggle")[1]
        ActionChains(report).move_to_element(name).click().perform()
        WebDriverWait(report, 20).until(lambda b, w=wanted: visible(b) == [[True, w, True]] * 5)
        lines = plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace .js-line")
        assert len(lines) == 3 + wanted
    name = plot.find_elements(By.CSS_SELECTOR, ".legendtoggle")[2]
    ActionChains(report).move_to_element(name).double_click().perform()
    WebDriverWait(report, 20).until(lambda b: visible(b) == [[False, False, True]] * 5)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_linear_and_logarithmic_axes(report, axis):
    chart = report.find_element(By.CSS_SELECTOR, "figure:has(#accuracy-rounds)")
    kind = f"return document.getElementById('accuracy-rounds')._fullLayout.{axis}axis.type"
    assert report.execute_script(kind) == "linear"
    for name in ("log", "linear"):
        button = chart.find_element(By.CSS_SELECTOR, f"[data-axis={axis}axis][data-type={name}]")
        report.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
        button.click()
        until(report, f"{kind} === arguments[0]", name)
        pressed = chart.find_elements(By.CSS_SELECTOR, f"[data-axis={axis}axis][aria-pressed=true]")
        assert [e.text for e in pressed] == [name]
    assert report.execute_script("return document.getElementById('test-loss')._fullLayout.yaxis.type") == "linear"
    assert report.get_log("browser") == []


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_readable_in_light_and_in_dark_mode(report, mode):
    with emulating(report, **(DARK if mode == "dark" else {})):
        paper = report.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (luminance(paper) < 0.05) == (mode == "dark")
        texts = report.execute_script(
            "const css = (s, key) => [...document.querySelectorAll(s)].map((e) => getComputedStyle(e)[key]);"
            "return [...css('h1, h2, h3, p, td, th, dt, dd, button, a, pre', 'color'),"
            "        ...css('.plot .xtick text, .plot .ytick text, .plot .legendtext, .plot .xtitle', 'fill')]"
        )
        assert len(texts) > 100
        for text in set(texts):
            low, high = sorted([luminance(text), luminance(paper)])
            assert (high + 0.05) / (low + 0.05) >= 4.5, text


def test_it_fits_a_phone(browser, page):
    with emulating(browser, **PHONE):
        opened(browser, page)
        assert browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        wide = browser.execute_script(
            "return [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 390.5"
            " && !e.closest('.scroll, pre, svg')).map((e) => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        overlaps = browser.execute_script(
            "return arguments[0].filter((id) => { const plot = document.getElementById(id);"
            " const legend = plot.querySelector('.legend').getBoundingClientRect();"
            " return legend.bottom > plot.querySelector('.nsewdrag').getBoundingClientRect().top; })",
            list(CURVES),
        )
        assert overlaps == []
        plot = browser.find_element(By.ID, "accuracy-rounds")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
        before = browser.execute_script("return scrollY")
        touch = "Input.dispatchTouchEvent"
        browser.execute_cdp_cmd(touch, {"type": "touchStart", "touchPoints": [{"x": 195, "y": 480}]})
        for y in range(470, 270, -20):
            browser.execute_cdp_cmd(touch, {"type": "touchMove", "touchPoints": [{"x": 195, "y": y}]})
        browser.execute_cdp_cmd(touch, {"type": "touchEnd", "touchPoints": []})
        until(browser, "return scrollY > arguments[0] + 100", before)  # a finger on a curve scrolls the page
        assert browser.get_log("browser") == []


def test_it_prints_on_paper_in_light_colours_and_comes_back(report):
    with emulating(report, **DARK):
        width = "return document.getElementById('accuracy-rounds')._fullLayout.width"
        before = report.execute_script(width)
        report.execute_script(
            "addEventListener('beforeprint', () => { window.printed = (() => {" + width + "})(); })"
        )
        paper = report.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
        pdf = base64.b64decode(paper["data"])
        assert pdf.startswith(b"%PDF")
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6
        assert report.execute_script("return window.printed") == 660
        until(report, f"{width.replace('return ', 'return Math.abs(')} - arguments[0]) < 1", before)
        report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert (
            report.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )


def test_hostile_names_are_shown_and_do_nothing(browser, tmp_path):
    hostile = "</script><script>window.taken = 1</script><img src=//x.invalid/y onerror='taken=1'><b>%{x}</b>"
    folder = tmp_path / "a" / hostile.replace("/", "-")
    write_run(folder, [record(1, 0.5, 1.0), record(2, 0.6, 0.9)], "fedavg", label=hostile, name=hostile)
    write_run(tmp_path / "b", [record(1, 0.5, 1.0), record(2, 0.6, 0.9)], "scaffold", "diverged", hostile)
    page = write_report(find_runs([folder, tmp_path / "b"]), tmp_path / "out")
    opened(browser, page)
    names = [e.text for e in browser.find_elements(By.CSS_SELECTOR, "#accuracy-rounds .legendtext")]
    assert names[0] == f"{hostile[:22]}…{hostile[-21:]}"
    assert hostile in browser.find_element(By.ID, "summary").text
    assert browser.execute_script("return window.taken") is None
    assert browser.find_elements(By.CSS_SELECTOR, "img, main b") == []
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []


def test_the_content_policy_blocks_added_scripts_and_pictures(report):
    """A script or a picture that is added to the open page is not run or fetched."""
    report.execute_script(
        "const script = document.createElement('script'); script.textContent = 'window.taken = 1';"
        "document.body.append(script);"
        "const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/';"
        "document.body.append(image);"
    )
    messages = WebDriverWait(report, 10).until(lambda b: b.get_log("browser"))
    assert report.execute_script("return window.taken") is None
    assert any("Content Security Policy" in entry["message"] for entry in messages)
