"""The pages keep their promises: links lead somewhere, commands exist, the site builds without a warning."""

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from typer.main import get_command

from halfbyte.cli.main import VERBS, build_app
from halfbyte.train.config import DatasetConfig, TrainConfig

ROOT = Path(__file__).parents[2]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_site" not in path.parts)
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES += sorted((ROOT / "benchmarks" / "results").glob("*.md"))
GENERATED = {"errors.md"}  # by docs/_site/hooks.py
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Ids that GitHub and MkDocs give to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_somewhere(path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"https://", link):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        if found.name in GENERATED:
            continue
        assert found.exists(), f"{path}: {link}"
        assert ROOT in found.parents, f"{path}: {link} leads out of the repository"
        assert not anchor or anchor in anchors(found), f"{path}: {link}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_and_keys_exist(path) -> None:
    """Of every console block each verb and option, and of every YAML block each key."""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", path.read_text(), flags=re.DOTALL):
        if language == "console":
            for line in block.replace("\\\n", " ").splitlines():
                check_command(line)
        elif language == "yaml":
            keys = yaml.safe_load(block)
            assert keys.keys() <= TrainConfig.model_fields.keys(), keys
            for source in keys.get("datasets", []):
                assert isinstance(source, str) or source.keys() <= DatasetConfig.model_fields.keys()


def check_command(line: str) -> None:
    words = shlex.split(line.removeprefix("$ "), comments=True)
    if "halfbyte" not in words:
        return
    words = words[words.index("halfbyte") + 1 :]
    verb = next(word for word in words if not word.startswith("-"))
    assert verb in VERBS, line
    command = get_command(build_app([verb])).commands[verb]
    options = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in options | {"--traceback", "--help"}, line


def test_python_blocks_are_python() -> None:
    for path in PAGES:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL):
            compile(block, str(path), "exec")


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_dotted_names_import(path) -> None:
    """Every `halfbyte.x.y`, in the text, in code, and in the blocks that the API pages are made of."""
    for name in set(re.findall(r"(?<![\w/.-])halfbyte(?:\.[A-Za-z_]\w*)+(?![\w/])", path.read_text())):
        if name != "halfbyte.json":  # a file
            resolve_name(name)


def test_every_page_is_in_the_menu() -> None:
    """A page that nobody finds is not written."""
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/.-]+\.md)$", config, flags=re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in DOCS}
    assert listed == pages | {"errors.md", "changelog.md", "contributing.md"}  # results: docs/_site/hooks.py


def test_pictures_are_small() -> None:
    for path in (ROOT / "docs").rglob("*.png"):
        assert path.stat().st_size < 150_000, path


class Addresses(HTMLParser):
    """What a page links to and loads."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes) -> None:
        names = (
            ("href",) if tag == "a" else ("src",) if tag in ("img", "script") else ("href",) if tag == "link" else ()
        )
        self.found += [value for name, value in attributes if name in names and value]


def test_the_site_builds_without_a_warning_and_is_whole(tmp_path) -> None:
    """With --strict; then each address in the built pages is a file of the site, and nothing is loaded from outside."""
    pytest.importorskip("mkdocs")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        if page.name == "404.html":  # its links begin at the server's root
            continue
        for address in Addresses(page.read_text()).found:
            parts = urlsplit(address)
            if not parts.scheme and parts.path:
                assert (page.parent / unquote(parts.path)).exists(), f"{page.name}: {address}"
