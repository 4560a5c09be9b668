"""Compile the one small op that DeepSpeed needs on a CPU, once, before any rank waits for it.

    python -m tests.parallel.build_deepspeed_op        # about a minute, with g++; afterwards it only checks

Ranks that find the op missing would all try to build it: one compiles, the others wait for its lock, and the lock of
a build that was killed makes later runs wait in silence. So it has a folder of its own, where stale locks are removed
here.
"""

import os

from tests.parallel.zero import EXTENSIONS, environment


def build() -> None:
    os.environ |= environment()
    for lock in EXTENSIONS.glob("*/lock"):
        lock.unlink()
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    build()
