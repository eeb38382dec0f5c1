"""Open every page of the built site in a browser that nobody sees, and follow every link.

    mkdocs build --strict && python -m tests.pages.site build/site                    # links only: needs nothing
    python -m tests.pages.site build/site --browser --screenshots build/screenshots   # needs playwright and Chromium

Fails where a link or its anchor leads nowhere, where anything is loaded from another host, and, in the browser, on
errors of the console and on a page that is wider than a phone. Screenshots are light, dark, and as wide as a tablet and
a phone.
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VIEWS = {
    "light": (1280, 900, "light"),
    "dark": (1280, 900, "dark"),
    "tablet": (820, 1180, "dark"),
    "phone": (390, 844, "light"),
}
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get(LOADED.get(tag, "")) and found.get("rel") != "canonical":
            self.loaded.append(found[LOADED[tag]])


def broken_links(site: Path) -> list[str]:
    """A sentence for every link that leads nowhere, and for everything that comes from another host."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        here = f"/{path.relative_to(site)}"
        for link in {*page.links, *page.loaded}:
            target = urlsplit(urljoin(here, link))
            if target.scheme in ("http", "https", "mailto") or target.netloc:
                if link in page.loaded:
                    faults.append(f"{here} loads {link} from another host")
                continue
            file = site / unquote(target.path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                faults.append(f"{here} links to {link}, which does not exist")
            elif (
                file in pages  # a picture's fragment says whether it is light or dark
                and target.fragment not in ("", "__skip")
                and unquote(target.fragment) not in pages[file].anchors
            ):
                faults.append(f"{here} links to {link}, an anchor that does not exist")
    return faults


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def faults_in_browser(site: Path, screenshots: Path | None) -> list[str]:
    """What the console, the network and the width of a phone say about every page."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"]
        )
        for view, (width, height, scheme) in VIEWS.items():
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            for path in sorted(site.rglob("index.html")):
                name = str(path.relative_to(site).parent)
                page = context.new_page()

                def note(text: str, where: str = f"{name} ({view})") -> None:
                    faults.append(f"{where}: {text}")

                page.on(
                    "console",
                    lambda message, note=note: (
                        note(message.text) if message.type == "error" else None
                    ),
                )
                page.on("pageerror", lambda error, note=note: note(str(error)))
                page.on(
                    "requestfailed",
                    lambda request, note=note: note(f"could not load {request.url}"),
                )
                page.on(
                    "request",
                    lambda request, note=note: (
                        request.url.startswith((address, "data:", "blob:"))
                        or note(request.url)
                    ),
                )
                page.goto(
                    f"{address}/{'' if name == '.' else name + '/'}", wait_until="load"
                )
                wide = page.evaluate(
                    "document.documentElement.scrollWidth - window.innerWidth"
                )
                if wide > 0:
                    note(f"{wide} pixels wider than the window")
                if screenshots:
                    screenshots.mkdir(parents=True, exist_ok=True)
                    page.screenshot(
                        path=screenshots
                        / f"{name.replace('/', '-').replace('.', 'home')}-{view}.png"
                    )
                page.close()
        browser.close()
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.pages.site", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--screenshots", type=Path)
    options = parser.parse_args()
    faults = broken_links(options.site)
    if options.browser:
        faults += faults_in_browser(options.site, options.screenshots)
    print(
        "\n".join(faults)
        or f"{len(list(options.site.rglob('index.html')))} pages: nothing to complain about"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
