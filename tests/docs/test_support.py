"""docs/support.md is what the recorded run gives, and its cells name tests that exist."""

import json

import pytest

from tests.docs import support


def test_the_page_is_what_was_recorded() -> None:
    """When this fails, `make support` (or `python -m tests.docs.support -k ...` for what has changed)."""
    outcomes = json.loads(support.OUTCOMES.read_text())
    assert support.page(outcomes) == support.PAGE.read_text()
    assert outcomes.keys() <= set(support.references())
    assert not [reference for reference, counts in outcomes.items() if counts["failed"]]


@pytest.mark.parametrize("reference", support.references())
def test_the_tests_exist(reference) -> None:
    assert support.exists(reference)


def test_every_cell_is_filled() -> None:
    assert all(row.keys() == set(support.ENGINES) for row in support.ROWS.values())


def test_which_tests_a_reference_means() -> None:
    for reference, node, expected in [
        ("a.py::t", "a.py::t[x-1]", True),
        ("a.py::t", "a.py::tt", False),
        ("a.py", "a.py::anything[1]", True),
        ("a.py::t[x*]", "a.py::t[x-1]", True),
        ("a.py::t[x*]", "a.py::t[y-x]", False),
        ("a.py::t[x]", "a.py::t[x-1]", False),
    ]:
        assert support.matches(reference, node) == expected


def test_a_failure_is_shown_and_what_did_not_run_is_not_called_tested() -> None:
    first, second = support.references()[:2]
    page = support.page(
        {first: {"passed": 3, "failed": 0, "skipped": 0}, second: {"passed": 1, "failed": 1, "skipped": 0}}
    )
    row = next(line for line in page.splitlines() if line.startswith("| plain LoRA"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells[0] == "tested 3" and cells[1] == "**failed**"
    assert "left out of the recorded run" in page and cells[2].startswith("(")
