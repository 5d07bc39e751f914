"""The models page: downloading, stopping, resuming, switching, and a model that fails to load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine

from notso.smollm3 import Engine, ModelFileError
from notso.smollm3.hub import download, registry
from notso.web.engine.models import ModelRegistry
from notso.web.values.wording import words

Serve = Callable[..., Any]
OpenPage = Callable[..., Page]
AXE = Path(__file__).parent / "axe" / "axe.min.js"


def load(path: Path | None) -> Engine:
    """Load the real engine; the fake Hub's file is not a model, so it fails as a damaged file does."""
    return Engine.load(path, threads=1)


def violations(page: Page) -> list[str]:
    """Return the violations that axe-core finds in the current page."""
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run().then(result => result.violations)")
    return [f"{each['id']}: {node['html'][:120]}" for each in found for node in each["nodes"]]


def test_model_download_can_be_stopped_resumed_and_loaded(
    serve: Serve, open_page: OpenPage, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    fake_hub.bytes_per_second, fake_hub.trickles_from = 500_000, 1_000_000
    server = serve(lambda: load(None), model_registry=ModelRegistry(load))
    page = open_page(server.url)
    page.get_by_role("link", name="Download SmolLM3-3B").click()
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
    page.locator("#facts > summary").click()
    expect(page.get_by_text("every 4th (2 of 8)")).to_be_visible()

    page.get_by_role("button", name="Download").click()

    bar = page.get_by_role("progressbar")
    expect(bar).to_be_visible()
    expect(page.get_by_text("B/s,")).to_be_visible()
    before = int(bar.get_attribute("value") or 0)
    page.wait_for_function("before => +document.querySelector('progress').value > before", arg=before)
    stop = page.get_by_role("button", name="Stop")
    stop.focus()
    page.wait_for_timeout(1500)  # at least one update
    expect(stop).to_be_focused()
    page.reload()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Stop").press("Enter")
    expect(page.get_by_text("already downloaded")).to_be_visible()
    expect(page.locator("#models-poll")).to_have_count(0)
    kept = download.part_path(official_file).stat().st_size

    fake_hub.bytes_per_second, fake_hub.trickles_from = 0, None
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("SHA-256 matches")).to_be_visible()
    assert fake_hub.gets[-1] == f"bytes={kept}-"

    page.get_by_role("button", name="Load small:Q4_K_M").click()
    expect(page.get_by_text("Could not load the model")).to_be_visible()  # random bytes, which are not a model
    page.get_by_role("button", name="Load demo").click()
    expect(page.locator("#model-demo").get_by_text("In use")).to_be_visible()


def test_start_page_updates_when_the_demo_model_is_replaced(
    serve: Serve, open_page: OpenPage, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    go_on = threading.Event()

    def load(path: Path | None, occupied: int = 0) -> ScriptedEngine:
        assert path is None or go_on.wait(60)
        engine = ScriptedEngine(name=path.stem if path else "demo", is_demo=path is None)
        engine.info = replace(engine.info, path=str(path or registry.demo_path()))
        return engine

    server = serve(lambda: load(None), model_registry=ModelRegistry(load, load_beside=load))
    page = open_page(server.url)
    page.get_by_role("link", name="Download SmolLM3-3B").click()
    page.get_by_role("button", name="Download").click()
    expect(page.get_by_text("SHA-256 matches")).to_be_visible()
    page.goto(server.url)
    page.locator("#text").fill("A draft")
    expect(page.get_by_text("This is a small demo model")).to_be_visible()
    go_on.set()
    expect(page.get_by_text("This is a small demo model")).to_have_count(0)
    expect(page.locator(".greeting .hello")).to_be_visible()
    expect(page.locator("#text")).to_have_value("A draft")


def test_load_failure_is_shown_and_demo_model_can_be_used(serve: Serve, open_page: OpenPage, own_home: Path) -> None:
    def fails() -> Engine:
        raise ModelFileError("blk.3.attn_q.weight is missing")

    page = open_page(serve(fails, model_registry=ModelRegistry(load)).url)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("blk.3.attn_q.weight is missing")
    banner.get_by_role("button", name=words["models_use_demo"]).click()
    expect(banner).to_contain_text("Demo model")
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant")).to_contain_text("help", ignore_case=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1100])
def test_models_page_has_no_accessibility_violations(
    serve: Serve, open_page: OpenPage, fake_hub: Any, official_file: registry.KnownFile, scheme: str, width: int
) -> None:
    fake_hub.bytes_per_second, fake_hub.trickles_from = 300_000, 600_000
    server = serve(lambda: load(None), model_registry=ModelRegistry(load))
    page = open_page(
        server.url + "models", color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True
    )
    page.locator("#facts > summary").click()
    expect(page.get_by_text("every 4th (2 of 8)")).to_be_visible()
    page.get_by_role("button", name="Download").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing exceeds the page width"
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert violations(page) == []
