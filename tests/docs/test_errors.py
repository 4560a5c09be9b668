"""The page of errors: complete, and true to what is raised."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from halfbyte.train.config import build_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors():
    """docs/_site/errors.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "docs" / "_site" / "errors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["errors_page"] = module
    spec.loader.exec_module(module)
    return module


def test_every_raise_with_a_message_is_listed(errors) -> None:
    """Counted independently: each `raise Kind(...)` of a built-in kind in the package with a literal text in it."""
    listed = {(message.file, message.line) for message in errors.messages_in(ROOT / "halfbyte")}
    missing = []
    for path in (ROOT / "halfbyte").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            kind = ast.unparse(node.exc.func)
            literal = any(
                isinstance(part, ast.JoinedStr) or isinstance(part, ast.Constant) and isinstance(part.value, str)
                for argument in node.exc.args
                for part in ast.walk(argument)
            )
            if kind in errors.BUILTIN and literal:
                place = (path.relative_to(ROOT).as_posix(), node.exc.lineno)
                missing += [place] if place not in listed else []
    assert len(listed) > 200 and not missing


def test_a_message_that_is_met_is_found_on_the_page(errors) -> None:
    """Words of real errors, in their row, with what to do in bold."""
    page = errors.page_of_errors(ROOT / "halfbyte")
    with pytest.raises(ValueError) as met:
        build_config({"base_model": "x", "datasets": ["y"], "output_dir": "z", "eval_steps": 3})
    words = re.search(r"eval_steps is set.*", str(met.value))[0].replace("_", r"\_").partition(";")
    (row,) = (line for line in page.splitlines() if words[0] in line)
    assert f"**{words[2].strip()}**" in row and "`train/config.py`" in row


def test_what_is_filled_in_cannot_break_the_table(errors) -> None:
    message = errors.Message("halfbyte/cli/x.py", 1, "f", "ValueError", "a|b <i> `c` *d* [e](f); use {this}")
    assert errors.row(message) == (r"| a\|b \<i\> \`c\` \*d\* \[e\](f); **use \{this\}** | `cli/x.py`, f |")
