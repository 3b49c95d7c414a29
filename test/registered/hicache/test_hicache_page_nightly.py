"""The page of `GET /hicache` in a real browser: it shows a server's cache, and nothing goes wrong.

Nightly, because a browser may have to be installed.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.servers.cache_pictures import (
    SCHEMES,
    SIZES,
    give_key,
    server_under_load,
    show,
    take_pictures,
)
from rigs.servers.chromium import Chromium, find_chromium
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="nightly-test-cpu", nightly=True)


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    with server_under_load(num_requests=40) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Chromium]:
    path = find_chromium(may_install=True)
    assert path is not None, "install Chromium (Debian: apt-get install chromium)"
    with Chromium(path) as running:
        yield running


def test_it_shows_the_cache_in_both_schemes_and_sizes(
    server: EngineServer, browser: Chromium, tmp_path: Path
) -> None:
    pictures = take_pictures(browser, server, tmp_path)
    assert len(pictures) == len(SCHEMES) * len(SIZES)
    for picture in pictures:
        width, height = struct.unpack(">II", picture.read_bytes()[16:24])
        assert width == SIZES[picture.stem.rpartition("-")[2]]
        assert height > 800
    refusals = [one for one in browser.problems if "401" not in one]
    assert refusals == [], "before the key is given, 401 is right"
    assert set(browser.requested) == {f"{server.url}/hicache"}, "it asks no other address"
    assert browser.evaluate(
        "[...document.querySelectorAll('.scroll')].every(one => one.scrollWidth <= one.clientWidth)"
    ), "no column of the narrow page is cut"
    # The narrow page is not wider than the screen.
    assert browser.evaluate("document.documentElement.scrollWidth") == SIZES["narrow"]


def test_the_schemes_differ_and_the_text_stands_out(
    server: EngineServer, browser: Chromium
) -> None:
    colors = []
    for scheme in SCHEMES:
        show(browser, server, scheme, SIZES["wide"])
        colors.append(browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.body).color].map(one => one.match(/\\d+/g).map(Number))"
        ))  # fmt: skip
    brightness = [[sum(color) / 3 for color in pair] for pair in colors]
    (light, light_text), (dark, dark_text) = brightness
    assert light - light_text > 150
    assert dark_text - dark > 150


def test_it_follows_the_server_and_says_so_when_it_is_gone(
    server: EngineServer, browser: Chromium
) -> None:
    show(browser, server, "light", SIZES["wide"])
    before = browser.evaluate("document.querySelector('#hits .head .end').textContent")
    browser.wait_for(
        f"document.querySelector('#hits .head .end').textContent != {before!r}", timeout=120
    )
    for part in ("tiers", "flows", "hits", "queues", "decisions", "prefixes", "store",
                 "speculation"):  # fmt: skip
        text = browser.evaluate(f"document.getElementById('{part}').innerText")
        assert text.strip(), part
        assert "undefined" not in text, part
        assert "NaN" not in text, part
    amounts = "[0, 9999, 278500].map(one => amount(one, 'bytes')).join()"
    assert browser.evaluate(amounts).replace("\u00a0", " ") == "0 B,9,999 B,278.5 kB"
    browser.call("Network.emulateNetworkConditions",
                 offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)  # fmt: skip
    browser.wait_for("document.getElementById('state').textContent.startsWith('no answer')")
    assert not browser.evaluate("document.getElementById('view').hidden"), "the last state stays"


def test_a_password_in_the_address_does_no_harm(server: EngineServer, browser: Chromium) -> None:
    """`fetch` refuses addresses with a password, so also relative ones on such a page."""
    browser.open(server.url.replace("//", "//user:password@") + "/hicache")
    browser.wait_for("document.getElementById('state')?.textContent == 'a key is needed'")


def test_verdicts_and_answers_of_others_are_told(server: EngineServer, browser: Chromium) -> None:
    show(browser, server, "light", SIZES["wide"])
    browser.evaluate(
        "const json = Response.prototype.json; Response.prototype.json = async function () {"
        " return {...await json.call(this), verdicts: ['L1 is too small']}; }; refresh(), 0"
    )
    browser.wait_for("document.getElementById('verdicts').textContent == 'L1 is too small'")
    browser.evaluate("fetch = async () => new Response('<h1>', {status: 401}), refresh(), 0")
    state = "document.getElementById('state').textContent"
    browser.wait_for(f"{state}.startsWith('no answer: HTTP 401, not from this server')")


def test_groups_are_shown_in_one_tab_with_one_key(browser: Chromium) -> None:
    with ForkedServer(
        "--hicache-storage-backend", "file", "--page-size", "64", "--max-total-tokens", "4096",
        "--tp-size", "2", "--attn-dp-size", "2", "--device", "cpu",
    ) as groups:  # fmt: skip
        for scheme, width in itertools.product(SCHEMES, SIZES.values()):
            browser.prefer(scheme)
            browser.open(f"{groups.url}/hicache", width=width)
            give_key(browser)
            browser.wait_for("!document.getElementById('view').hidden")
            for group in (1, 0, 1):
                browser.evaluate(f"document.querySelectorAll('#groups > *')[{group}].click()")
                shown = "document.querySelector('#groups b').textContent"
                browser.wait_for(f"{shown} == 'group {group}'")
                assert browser.evaluate("document.getElementById('ask').hidden"), "it has the key"
                assert browser.evaluate("location.search") == f"?dp_rank={group}"
            assert browser.evaluate("document.documentElement.scrollWidth") == width
            assert browser.evaluate("document.getElementById('groups').innerText").split() == [
                "group", "0", "group", "1",
            ]  # fmt: skip
