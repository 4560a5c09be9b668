"""Peak memory of `halfbyte quantize` and `merge`, above the process after its imports, and the source's largest file.

    python benchmarks/quantize_peak.py [--hidden 1024] [--layers 16] [--shard 100MB]

A random bf16 Llama is written in shards; quantize, then merge with a rank-16 adapter, run each in a child process that
has done the same to a tiny model before (which pays for imports and one-time buffers).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import gc, json, sys
import torch
torch.set_num_threads(1)
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.merge import merge_checkpoint
run = {"quantize": quantize_checkpoint, "merge": merge_checkpoint}[sys.argv[1]]
warm, real = json.loads(sys.argv[2])
def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
run(*warm)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
run(*real)
print(status("VmHWM") - before)
"""


def make(root: Path, hidden: int, layers: int, shard: str) -> dict[str, list[str]]:
    """Arguments of each verb for a model of that size; the adapter is made on a base quantized here."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfbyte.checkpoint.load import load_model
    from halfbyte.checkpoint.quantize import quantize_checkpoint

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=16000 if hidden > 256 else 100,
    )
    root.mkdir()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "dense", max_shard_size=shard)
    quantize_checkpoint(root / "dense", root / "base")
    model = get_peft_model(
        load_model(root / "base"), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(root / "adapter")
    return {
        "quantize": [str(root / "dense"), str(root / "quantized")],
        "merge": [str(root / "base"), str(root / "adapter"), str(root / "merged")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shard", default="100MB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        warm = make(Path(root) / "warm", 64, 1, args.shard)
        real = make(Path(root) / "real", args.hidden, args.layers, args.shard)
        files = [path.stat().st_size for path in (Path(root) / "real" / "dense").glob("*.safetensors")]
        print(f"source: {sum(files) / 1e6:.0f} MB in {len(files)} files, the largest {max(files) / 1e6:.0f} MB")
        for verb in ("quantize", "merge"):
            arguments = json.dumps([warm[verb], real[verb]])
            done = subprocess.run(
                [sys.executable, "-c", CHILD, verb, arguments], capture_output=True, text=True, check=True
            )
            print(f"{verb:8} peak {int(done.stdout.split()[-1]) / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
