"""Peak memory of `load_model`, above the process after its imports, against the bytes of the model it returns.

    python benchmarks/load_peak.py [FOLDER] [--dtype bfloat16] [--hidden 1024 --layers 12]

Without a folder, a random Llama of the given size is quantized into a temporary one. The load runs in a child process:
first everything it imports and a tiny model (which pays for one-time buffers), then VmHWM is reset, then the load, then
every tensor is read once: transformers leaves its tensors in the mapped file, whose pages only count when touched. The
same is done for plain transformers with torchao, for comparison.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = """
import gc, json, sys
import torch
torch.set_num_threads(1)
which, warm, folder, dtype = sys.argv[1:]
if which == "halfbyte":
    from halfbyte import load_model as load
else:
    from transformers import AutoModelForCausalLM
    load = AutoModelForCausalLM.from_pretrained
def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
load(warm, dtype=getattr(torch, dtype))
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model = load(folder, dtype=getattr(torch, dtype))
for tensor in [*model.parameters(), *model.buffers()]:
    for part in (tensor.qdata, tensor.scale) if hasattr(tensor, "qdata") else (tensor,):
        part.detach().reshape(-1).view(torch.uint8).max()
peak = status("VmHWM") - before
held = status("VmRSS") - before
def size(tensor):
    parts = getattr(tensor, "qdata", None)
    if parts is None or not hasattr(tensor, "per_tensor_scale"):
        return tensor.numel() * tensor.element_size()
    return sum(t.numel() * t.element_size() for t in (tensor.qdata, tensor.scale, tensor.per_tensor_scale))
loaded = sum(size(t) for t in [*model.parameters(), *model.buffers()])
print(json.dumps({"loaded": loaded, "peak": peak, "held": held, "ratio": peak / loaded}))
"""


def make_folder(root: Path, hidden: int, layers: int) -> Path:
    """A random Llama in NVFP4, with untied embeddings, in shards of 100 MB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfbyte.checkpoint.quantize import quantize_checkpoint

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=16000 if hidden > 256 else 100,
    )
    dense = root / f"dense-{hidden}"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(dense)
    quantize_checkpoint(dense, root / f"nvfp4-{hidden}", max_shard_size="100MB")
    return root / f"nvfp4-{hidden}"


def measure(which: str, warm: Path, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-c", LOAD, which, str(warm), str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{which}: the child failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only-halfbyte", action="store_true", help="do not load with transformers and torchao too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        warm = make_folder(Path(root), 64, 1)
        folder = args.folder or make_folder(Path(root), args.hidden, args.layers)
        for which in ("halfbyte",) if args.only_halfbyte else ("halfbyte", "torchao"):
            result = measure(which, warm, folder, args.dtype)
            print(
                f"{which:9} loaded {result['loaded'] / 1e6:8.1f} MB  peak {result['peak'] / 1e6:8.1f} MB  "
                f"held {result['held'] / 1e6:8.1f} MB  peak / loaded {result['ratio']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
