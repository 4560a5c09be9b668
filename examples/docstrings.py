"""Questions and answers about Python's standard library, read from its own docstrings.

    python examples/docstrings.py FOLDER        writes FOLDER/train.jsonl and FOLDER/heldout.jsonl

The source files are parsed, never imported: importing some of them opens a browser or prints a poem. What is held out
is chosen once by a fixed seed, and no answer stands on both sides.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

QUESTIONS = {
    "function": "What does the function `{name}` of Python's module `{module}` do?",
    "class": "What is the class `{name}` of Python's module `{module}` for?",
    "method": "What does the method `{name}` of Python's module `{module}` do?",
}
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip", "__pycache__"}
LONGEST, SHORTEST = 200, 25  # of an answer, in characters: with question and template at most 128 tokens
TRAIN, HELD_OUT = 1104, 96


def documented(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """(kind, module, name, docstring) of all public functions, classes and methods below a folder, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if SKIPPED & set(parts) or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield from ((kind, module, name, text) for kind, name, text in members(tree.body, ""))


def members(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, str, str]]:
    """(kind, dotted name, docstring) of the public definitions in a body."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{owner}.{node.name}" if owner else node.name
        text = ast.get_docstring(node)
        if text:
            yield "class" if isinstance(node, ast.ClassDef) else "method" if owner else "function", name, text
        if isinstance(node, ast.ClassDef):
            yield from members(node.body, name)


def pairs() -> list[dict[str, list[dict[str, str]]]]:
    """All pairs as chats; an answer that several names share is left out, since it would leak into what is held out."""
    found: dict[str, list[str]] = {}
    for kind, module, name, text in documented(Path(sysconfig.get_paths()["stdlib"])):
        answer = " ".join(text.split("\n\n")[0].split())
        if SHORTEST <= len(answer) <= LONGEST and answer[0].isupper() and answer.endswith("."):
            found.setdefault(answer, []).append(QUESTIONS[kind].format(module=module, name=name))
    return [
        {"messages": [{"role": "user", "content": questions[0]}, {"role": "assistant", "content": answer}]}
        for answer, questions in found.items()
        if len(questions) == 1
    ]


def write(folder: Path, *, train: int = TRAIN, held_out: int = HELD_OUT) -> tuple[Path, Path]:
    """Write train.jsonl and heldout.jsonl, and return their paths."""
    rows = pairs()
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, chosen in zip(paths, (rows[held_out : held_out + train], rows[:held_out]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        print(f"{len(chosen)} pairs in {path}")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=TRAIN, help=f"pairs to train on ({TRAIN})")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help=f"pairs to hold out ({HELD_OUT})")
    arguments = parser.parse_args()
    write(arguments.folder, train=arguments.train, held_out=arguments.held_out)
