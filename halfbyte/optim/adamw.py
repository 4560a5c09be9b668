"""Adam and AdamW whose moments take 8 or 4 bits: one optimizer with a state format, and six names that fix it.

Drop-in for `torch.optim.AdamW`: same update, same hyper-parameters, schedulers, closures, hooks and scalers.

    name        bytes per parameter   the price
    AdamW8bit   2.03                  each moment off by 1% (RMS, of its block's largest value)
    AdamWFp8    2.03                  3%, and the simplest kernel
    AdamW4bit   1.06                  15 to 30%

torch's own AdamW takes 8 (fp32) or 4 (bf16 parameters). Rejected: one class a format (each would copy the options), and
tensor subclasses as states, as torchao does (they break torch.load, deepcopy, DCP and FSDP2's checkpoints).
"""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from halfbyte.optim.checks import check_block_size, check_complete, check_grad, check_options, check_param
from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels.step import step as fused_step
from halfbyte.optim.loading import load_groups, load_state, load_states
from halfbyte.optim.offload import Streams, step_offloaded, to_host
from halfbyte.optim.plan import Plan
from halfbyte.optim.rounding import param_seed
from halfbyte.optim.saving import pack_state_dict
from halfbyte.optim.sharding import arrived, counter_of, is_dtensor, local_grad, local_tensor
from halfbyte.optim.state import is_quantized, is_steppable, moment_names, new_moment, new_state

STATE_VERSION = 1
"""Written into every param group of a state dict; a larger one in a file is refused."""


class AdamW(Optimizer):
    """AdamW (or Adam) with moments in a state format.

    params           tensors, dicts or named tensors, as in torch.optim.
    lr               float or 0-d tensor (read on its device; groups do not share it).
    block_size       values that share a scale; default 256 (8bit, fp8) or 128 (4bit).
    min_quant_numel  parameters with fewer values, counted over the whole mesh, keep fp32 states; 0 quantizes all.
    bf16_stochastic_round  round bf16 parameters stochastically, from `seed`, the step and the element's place
                     (halfbyte.optim.rounding); use it when bf16 parameters have no fp32 master copy.
    state_format     "8bit", "4bit" or "fp8"; the named classes fix it.
    offload_states   keep the moments in CPU memory and stream them through the GPU (halfbyte.optim.offload).
    maximize         as in torch. foreach, fused, capturable are accepted and change nothing: the step is always fused
                     where a kernel is available, and never synchronizes. differentiable=True is refused.
    raises           ValueError for an option or a parameter that is not supported.
    """

    state_format = "8bit"
    decoupled_weight_decay = True
    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf; nothing waits for the GPU

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int | None = None,
        min_quant_numel: int = 4096,
        bf16_stochastic_round: bool = False,
        maximize: bool = False,
        seed: int = 0,
        offload_states: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "block_size": self._format(block_size).block_size,
            "min_quant_numel": min_quant_numel,
            "bf16_stochastic_round": bf16_stochastic_round,
            "maximize": maximize,
            "seed": seed,
            "offload_states": offload_states,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        self._caches: list[dict] = []  # of each group: its plan and the kernels' tables; never saved
        self._parameter_caches: dict[int, dict] = {}  # the same of parameters that are stepped alone, by place
        self._known_states: list[int] = []
        self._streams: dict[torch.device, Streams] = {}
        super().__init__(params, defaults)
        self._states_seen = False
        if isinstance(lr, Tensor):  # a scheduler writes into the group's tensor; defaults stay what was asked for
            self.defaults["lr"] = lr.detach().clone()

    @property  # type: ignore[override]
    def state(self) -> Any:
        """States by parameter, as in torch.

        Whoever reads this may replace or move a state at any time, so every later step looks where they lie (0.16 ms
        for 448 parameters); a step of an optimizer whose states nobody has had need not.
        """
        self._states_seen = True
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self._states_seen = True
        self.__dict__["state"] = state

    @property
    def own_state(self) -> Any:
        """`state`, for callers that neither keep nor move what they find."""
        return self.__dict__["state"]

    @classmethod
    def _format(cls, block_size: int | None) -> StateFormat:
        return FORMATS[cls.state_format].with_block_size(block_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks options and parameters, and gives the group an lr tensor of its own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            self._format(group["block_size"])
            for param in group["params"]:
                check_param(param)
        except ValueError:
            self.param_groups.pop()
            raise
        if isinstance(group["lr"], Tensor) and any(group["lr"] is other["lr"] for other in self.param_groups[:-1]):
            group["lr"] = group["lr"].detach().clone()
        group["state_format"] = self.state_format
        group["state_version"] = STATE_VERSION
        self._caches.append({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._caches, self._known_states, self._streams = [{} for _ in self.param_groups], [], {}
        self._parameter_caches = {}
        self._states_seen = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._states_seen and self._states_changed():
            for cache in self._caches:
                cache.pop("plan", None)
        first = 0
        for group, cache in zip(self.param_groups, self._caches, strict=True):
            self._step_group(group, cache, first)
            first += len(group["params"])
        if not self._known_states:  # a plan was made, perhaps with new states
            self._known_states = list(map(id, self.own_state.values()))
        return loss

    def _states_changed(self) -> bool:
        """Whether somebody else put a state in, took one out, emptied one, or set its step to a number."""
        states = self.own_state.values()
        return list(map(id, states)) != self._known_states or not all(map(is_steppable, states))

    def _step_group(self, group: dict[str, Any], cache: dict, first: int) -> None:
        """Step one param group; `first` is the place of its first parameter among all."""
        params = group["params"]
        grads = [param.grad for param in params]
        places: Sequence[int] = range(first, first + len(params))
        kinds = set(map(type, grads))
        if not kinds <= {Tensor, NoneType}:
            grads = [self._settled(*pair) for pair in zip(params, grads, strict=True)]
        if NoneType in kinds:
            live = [i for i, grad in enumerate(grads) if grad is not None]
            params, grads, places = [params[i] for i in live], [grads[i] for i in live], [first + i for i in live]
        if params:
            self._step_params(params, grads, places, group, cache)

    @torch.no_grad()
    def step_parameter(self, param: Tensor, group_place: int, place: int) -> None:
        """Step one parameter alone, with its group's options; see `halfbyte.optim.gradient_release`.

        group_place, place  of its group among the groups, and of it among all parameters.
        """
        cache = self._parameter_caches.setdefault(place, {})
        plan = cache.get("plan")
        if plan is not None and not (is_steppable(plan.states[0]) and plan.states[0] is self.own_state.get(param)):
            cache.clear()  # somebody put another state in, or changed it
        self._step_params([param], [param.grad], [place], self.param_groups[group_place], cache)

    def _step_params(
        self, params: list[Tensor], grads: list[Any], places: Sequence[int], group: dict[str, Any], cache: dict
    ) -> None:
        plan = cache.get("plan")
        if plan is None or not plan.fits(params, group):
            plan = cache["plan"] = self._plan(params, grads, places, group)
        locals_, counters = plan.params, plan.counters
        if plan.sharded:
            locals_ = [local_tensor(param) for param in params]
            grads = [self._local_grad(*pair) for pair in zip(params, grads, strict=True)]
        arguments = {
            "hyper": self._hyper(group),
            "fmt": self._format(group["block_size"]),
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
            "cache": cache.setdefault("kernels", {}),
            "states_stay": not self._states_seen and not group["offload_states"],  # else they are copies
        }
        if not group["offload_states"]:
            fused_step(locals_, grads, plan.states, counters=counters, **arguments)
            return

        def step(own: list[Tensor], own_grads: list[Tensor], states: list[dict], members: list[int]) -> None:
            own_counters = None if counters is None else [counters[i] for i in members]
            fused_step(own, own_grads, states, counters=own_counters, **arguments)

        step_offloaded(locals_, grads, plan.states, step, self._streams)

    def _plan(self, params: list[Tensor], grads: list[Any], places: Sequence[int], group: dict[str, Any]) -> Plan:
        """What a step over these parameters needs and the next one can use again."""
        self._known_states = []
        for param, grad in zip(params, grads, strict=True):
            check_grad(param, grad)
        counters = None
        if group["bf16_stochastic_round"]:
            counters = [
                counter_of(param, param_seed(group["seed"], place)) for param, place in zip(params, places, strict=True)
            ]
        return Plan(
            params=list(params),
            states=[self._state(param, group) for param in params],
            counters=counters,
            sharded=any(map(is_dtensor, params)) or any(map(is_dtensor, grads)),
            options=Plan.options_of(group),
        )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return Hyper(
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            decoupled=self.decoupled_weight_decay,
            maximize=group["maximize"],
            amsgrad=group["amsgrad"],
            stochastic=group["bf16_stochastic_round"],
        )

    @staticmethod
    def _settled(param: Tensor, grad: Any) -> Any:
        """A gradient of a class of its own: waited for, or refused; a DTensor's time comes in `_local_grad`."""
        if grad is None or is_dtensor(grad):
            return grad
        grad = arrived(grad)
        check_grad(param, grad)
        return grad

    @staticmethod
    def _local_grad(param: Tensor, grad: Tensor) -> Tensor:
        check_grad(param, grad)
        return local_grad(param, grad)

    def group_format(self, param: Tensor, group: dict[str, Any]) -> StateFormat | None:
        """The format of a parameter's state; None: it stays fp32."""
        return self._format(group["block_size"]) if is_quantized(param, group["min_quant_numel"]) else None

    def _state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The parameter's state: made on first use, and brought into the form of memory."""
        state = self.own_state[param]
        if state:
            check_complete(param.shape, state)
        if not state:
            fmt = self.group_format(param, group)
            fresh = new_state(local_tensor(param), fmt, amsgrad=group["amsgrad"])
            state.update(to_host(fresh) if group["offload_states"] else fresh)
        elif "exp_avg_scale" in state and not self._is_in_memory_form(param, state, group):
            check_block_size(local_tensor(param), state, self._format(group["block_size"]))
            # ZeroRedundancyOptimizer puts a state dict's entries into `state` itself, and `step` on the CPU
            state.update(load_state(param, dict(state), self._format(group["block_size"]), group, set()))
        if getattr(state["step"], "device", None) != local_tensor(param).device:  # a number, where somebody set one
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(local_tensor(param).device)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:  # switched on after the first step
            fmt = self.group_format(param, group) if "exp_avg_scale" in state else None
            fresh = new_moment(local_tensor(param), fmt, moment_names(True)[-1])
            state.update(to_host(fresh) if group["offload_states"] else fresh)
        return state

    def _is_in_memory_form(self, param: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> bool:
        num_blocks = self._format(group["block_size"]).num_blocks(local_tensor(param).numel())
        return state["exp_avg"].dim() == 1 and state["exp_avg_scale"].shape == (num_blocks,)

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with plain tensors whose shapes no mesh changes (halfbyte.optim.layout says which).

        For DTensor parameters the values are DTensors; call it on every rank, as shards that cut a granule apart
        are gathered. Codes may share memory with the optimizer.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self.synchronize()
        state_dict = pack_state_dict(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def synchronize(self) -> None:
        """Wait for offloaded states that are still on their way to CPU memory; `state_dict` does so itself."""
        for streams in self._streams.values():
            streams.synchronize()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load our own state dict, or torch's AdamW's, torchao's or bitsandbytes' by converting.

        Never casts a state. This optimizer keeps its state format, block size and min_quant_numel; where the state
        dict has others it is converted, and a warning says so. torch's own method would cast states to the
        parameter's dtype, which rounds fp32 moments of a bf16 parameter and ruins codes.
        raises  ValueError when groups or shapes do not fit, or the state was written by a newer version.
        """
        self.synchronize()
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = load_groups(self, state_dict["param_groups"])
        state = load_states(self, state_dict)
        for group, new in zip(self.param_groups, groups, strict=True):
            if isinstance(group["lr"], Tensor):  # who holds the tensor goes on steering with it
                new["lr"] = group["lr"].fill_(new["lr"])
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class AdamW8bit(AdamW):
    """`AdamW` with 8-bit states: 2.03 bytes per parameter, torchao's and bitsandbytes' dynamic codes."""

    state_format = "8bit"


class AdamW4bit(AdamW):
    """`AdamW` with 4-bit states: 1.06 bytes per parameter."""

    state_format = "4bit"


class AdamWFp8(AdamW):
    """`AdamW` with FP8 (E4M3) states: 2.03 bytes per parameter."""

    state_format = "fp8"


class Adam(AdamW):
    """Adam: weight decay is an L2 term of the gradient, and 0 by default, as in torch.optim.Adam."""

    decoupled_weight_decay = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class Adam8bit(Adam):
    """`Adam` with 8-bit states."""

    state_format = "8bit"


class Adam4bit(Adam):
    """`Adam` with 4-bit states."""

    state_format = "4bit"


class AdamFp8(Adam):
    """`Adam` with FP8 (E4M3) states."""

    state_format = "fp8"
