"""Peak memory and time of `halfbyte inspect`, `verify` and `export` on a folder of Llama 70B's shapes.

    python benchmarks/stream_peak.py [--layers 80] [--export-layers 2] [--folder DIR]

The folders are sparse files: headers and tensor scales are written, codes and block scales are holes that read as
zeros, so that 44 GB take no disk. Each verb runs in a process of its own; its peak is the whole process, imports
included. What is exported is written in full, so it has fewer layers: the peak goes with the largest tensor.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from halfbyte.checkpoint.detect import CONFIG_FILE, FORMATS
from halfbyte.checkpoint.shard_writer import plan_shards
from halfbyte.checkpoint.shards import INDEX_FILE
from halfbyte.checkpoint.sidecar import write_json
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.tensor_file import DTYPE_NAMES, TensorSpec

SHARD_BYTES = 5_000_000_000
CHILD = """
import sys
from halfbyte.cli.main import main
try:
    main(sys.argv[1:])
finally:
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("peak", int(line.split()[1]) * 1024)
"""


def make_folder(folder: Path, layers: int, format_name: str) -> int:
    """A sparse NVFP4 Llama 70B; returns its bytes."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
    )
    skeleton, format = Skeleton(config, folder), FORMATS[format_name]
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.model.state_dict().items()}
    linears = [fqn for fqn in skeleton.all_linears if fqn != "lm_head"]
    stored = {fqn: format.plan(fqn, fqn, shapes[f"{fqn}.weight"], None, torch.bfloat16) for fqn in linears}  # type: ignore[arg-type]
    specs = {
        name: TensorSpec(torch.bfloat16, shape)
        for name, shape in shapes.items()
        if name.removesuffix(".weight") not in stored
    }
    for weight in stored.values():
        specs |= {weight.keys[component]: weight.specs[component] for component in weight.keys}
    folder.mkdir()
    left_out = [] if format_name == "torchao" else ["lm_head"]
    declared = format.declare(config.to_diff_dict(), stored, left_out)
    write_json(folder / CONFIG_FILE, declared)
    for name, content in format.extra_files(declared, left_out).items():
        write_json(folder / name, content)
    scales = {weight.keys["global_scale"] for weight in stored.values()}
    metadata = {**format.file_metadata(list(shapes), stored), "format": "pt"}
    plan = plan_shards(specs, SHARD_BYTES)
    for name, keys in plan.items():
        write_sparse(folder / name, {key: specs[key] for key in keys}, metadata, scales)
    write_json(folder / INDEX_FILE, {"weight_map": {key: name for name, keys in plan.items() for key in keys}})
    return sum(spec.size_bytes for spec in specs.values())


def write_sparse(path: Path, specs: dict[str, TensorSpec], metadata: dict[str, str], scales: set[str]) -> None:
    """A safetensors file of holes, but for tensor scales of 2^-12."""
    header: dict[str, object] = {"__metadata__": metadata}
    places, position = {}, 0
    for key, spec in specs.items():
        header[key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.size_bytes],
        }
        places[key] = position
        position += spec.size_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for key in scales & specs.keys():
            os.pwrite(file.fileno(), struct.pack("<f", 2.0**-12), start + places[key])
        file.truncate(start + position)


def measure(*arguments: str) -> str:
    """Run a verb in a child: its peak and its seconds."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    peak = int(done.stdout.rsplit("peak ", 1)[1])
    return f"{arguments[0]:8} peak {peak / 1e9:.2f} GB, {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--export-layers", type=int, default=2)
    parser.add_argument("--folder", help="where to work; a file system with holes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        first, second, small = (str(Path(root) / name) for name in ("torchao", "modelopt", "small"))
        size = make_folder(Path(first), args.layers, "torchao")
        make_folder(Path(second), args.layers, "modelopt")
        make_folder(Path(small), args.export_layers, "torchao")
        print(f"{args.layers} layers, {size / 1e9:.1f} GB in {len(list(Path(first).glob('*.safetensors')))} files")
        print(measure("export", small, str(Path(root) / "out"), "--format", "modelopt"), flush=True)
        print(measure("inspect", first), flush=True)
        print(measure("verify", first, second), flush=True)


if __name__ == "__main__":
    main()
