"""What MkDocs needs to show a repository whose pages were written for the repository.

Pages link to sources (`../halfbyte/train/config.py`) and to results (`../benchmarks/results/...`). Results, CHANGELOG
and CONTRIBUTING become pages; a source that is linked to becomes a text file of the site; links are rewritten to both.
So the site is whole without a network, and no table is copied. The page of errors is made from the source.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from errors import page_of_errors  # noqa: E402  (beside this file, which MkDocs loads by its path)

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results/"
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
GENERATED = ("docs/errors.md",)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(RESULTS):
        return "results/" + path.removeprefix(RESULTS)
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.txt"


def repository_path(src_uri: str) -> str:
    """The reverse, for the pages whose links are rewritten."""
    for path, uri in ROOT_PAGES.items():
        if src_uri == uri:
            return path
    return RESULTS + src_uri.removeprefix("results/") if src_uri.startswith("results/") else f"docs/{src_uri}"


def target_of(page: str, link: str) -> str | None:
    """The repository's file that a link on a page of the repository leads to; None for an address or an anchor."""
    if re.match(r"[a-z]+:", link) or link.startswith("#"):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(page), link.partition("#")[0]))


def on_config(config: Any) -> Any:
    """Every result is in the menu, under its own heading."""
    section = next(item["Results"] for item in config.nav if "Results" in item)
    section += [f"results/{path.name}" for path in sorted((ROOT / RESULTS).glob("*.md"))]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add results, the pages of the root, linked sources, and the page of errors."""
    pages = {f"docs/{file.src_uri}": text_of(f"docs/{file.src_uri}") for file in files.documentation_pages()}
    for path in [*ROOT_PAGES, *(f"{RESULTS}{name}" for name in sorted(os.listdir(ROOT / RESULTS)))]:
        if not (ROOT / path).is_file():
            continue
        if path.endswith(".md"):
            pages[path] = text_of(path)
            files.append(File.generated(config, site_path(path), content=pages[path]))
        else:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    linked = {target_of(page, link[2]) for page, text in pages.items() for link in LINK.finditer(text)}
    for path in sorted(filter(None, linked)):
        uri = site_path(path)
        known = files.get_file_from_path(uri) is not None
        if known or not uri.startswith("source/") or not (ROOT / path).exists():
            continue
        if uri.endswith(".txt"):
            files.append(File.generated(config, uri, content=text_of(path)))
        else:
            files.append(File.generated(config, uri, content=listing(path, config, files)))
    files.append(File.generated(config, "errors.md", content=page_of_errors(ROOT / "halfbyte")))
    return files


def listing(folder: str, config: Any, files: Files) -> str:
    """A page that lists a folder's files, each added to the site."""
    lines = [f"# {folder}", ""]
    for path in sorted((ROOT / folder).iterdir()):
        if path.is_file() and path.suffix in (".py", ".yaml", ".md"):
            uri = f"source/{folder}/{path.name}.txt"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=path.read_text()))
            lines.append(f"* [{path.name}]({path.name}.txt)")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links as they lead inside the site."""
    here = page.file.src_uri
    if here.startswith("source/") or here == "errors.md":
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        target = target_of(repository_path(here), link[2])
        if target is None or not (target in GENERATED or (ROOT / target).exists()):
            return link[0]
        anchor = link[2].partition("#")[2]
        found = os.path.relpath(site_path(target), os.path.dirname(here) or ".")
        return f"{link[1]}{found}{'#' + anchor if anchor else ''}{link[3]}"

    return plain_brackets(LINK.sub(rewritten, markdown))


def plain_brackets(markdown: str) -> str:
    """`[x][y]` outside of code is mathematics here, and no reference to an object, as mkdocstrings reads it."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else re.sub(r"\](\s?)\[", r"]\1\\[", part) for part in parts)


def text_of(path: str) -> str:
    return (ROOT / path).read_text()
