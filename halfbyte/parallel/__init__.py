"""Which rank holds what: data parallel, and what each engine must be told about a frozen NVFP4 base."""

from halfbyte.parallel.agree import agree, together
from halfbyte.parallel.ddp import ddp
from halfbyte.parallel.synchronize import SyncReport, synchronize

__all__ = ["SyncReport", "agree", "ddp", "synchronize", "together"]
