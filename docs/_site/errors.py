"""The page of errors, from the source: every message that a user can meet, where it comes from, and what to do.

Read with `ast`, nothing is imported. A message is found where an exception of a kind that the command line turns into a
sentence is made, whether it is raised there or returned to be raised. What an f-string fills in stands in braces.

    python docs/_site/errors.py        prints the page
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUILTIN = {
    "ValueError",
    "TypeError",
    "KeyError",
    "RuntimeError",
    "ImportError",
    "OSError",
    "FileNotFoundError",
    "FileExistsError",
    "PermissionError",
    "TimeoutError",
    "NotImplementedError",
}
ROOMS = {
    "cli": "Command line",
    "train": "Training",
    "plan": "Planning",
    "report": "Reports",
    "inference": "Trying a model",
    "checkpoint": "Checkpoints: quantize, load, merge, export, resume",
    "parallel": "Several GPUs",
    "lora": "Adapters",
    "nvfp4": "The 4-bit layer",
    "optim": "Optimizers",
    "numerics": "Numbers",
}
VERBS = set(
    re.findall(
        r"\w+",
        """
        accept activate adapt add allow ask attach build call cast change check choose clear continue copy exclude
        expected export fetch find fix free freeze give go hand install keep launch leave let load lower make mend merge
        move name or pass pick put quantize quote raise read register remove rename repair restart restore resume run
        save see serve set shard start take test train try turn unset update use wait write
        """,
    )
)


@dataclass(frozen=True)
class Message:
    """One place where an error is made."""

    file: str
    line: int
    function: str
    kind: str
    text: str

    @property
    def remedy(self) -> str:
        """The last part that begins with what to do; empty where the message has none."""
        parts = re.split(r"(?<=[.;:?])\s+|;\s+|,\s+and\s+", self.text)
        for index, part in enumerate(parts):
            word = re.match(r"[`'(]?([A-Za-z]+)", part)
            if index and word and word[1].lower() in VERBS:
                return self.text[self.text.rindex(part) :]
        return ""


def messages_in(package: Path) -> list[Message]:
    """All messages of a package, by file and line."""
    files = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    kinds = BUILTIN | own_exceptions(files.values())
    return [
        message
        for path, tree in files.items()
        for message in messages_of(tree, path.relative_to(package.parent).as_posix(), kinds)
    ]


def own_exceptions(trees: Iterator[ast.Module]) -> set[str]:
    """Classes of the package that derive from an exception with a message."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    known = set(BUILTIN)
    while True:
        found = {c.name for c in classes if any(isinstance(b, ast.Name) and b.id in known for b in c.bases)} - known
        if not found:
            return known - BUILTIN
        known |= found


def messages_of(tree: ast.Module, file: str, kinds: set[str]) -> Iterator[Message]:
    """Those of one file, with the function around each."""

    def visit(node: ast.AST, function: str, names: dict[str, ast.expr]) -> Iterator[Message]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
            assigned = (n for n in ast.walk(node) if isinstance(n, ast.Assign) and len(n.targets) == 1)
            names = names | {n.targets[0].id: n.value for n in assigned if isinstance(n.targets[0], ast.Name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
            texts = [text for text in (text_of(argument, names) for argument in node.args) if text]
            if texts:
                text = " ".join(max(texts, key=len).split())
                yield Message(file, node.lineno, function, node.func.id, text)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, names)

    yield from visit(tree, "", messages_made_by(tree))


def messages_made_by(tree: ast.Module) -> dict[str, ast.expr]:
    """Name -> what is returned, of the file's functions; some make a message for several places."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    returned = {f.name: [n.value for n in ast.walk(f) if isinstance(n, ast.Return) and n.value] for f in functions}
    return {name: values[-1] for name, values in returned.items() if values}


def text_of(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> str:
    """A string, an f-string, a sum of such or a local name of one, with `{...}` for what is filled in; else empty."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else filled(part, names, depth) for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, names, depth), text_of(node.right, names, depth)
        return (left or "{...}") + (right or "{...}") if left or right else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return text_of(node.func, names, depth)
    if isinstance(node, ast.Name) and node.id in names and depth < 3:
        return text_of(names[node.id], names, depth + 1)
    return ""


def filled(part: ast.expr, names: dict[str, ast.expr], depth: int) -> str:
    """`{name}` for what an f-string fills in; the text itself where a local name holds a constant."""
    assert isinstance(part, ast.FormattedValue)
    if isinstance(part.value, ast.Name) and isinstance(names.get(part.value.id), ast.Constant):
        return text_of(part.value, names, depth + 1) or f"{{{part.value.id}}}"
    words = re.findall(r"[a-z_]{2,}", ast.unparse(part.value).lower())
    return "{" + (words[-1] if isinstance(part.value, ast.Name | ast.Attribute) and words else "...") + "}"


def page_of_errors(package: Path) -> str:
    """The page as Markdown, a section for each room."""
    found = messages_in(package)
    lines = [
        "# Errors",
        "",
        f"The {len(found)} messages of this version, made from its source. A message says what was found, what was "
        "expected and what to do; on the command line it is one line and exit code 2, and `--traceback` shows where it "
        "came from. `{...}` is what a message fills in: search this page for words around it. The part that says what "
        "to do is in bold.",
        "",
    ]
    for room, title in ROOMS.items():
        here = [message for message in found if message.file.split("/")[1] == room]
        if here:
            lines += [f"## {title}", "", "| message | from |", "|---|---|", *map(row, here), ""]
    return "\n".join(lines)


def row(message: Message) -> str:
    """One line of a table; no message can leave its cell."""
    text, remedy = message.text, message.remedy
    before = text.removesuffix(remedy) if remedy else text
    shown = f"{escaped(before)}**{escaped(remedy)}**" if remedy else escaped(text)
    return f"| {shown} | `{message.file.removeprefix('halfbyte/')}`, {message.function or 'module'} |"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", text)


if __name__ == "__main__":
    sys.stdout.write(page_of_errors(Path(__file__).parents[2] / "halfbyte"))
