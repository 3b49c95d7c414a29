"""Write the pictures of `GET /hicache` in docs/images, with a server under load and Chromium.

.venv/bin/python scripts/hicache_pictures.py
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from rigs.servers.cache_pictures import server_under_load, take_pictures
from rigs.servers.chromium import Chromium, find_chromium

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"


def main() -> None:
    path = find_chromium(may_install=True)
    if path is None:
        raise SystemExit(
            "error: Chromium is missing: install it (Debian: apt-get install chromium)"
        )
    FOLDER.mkdir(exist_ok=True)
    with server_under_load(num_requests=80) as server, Chromium(path) as browser:
        for picture in take_pictures(browser, server, FOLDER):
            # Few colors, a fifth of the bytes.
            Image.open(picture).quantize(96).save(picture, optimize=True)
            print(picture)


if __name__ == "__main__":
    main()
