"""Reads the built site as a visitor does: `mkdocs build -d FOLDER`, then `python -m tests.visit FOLDER`.

Every link and picture leads to a file of the site, and every anchor to a place there. In a headless Chromium, if there
is one, the search finds pages, and each picture is drawn.
"""

import contextlib
import functools
import html.parser
import http.server
import json
import pathlib
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator

from tests.zoo import browser


SEARCHES = {"router replay": "agents", "nf4": "lora", "ragged_dot": "reference/kernels"}  # words: a page to be found
# Types words, and returns the addresses that are found, as soon as a page is among them or after ten seconds.
SEARCH = """new Promise(done => {
    const input = document.querySelector('.md-search__input');
    input.focus();
    input.value = %s;
    input.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
    let looks = 0;
    const look = () => {
        const found = [...document.querySelectorAll('.md-search-result__link')].map(a => a.href);
        if (found.some(href => href.includes(%s)) || ++looks > 100) done(found); else setTimeout(look, 100);
    };
    look();
})"""


class Page(html.parser.HTMLParser):
    """The links and pictures of a page, and the anchors to which others may link."""

    def __init__(self, file: pathlib.Path):
        super().__init__()
        self.links, self.pictures, self.anchors = set[str](), set[str](), {""}
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag == "img" and "src" in given:
            self.pictures.add(given["src"])


def broken(site: pathlib.Path, pages: dict[str, Page]) -> Iterator[str]:
    """Yields what leads nowhere, with the page that it is on."""
    for path, page in pages.items():
        for link in sorted(page.links | page.pictures):
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            found = urllib.parse.urljoin(f"/{path}", urllib.parse.unquote(url.path)).lstrip("/")
            found += "index.html" if found.endswith("/") or not found else ""
            anchor = urllib.parse.unquote(url.fragment)
            if not (site / found).is_file() or (found in pages and anchor not in pages[found].anchors):
                yield f"{path}: {link}"


@contextlib.contextmanager
def served(site: pathlib.Path) -> Iterator[str]:
    """Serves the site on a free port, and yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def visit(site: pathlib.Path, pages: dict[str, Page]) -> None:
    """Searches, and looks at each page with pictures.

    Raises:
        SystemExit: the search does not find a page, or a picture is not drawn.
    """
    with tempfile.TemporaryDirectory() as folder, browser.Browser(pathlib.Path(folder)) as visitor, served(site) as url:
        visitor.open(f"{url}/")
        visitor.wait("document.readyState == 'complete' && document.querySelector('.md-search__input')")
        for words, page in SEARCHES.items():
            found = visitor.run(SEARCH % (json.dumps(words), json.dumps(f"/{page}/")))
            if not any(f"/{page}/" in href for href in found):
                raise SystemExit(f"Searching for {words!r} does not find {page}: {found}")
        for path in (path for path, page in pages.items() if page.pictures):
            visitor.open(f"{url}/{path}")
            visitor.wait(f"location.pathname == '/{path}' && document.readyState == 'complete'")
            blank = visitor.run("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
            if blank:
                raise SystemExit(f"{path} does not draw {', '.join(blank)}.")


def main(site: pathlib.Path) -> None:
    pages = {str(path.relative_to(site)): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    if wrong := list(broken(site, pages)):
        raise SystemExit("\n".join(["These links of the site lead nowhere:", *wrong]))
    pictures = sum(len(page.pictures) for page in pages.values())
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links, {pictures} pictures.")
    if browser.COMMAND is None:
        print("There is no Chromium, so the search was not tried.")
    else:
        visit(site, pages)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
