"""Only rank zero reads the checkpoint, and no rank ever holds it twice.

Peak resident memory above what each process had after its imports, read from Linux: on a CPU at most 1.15 times the
checkpoint a rank. (With GPUs the base goes to the device as it is read; benchmarks/ddp.py measures that.)
This checkpoint is small, so what does not grow with the model counts: buckets are made small, and 24 MB are allowed for
the digest's chunks and first-touched library pages. A second copy, or a second reader, would be far beyond.
"""

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halfbyte.checkpoint.load import load_model
from halfbyte.parallel import synchronize
from tests.dist import run
from tests.train import tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FIXED_BYTES = 24e6
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 16384}


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def load_and_synchronize(folder: str) -> tuple[int, int, int]:
    """Bytes of peak above the start; bytes read from files by this process; bytes of the model."""
    warm_up()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start, read_before = resident_bytes("VmRSS"), bytes_read()
    model = load_model(folder, dtype=torch.float32, device="meta" if dist.get_rank() else "cpu")
    synchronize(model, bucket_bytes=2**20)
    size = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    return resident_bytes("VmHWM") - start, bytes_read() - read_before, size


def warm_up() -> None:
    """What the first load of a process imports and allocates is no part of the model."""
    from tests.parallel.models import tiny_base

    synchronize(tiny_base())
    gc.collect()


def bytes_read() -> int:
    """By read calls of this process, cached or not."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


def test_each_rank_peaks_at_its_copy_and_one_reads(tmp_path) -> None:
    base = tiny.save_base(tmp_path / "base", tie_word_embeddings=False, **LARGE)
    size = (base / "model.safetensors").stat().st_size
    tiny_load = tiny.save_base(tmp_path / "tiny", tie_word_embeddings=False)
    run(2, load_and_synchronize, str(tiny_load))  # imports
    for rank, (peak, read, model_bytes) in enumerate(run(2, load_and_synchronize, str(base))):
        assert model_bytes == pytest.approx(size, rel=0.02)
        assert peak < 1.15 * size + FIXED_BYTES
        assert (read > 0.99 * size) == (rank == 0)
        assert rank == 0 or read < 0.05 * size
