"""Loaded into vLLM's processes by `--worker-extension-cls gruppetto_inside_vllm.Weights`, with this folder on
PYTHONPATH. Stands alone: the standard library and vLLM.

Why it is there: `reload_weights` refreshes a layer when its own tensors have arrived. A head that is tied to the
embedding gets none, and on a CPU it has packed its weights away at start: it goes on with the old ones, and nothing
says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Weights:
    """Methods of the object that owns the model (`self`), called by `/collective_rpc`. No other names: vLLM refuses an
    extension that has one of its own."""

    def gruppetto_load(self: Any, path: str) -> dict[str, Any]:
        """Takes all weights of a model folder. `packed`: layers whose tied weights were packed anew."""
        self.reload_weights(weights_path=path)
        return {"packed": repack_tied(self.model_runner.get_model())}

    def gruppetto_here(self) -> dict[str, Any]:
        """That this extension is loaded."""
        return {"file": Path(__file__).name}


def repack_tied(model: Any) -> list[str]:
    """Every layer with weights packed for a CPU that it shares with another layer packs them again."""
    owners: dict[int, list[str]] = {}
    layers = dict(model.named_modules(remove_duplicate=True))
    for name, layer in layers.items():
        weight = getattr(layer, "weight", None)
        if weight is not None and getattr(weight, "numel", int)():  # what was packed and thrown away is empty
            owners.setdefault(weight.data_ptr(), []).append(name)
    shared = [name for names in owners.values() if len(names) > 1 for name in names]
    packed = []
    for name in shared:
        layer = layers[name]
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(layer, "cpu_linear") and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)
            packed.append(name)
    return packed
