"""Do all ranks hold the same kind of model? Asked before any engine wraps, shards or trains it."""

import torch.distributed as dist
from torch import nn

from halfbyte.parallel.agree import CHECK_TIMEOUT_S, agree
from halfbyte.parallel.describe import Description, describe, differences, differences_error
from halfbyte.parallel.materialize import has_meta


def compare_models(
    model: nn.Module, *, group: dist.ProcessGroup | None = None, timeout: float = CHECK_TIMEOUT_S
) -> tuple[Description, str]:
    """One exchange of descriptions; returns this rank's description and the type of device that rank zero uses.

    raises  on every rank the same ValueError or RuntimeError: the models differ, a base component could be trained,
            describing failed on a rank, a rank is missing, or rank zero has no weights.
    """
    error: Exception | None = None
    payload = None
    try:
        payload = {"model": describe(model), "device": _device_type(model)}
    except Exception as caught:
        error = caught
    payloads = agree("Comparing the model across ranks", payload, error=error, group=group, timeout=timeout)
    lines = differences([p["model"] for p in payloads])
    if lines:
        raise differences_error(lines)
    if payloads[0]["device"] == "meta":
        raise ValueError("Rank 0's model is on the meta device: rank 0 must load the checkpoint, the others need not.")
    return payloads[dist.get_rank(group)]["model"], payloads[0]["device"]


def _device_type(model: nn.Module) -> str:
    if has_meta(model):
        return "meta"
    return next((t.device.type for t in model.parameters()), "cpu")
