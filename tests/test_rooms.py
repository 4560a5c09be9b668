"""Imports inside the package only look left: numerics < {optim, nvfp4} < lora < parallel < checkpoint < plan < train
< {report, inference} < cli.

`optim` and `nvfp4` never meet: the base is frozen, so an optimizer only ever sees ordinary tensors.
`plan` reads configs, which is checkpoint's business, and a run prints its plan first, so it stands left of train.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "halfbyte"
RANK = {
    "numerics": 0,
    "optim": 1,
    "nvfp4": 1,
    "lora": 2,
    "parallel": 3,
    "checkpoint": 4,
    "plan": 5,
    "train": 6,
    "report": 7,
    "inference": 7,
    "cli": 8,
}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]


def imported_rooms(path: Path) -> set[str]:
    """Rooms of halfbyte that a file imports, at any nesting depth."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports, so that the room is visible"
            names = [node.module] if node.module != "halfbyte" else [f"halfbyte.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name and name.startswith("halfbyte.")}
    return rooms & RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_look_left(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    for other in imported_rooms(path) - {room}:
        assert RANK[other] < RANK[room], f"{path.relative_to(PACKAGE)} imports {other}, which is not left of {room}"


def test_every_folder_is_a_room() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == RANK.keys()
