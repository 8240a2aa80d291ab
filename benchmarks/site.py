"""Do all pages of the site open in a browser, without an error in its console or a broken link?

Opens every page in headless Chromium at 1280 and 390 pixels. It reports messages of the console,
links to files and anchors that do not exist, and pages that are wider than a narrow window.

    python -m sphinx -W -j auto docs site && python benchmarks/site.py site
"""

import argparse
import html.parser
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
    "--virtual-time-budget=8000",
)  # fmt: skip
WIDTHS = 1280, 390
# The page writes its own width into its title, which --dump-dom prints.
PROBE = (
    "<script>addEventListener('load', () => document.title = "
    "'width ' + document.documentElement.scrollWidth)</script>"
)


class Page(html.parser.HTMLParser):
    """Links, sources and ids of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def broken_links(pages):
    """(page, link) of each link to a file or an anchor that does not exist."""
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("#!"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing = target in pages and anchor and anchor not in pages[target].ids
            if not target.exists() or missing:
                found.append((path, link))
    return found


def opened(chromium, path, width):
    """Messages of the console, and the width of the page."""
    probe = path.with_name(f"probe-{width}-{path.name}")
    probe.write_text(path.read_text().replace("</head>", PROBE + "</head>", 1))
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [chromium, *QUIET, f"--user-data-dir={profile}", f"--window-size={width},900",
             "--dump-dom", probe.as_uri()],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    probe.unlink()
    wide = re.search(r"<title>width (\d+)</title>", done.stdout)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return messages, int(wide.group(1)) if wide else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--chromium", default="chromium")
    args = parser.parse_args()
    paths = sorted(args.site.resolve().rglob("*.html"))
    paths = [path for path in paths if "_static" not in path.parts]
    bad = 0
    for path, link in broken_links({path: Page(path.read_text()) for path in paths}):
        bad += 1
        print(f"{path.relative_to(args.site.resolve())}: broken link {link}")
    with ThreadPoolExecutor(2) as pool:
        jobs = [(path, width) for path in paths for width in WIDTHS]
        results = pool.map(lambda job: opened(args.chromium, *job), jobs)
        for (path, width), (messages, wide) in zip(jobs, results, strict=True):
            name = f"{path.relative_to(args.site.resolve())} at {width} pixels"
            if wide is None:
                messages = [*messages, "the page did not load"]
            elif wide > max(width, 500):  # Chromium has no narrower window than 500 pixels
                messages = [*messages, f"is {wide} pixels wide"]
            bad += len(messages)
            for message in messages:
                print(f"{name}: {message}")
    print(f"{len(paths)} pages at {WIDTHS} pixels: {bad} faults")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
