"""Gradient release: each parameter is stepped inside backward as soon as its gradient is complete, which is then freed.

So a model's gradients never exist all at once: their memory falls from the whole model's to the largest parameter's.
The idea is LOMO's (Lv et al., 2023) and that of torch's post-accumulate-grad hooks. The price is what needs all
gradients together: clipping by their norm, `GradScaler`, accumulation over several backward passes, and the optimizer's
step hooks. Where gradients are reduced after backward (DDP) or by a wrapper (FSDP2), a hook would see the wrong ones:
refused.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfbyte.optim.adamw import AdamW
from halfbyte.optim.sharding import is_dtensor


class GradientRelease:
    """Hooks that step an optimizer parameter by parameter during backward.

        release = GradientRelease(model, optimizer)
        for batch in data:
            model(batch).backward()   # every parameter is stepped in here
            optimizer.step()          # finds no gradients: nothing to do, but keeps schedulers content
            scheduler.step()
        release.remove()

    raises ValueError for a model under DistributedDataParallel or with DTensor parameters.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW) -> None:
        if hasattr(model, "require_backward_grad_sync"):
            raise ValueError(
                "gradient release steps a parameter before DistributedDataParallel has averaged its gradient over the "
                "ranks. Use it on one process, or keep the ordinary optimizer.step()."
            )
        self.optimizer = optimizer
        self.handles: list[RemovableHandle] = []
        place = 0
        for group_place, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                self._hook(param, group_place, place)
                place += 1

    def _hook(self, param: Tensor, group_place: int, place: int) -> None:
        if is_dtensor(param):
            raise ValueError(
                f"a parameter of shape {list(param.shape)} is a DTensor: FSDP2 and tensor parallelism set gradients "
                "outside of autograd's accumulation, so there is nothing to hook. Keep the ordinary optimizer.step()."
            )
        if not param.requires_grad:
            return
        # A hook lives in its parameter, where Python's collector does not look: with anything in it that leads back to
        # the parameter, model and optimizer would never be freed.
        owner = weakref.ref(self.optimizer)

        def step(param: Tensor) -> None:
            optimizer = owner()
            if optimizer is None:
                raise RuntimeError(
                    "the optimizer that gradient release steps is gone. Keep it as long as the model is trained, or "
                    "call remove() on the GradientRelease."
                )
            optimizer.step_parameter(param, group_place, place)
            param.grad = None

        self.handles.append(param.register_post_accumulate_grad_hook(step))

    def remove(self) -> None:
        """Take the hooks off; `optimizer.step()` works again as usual."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def gradient_bytes(params: Iterable[Tensor]) -> tuple[int, int]:
    """(bytes of all gradients, bytes of the largest): what backward holds without and with gradient release."""
    sizes = [param.numel() * param.element_size() for param in params if param.requires_grad]
    return sum(sizes), max(sizes, default=0)
