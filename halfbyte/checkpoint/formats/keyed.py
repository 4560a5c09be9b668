"""NVFP4 weights kept under one key per component, block scales row-major: what compressed-tensors and ModelOpt share.

They differ in names, in the shape of a tensor scale, and in its direction: compressed-tensors stores the reciprocal of
what ModelOpt stores. 1/(1/x) is x for five fp32 numbers in six; the others come back an ULP away, and exports say so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.checkpoint.formats.base import (
    Rename,
    StoredWeight,
    check_global_scale,
    check_qdata,
    check_scales,
    check_spec,
)
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts
from halfbyte.nvfp4.linear import ActivationQuant

ActivationOf = Callable[[str, float | None], ActivationQuant | None]  # fqn, stored scale as it multiplies -> setting


@dataclass(frozen=True)
class KeyedLayout:
    """Names of the components after the linear's name, and how tensor scales are stored.

    scalar_shape  of a new tensor scale; () and (1,) are both read.
    reciprocal    True when the file holds 1/scale.
    """

    names: Mapping[str, str]
    scalar_shape: tuple[int, ...]
    reciprocal: bool

    @property
    def codes_suffix(self) -> str:
        """What follows a linear's name in the key of its codes."""
        return f".{self.names['qdata']}"

    def find(self, shards: Shards, rename: Rename, activation_of: ActivationOf) -> dict[str, StoredWeight]:
        """Every linear whose codes are there as uint8, checked."""
        found = {}
        for key in shards:
            if key.endswith(self.codes_suffix) and shards.spec(key).dtype == torch.uint8:
                fqn = key.removesuffix(self.codes_suffix)
                found[fqn] = self._stored(shards, fqn, rename, activation_of)
        return found

    def _stored(self, shards: Shards, fqn: str, rename: Rename, activation_of: ActivationOf) -> StoredWeight:
        keys = {component: f"{fqn}.{name}" for component, name in self.names.items()}
        if keys["act_scale"] not in shards:
            del keys["act_scale"]
        for component, key in keys.items():
            if key not in shards:
                raise ValueError(
                    f"{shards.folder}: {key} is in no file, but {fqn} needs it ({component}). Fetch it again."
                )
        specs = {component: shards.spec(key) for component, key in keys.items()}
        path = {component: shards.path_of(key) for component, key in keys.items()}
        rows, cols = check_qdata(path["qdata"], keys["qdata"], specs["qdata"])
        check_spec(path["scale"], keys["scale"], specs["scale"], torch.float8_e4m3fn, (rows, cols // BLOCK_SIZE))
        for component in ("global_scale", "act_scale"):
            if component in keys:
                check_spec(path[component], keys[component], specs[component], torch.float32, (), (1,))
        act_scale = None
        if "act_scale" in keys:
            act_scale = float(self._scalar(shards, keys["act_scale"]))
        activation = activation_of(fqn, act_scale)
        if activation is None or activation.scale is None:  # a scale that the config does not use is an extra
            keys.pop("act_scale", None)
            specs.pop("act_scale", None)
        model_fqn = rename(f"{fqn}.weight").removesuffix(".weight")
        return StoredWeight(fqn, model_fqn, (rows, cols), keys, specs, activation)

    def read(self, shards: Shards, stored: StoredWeight) -> NVFP4Parts:
        qdata = shards.read(stored.keys["qdata"])
        return NVFP4Parts(qdata, self.read_scale(shards, stored), self.read_global_scale(shards, stored))

    def read_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        scale = shards.read(stored.keys["scale"])
        check_scales(shards.path_of(stored.keys["scale"]), stored.keys["scale"], scale)
        return scale

    def read_global_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        return self._scalar(shards, stored.keys["global_scale"])

    def plan(
        self, fqn: str, model_fqn: str, shape: tuple[int, int], activation: ActivationQuant | None
    ) -> StoredWeight:
        """raises  ValueError for a dynamic activation scale, which these formats do not have."""
        rows, cols = shape
        specs = {
            "qdata": TensorSpec(torch.uint8, (rows, cols // 2)),
            "scale": TensorSpec(torch.float8_e4m3fn, (rows, cols // BLOCK_SIZE)),
            "global_scale": TensorSpec(torch.float32, self.scalar_shape),
        }
        if activation is not None:
            if activation.scale is None:
                raise ValueError(
                    f"{fqn}: its activations are scaled on the fly, but this format needs a calibrated scale. Export "
                    "it weight-only (--activations none)."
                )
            specs["act_scale"] = TensorSpec(torch.float32, self.scalar_shape)
        keys = {component: f"{fqn}.{self.names[component]}" for component in specs}
        return StoredWeight(fqn, model_fqn, shape, keys, specs, activation)

    def encode(self, stored: StoredWeight, parts: NVFP4Parts) -> dict[str, Tensor]:
        tensors = {"qdata": parts.qdata, "scale": parts.scale, "global_scale": self._stored_scalar(parts.global_scale)}
        if "act_scale" in stored.keys:
            assert stored.activation is not None and stored.activation.scale is not None
            tensors["act_scale"] = self._stored_scalar(torch.tensor(stored.activation.scale, dtype=torch.float32))
        return {stored.keys[c]: tensor.reshape(stored.specs[c].shape) for c, tensor in tensors.items()}

    def _scalar(self, shards: Shards, key: str) -> Tensor:
        """A tensor scale as it multiplies, fp32 []."""
        value = shards.read(key).reshape(())
        if self.reciprocal:
            value = 1 / value
        check_global_scale(shards.path_of(key), key, value)
        return value

    def _stored_scalar(self, value: Tensor) -> Tensor:
        return 1 / value if self.reciprocal else value


class KeyedFormat:
    """The half of a `Format` that its layout decides; a format adds its name, `find`, `declare` and the rest."""

    layout: KeyedLayout

    def read(self, shards: Shards, stored: StoredWeight) -> NVFP4Parts:
        return self.layout.read(shards, stored)

    def read_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        return self.layout.read_scale(shards, stored)

    def read_global_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        return self.layout.read_global_scale(shards, stored)

    def plan(
        self,
        fqn: str,
        model_fqn: str,
        shape: tuple[int, int],
        activation: ActivationQuant | None,
        dtype: torch.dtype,
    ) -> StoredWeight:
        return self.layout.plan(fqn, model_fqn, shape, activation)

    def encode(self, stored: StoredWeight, parts: NVFP4Parts) -> dict[str, Tensor]:
        return self.layout.encode(stored, parts)

    def file_metadata(self, names: list[str], weights: Mapping[str, StoredWeight]) -> dict[str, str]:
        return {}
