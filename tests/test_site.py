"""The site of `make docs`: its search works in pages that are opened from disk, and nothing comes
from elsewhere.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness import HANG_S
from tests.report.test_browser import BROWSERS_OWN, WITH_BROWSER, opened

ROOT = Path(__file__).parents[1]


@WITH_BROWSER
def test_the_site_is_searched_from_disk(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    subprocess.run(
        build, cwd=ROOT, check=True, timeout=HANG_S, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )

    page = tmp_path / "site" / "quickstart.html"
    done, requests = opened(f"{page.as_uri()}?q=checkpoint", tmp_path, width=1400)

    assert re.search(r"[1-9]\d* matching documents", done.stdout)
    urls = set(re.findall(r'"url":"(https?://[^"]*)"', requests.read_text()))
    assert not [url for url in urls if not BROWSERS_OWN.match(url)]
