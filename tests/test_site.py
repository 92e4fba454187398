"""The site of docs/, and its tutorial as a reader types it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def test_the_site_is_built_without_a_warning_and_needs_no_internet(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    styles = [style.read_text() for style in tmp_path.rglob("*.css")]
    assert len(pages) > 40
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.https?://[^>]+", "".join(pages))
    assert not re.findall(r"url\(.?(?:https?:)?//[^)]+", "".join(styles))
    reference = (tmp_path / "reference/http.html").read_text()
    assert "/v1/chat/completions" in reference
    assert "max_tokens" in reference
