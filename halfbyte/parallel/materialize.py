"""Give memory to a model on the meta device, so that a broadcast can fill it."""

import torch
from torch import Tensor, nn


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Replace every meta parameter and buffer by an uninitialized one on `device`; leave the others where they are.

    Tied tensors stay tied, and `requires_grad` stays as it is.
    raises  ValueError for a meta tensor that is a plain attribute: no engine could fill it.
    """
    made: dict[int, Tensor] = {}
    for fqn, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                fresh = made.setdefault(id(parameter), _empty_parameter(parameter, device))
                module.register_parameter(name, fresh)  # type: ignore[arg-type]
        persistent = module.state_dict(keep_vars=True).keys()
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                fresh = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))
                module.register_buffer(name, fresh, persistent=name in persistent)
        _refuse_hidden(fqn, module)


def _empty_parameter(parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)


def _refuse_hidden(fqn: str, module: nn.Module) -> None:
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"{fqn}.{name} is a tensor on the meta device, but neither a parameter nor a buffer, so it cannot be "
                "filled from rank 0. Register it as a buffer, or load the model on every rank."
            )
