"""The site of docs/ builds without a warning: links lead somewhere, docstrings fit their signatures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import shardtrain
from shardtrain import combine, data

ROOT = Path(__file__).parents[1]


def test_the_site_has_all_pages_and_public_names_and_no_dead_link(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    quick = {**os.environ, "SITE_INDEX": "false", "SITE_LINE_LENGTH": "9999"}
    done = subprocess.run(build, cwd=ROOT, env=quick, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        name = page.relative_to(ROOT).with_suffix("")
        folder = name.parent if name.name in ("README", "index") else name
        folder = {"README.md": Path("readme"), "docs/index.md": Path()}.get(
            page.relative_to(ROOT).as_posix(), folder
        )
        assert (tmp_path / folder / "index.html").is_file(), page
    for module in (shardtrain, data, combine):
        html = (tmp_path / "reference" / module.__name__ / "index.html").read_text()
        shown = {name.rpartition(".")[2] for name in re.findall(r'id="(shardtrain[\w.]+)"', html)}
        assert module is shardtrain or len(shown) > 8
        assert set(module.__all__) - shown <= (set() if module is shardtrain else set(shardtrain.__all__))
    options = (tmp_path / "reference/cli/index.html").read_text()
    assert "--sequence-sharded" in options
    assert "--nonfinite (use skip or stop)" in (tmp_path / "reference/combinations/index.html").read_text()
    # examples are code, and defaults are shown
    html = (tmp_path / "reference/shardtrain/index.html").read_text()
    assert "&gt;&gt;&gt;" in html
    assert "<blockquote>" not in html
