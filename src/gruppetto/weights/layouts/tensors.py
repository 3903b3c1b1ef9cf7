"""The tensor side: a torch model's tensors under the names that travel, and their bits for numpy.

Promises: buffers that are part of the state (a router's correction bias) are there, those that are not (rotary caches)
are not; a tensor under two names comes once, under the first; wrappers leave no trace in names; the order is the
module's own, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts.fsdp import REPLICA, Cut
from gruppetto.weights.layouts.names import stripped
from gruppetto.weights.layouts.spec import Spec, item_bytes

Named = list[tuple[str, Tensor]]


def named_state(model: nn.Module) -> Named:
    """Parameters and persistent buffers, adapters left out. Raises `UserError` where two tensors get one name."""
    seen: set[int] = set()
    names: set[str] = set()
    found: Named = []
    for raw, tensor in model.state_dict(keep_vars=True).items():
        name = stripped(raw)
        if ".lora_" in name or id(tensor) in seen:
            continue
        if name in names:
            raise UserError(f"two tensors of the model are called {name} once wrappers are taken off")
        seen.add(id(tensor))
        names.add(name)
        found.append((name, tensor.detach()))
    return found


def missed_by_parameters(model: nn.Module) -> list[str]:
    """Names that an export over `named_parameters` alone would leave behind."""
    parameters = {stripped(name) for name, _ in model.named_parameters()}
    return [name for name, _ in named_state(model) if name not in parameters]


def spec_of(name: str, tensor: Tensor) -> Spec:
    """With the full shape, also of a DTensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    item_bytes(dtype)
    return Spec(name, tuple(tensor.shape), dtype)


def specs_of(named: Iterable[tuple[str, Tensor]]) -> list[Spec]:
    return [spec_of(name, tensor) for name, tensor in named]


def cuts_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Cut, ...]]:
    """A DTensor's mesh sizes, this rank's place and how each mesh axis cuts: what `fsdp.rank_map` takes.

    Raises `RunError` for partial sums and for a rank outside the mesh; a plain tensor has no mesh: ((), (), ()).
    """
    if not isinstance(tensor, DTensor):
        return (), (), ()
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        raise RunError(f"this rank is not part of the mesh {mesh}")
    return tuple(mesh.shape), tuple(place), tuple(_cut(placement) for placement in tensor.placements)


def _cut(placement: Any) -> Cut:
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim, strided=True)
    if isinstance(placement, Shard):
        return Cut(placement.dim)
    if isinstance(placement, Replicate):
        return REPLICA
    raise RunError(f"a parameter is placed as {placement}; weights can be sharded or replicated only")


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_bits(tensor: Tensor) -> NDArray[Any]:
    """The values as unsigned integers of their width, same shape. A view where the tensor is contiguous on the CPU."""
    plain = local_of(tensor.detach()).cpu().contiguous()
    width = plain.element_size()
    if plain.dim() == 0:
        return as_bits(plain.reshape(1)).reshape(())
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    array: NDArray[Any] = plain.view(signed).numpy()
    return array.view(np.dtype(f"u{width}"))
