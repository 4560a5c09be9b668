"""The wheel: what it asks for, what is in it, and that the two libraries inside need torch alone."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = (
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "datasets",
    "torchao",
    "pydantic",
    "typer",
    "yaml",
    "triton",
    "numba",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy of what packaging reads, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "halfbyte", source / "halfbyte", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(source / "dist"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_a_plain_install_brings_torch_and_safetensors_only(wheel) -> None:
    found = email.message_from_string(metadata(wheel, "METADATA"))
    asked = [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">")[0].strip() for line in asked) == ["safetensors", "torch"]
    assert {"train", "deepspeed", "test"} <= set(found.get_all("Provides-Extra"))
    assert found["License-Expression"] == "Apache-2.0" and found["Requires-Python"] == ">=3.11"


def test_the_wheel_holds_the_package_and_nothing_else(wheel) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "halfbyte").rglob("*.py")} | {"halfbyte/py.typed"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert "halfbyte = halfbyte.__main__:main" in metadata(wheel, "entry_points.txt")
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


@pytest.mark.parametrize("rooms", ["halfbyte, halfbyte.optim, halfbyte.nvfp4"])
def test_optim_and_nvfp4_import_without_the_training_libraries(rooms) -> None:
    """In a fresh process where those libraries cannot be imported at all; a quantized layer and an optimizer work."""
    code = f"""
import sys
for name in {FORBIDDEN!r}:
    sys.modules[name] = None
import {rooms}
import torch
layer = halfbyte.nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(32, 8))
adapter = torch.nn.Linear(32, 8)
optimizer = halfbyte.optim.AdamW8bit(adapter.parameters(), lr=1e-3)
x = torch.randn(4, 32)
(layer(x) + adapter(x)).sum().backward()
optimizer.step()
print("steps without", len([name for name in {FORBIDDEN!r} if sys.modules[name] is None]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == f"steps without {len(FORBIDDEN)}", done.stderr


def test_the_command_line_without_its_packages_is_one_sentence() -> None:
    code = "import sys; sys.modules['typer'] = None; from halfbyte.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: the command line needs the package 'typer'")
    assert done.stderr.endswith("pip install 'halfbyte[train]'\n")
