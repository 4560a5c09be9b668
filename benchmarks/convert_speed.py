"""Speed of `halfbyte export` and `halfbyte verify` in packed bytes per second, files in the page cache.

    python benchmarks/convert_speed.py [--layers 12] [--hidden 2048] [--rounds 3]

The folder holds random codes and scales (torchao's format) of a Llama of that size; its dense tensors are few. Writing
goes to the same temporary folder, and includes the fsync of the finished files; the best round counts. On a busy
machine the processor time tells more than the clock: it is given beside it.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from halfbyte.checkpoint.detect import CONFIG_FILE
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.formats.torchao import TorchaoFormat
from halfbyte.checkpoint.shard_writer import ShardWriter
from halfbyte.checkpoint.sidecar import write_json
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.checkpoint.verify import verify
from halfbyte.nvfp4.format import NVFP4Parts


def make_folder(folder: Path, hidden: int, layers: int) -> int:
    """A random NVFP4 Llama; returns the packed bytes."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64
    )
    config.vocab_size, config.architectures, config.dtype = 256, ["LlamaForCausalLM"], torch.bfloat16
    skeleton = Skeleton(config, folder)
    state = skeleton.model.state_dict()
    linears = [fqn for fqn in skeleton.all_linears if fqn != "lm_head"]
    format, shape = TorchaoFormat(), {fqn: tuple(state[f"{fqn}.weight"].shape) for fqn in linears}
    planned = {fqn: format.plan(fqn, fqn, shape[fqn], None, torch.bfloat16) for fqn in linears}
    dense = {key: t for key, t in state.items() if key.removesuffix(".weight") not in planned}
    specs = {key: TensorSpec(t.dtype, tuple(t.shape)) for key, t in dense.items()}
    for stored in planned.values():
        specs |= {stored.keys[c]: stored.specs[c] for c in stored.keys}
    folder.mkdir()
    write_json(folder / CONFIG_FILE, format.declare(config.to_diff_dict(), planned, []))
    with ShardWriter(
        folder, specs, metadata=format.file_metadata(list(state), planned), max_shard_bytes=10**8
    ) as writer:
        for key, tensor in dense.items():
            writer.write(key, torch.ones(tensor.shape, dtype=tensor.dtype))
        for fqn, stored in planned.items():
            n, k = shape[fqn]
            qdata = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            scale = torch.randint(8, 0x7F, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
            parts = NVFP4Parts(qdata, scale, torch.tensor(2.0**-8))
            for key, tensor in format.encode(stored, parts).items():
                writer.write(key, tensor)
    return sum(stored.size_bytes for stored in planned.values())


def best(rounds: int, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Seconds by the clock, and of processor time, each of its fastest round."""
    times = []
    for _ in range(rounds):
        before()
        start = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def rates(size: int, seconds: tuple[float, float]) -> str:
    return f"{size / seconds[0] / 1e9:.2f} GB/s by the clock, {size / seconds[1] / 1e9:.2f} GB/s of processor time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to work, e.g. /dev/shm to leave the disk out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        source, out = Path(root) / "torchao", Path(root) / "out"
        size = make_folder(source, args.hidden, args.layers)
        print(f"{size / 1e9:.2f} GB packed, {torch.get_num_threads()} threads, {os.cpu_count()} cores")
        for format in ("compressed-tensors", "modelopt"):
            seconds = best(
                args.rounds,
                lambda format=format: export_checkpoint(source, out, format=format),
                lambda: shutil.rmtree(out, ignore_errors=True),
            )
            print(f"export to {format:18} {rates(size, seconds)}", flush=True)
        seconds = best(args.rounds, lambda: verify(source, out))
        print(f"verify torchao, modelopt     {rates(2 * size, seconds)} (both folders are read)")


if __name__ == "__main__":
    main()
