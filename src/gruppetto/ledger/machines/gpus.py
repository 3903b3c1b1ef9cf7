"""GPUs as the ledger sees them: peak compute, memory, links. Per GPU, dense (no sparsity), links in one direction.

`gpu_of` finds one by name or reads one from a TOML or JSON file. Promises: an unknown name is answered with the nearest
known one; a file with a missing or absurd figure is refused with what would do.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from gruppetto.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """Data-sheet figures of one GPU (or of a processor that stands in for one). FLOP/s dense, bytes/s, bytes."""

    name: str
    bf16_flops: float
    bandwidth: float
    """Of its own memory."""
    memory: float
    fp8_flops: float = 0.0
    """0 = no FP8 units."""
    fp4_flops: float = 0.0
    """0 = no FP4 units."""
    fp32_flops: float = 0.0
    """Where weights of 32 bits are multiplied at another rate; 0 = as in 16 bits."""
    peer_link: float = 0.0
    """To the other GPUs of its node: NVLink or xGMI, all links together, one direction. 0 = none: over `host_link`."""
    host_link: float = 64e9
    """To host memory, one direction: PCIe, or NVLink-C2C. Default: PCIe 5.0 x16."""
    network: float = 50e9
    """To other nodes, its share of the node's adapters. Default: one 400 Gb/s adapter a GPU."""
    gpus_per_node: int = 8
    """How many share `peer_link` and a host (GB200 NVL72: one NVLink domain of 72)."""
    host_memory: float = 2e12
    """Of one node."""
    source: str = ""
    """Where these figures come from."""

    def flops(self, weight_bytes_per_param: float) -> float:
        """Peak FLOP/s at this weight size: FP8 for one byte and less, where the GPU has it, else BF16."""
        return self.fp8_flops if weight_bytes_per_param <= 1 and self.fp8_flops else self.bf16_flops

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products with weights of this type.

        fp8 where the GPU has such units. mxfp4 weights meet 8-bit activations where it has 4-bit units, and are
        multiplied in 16 bits elsewhere, as int4 is everywhere: they save reading only.
        """
        if dtype == "fp32" and self.fp32_flops:
            return self.fp32_flops
        narrow = dtype == "fp8" or (dtype == "mxfp4" and self.fp4_flops > 0)
        return self.fp8_flops if narrow and self.fp8_flops else self.bf16_flops


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="A100", bf16_flops=312e12, bandwidth=2.039e12, memory=80e9, peer_link=300e9, host_link=32e9,
            network=25e9, source="NVIDIA A100 80GB SXM data sheet; DGX A100 640GB data sheet (200 Gb/s a GPU, 2 TB)",
        ),
        GPU(
            name="A100-40GB", bf16_flops=312e12, bandwidth=1.555e12, memory=40e9, peer_link=300e9, host_link=32e9,
            network=25e9, host_memory=1e12, source="NVIDIA A100 40GB SXM data sheet; DGX A100 320GB (200 Gb/s, 1 TB)",
        ),
        GPU(
            name="H100", bf16_flops=989e12, fp8_flops=1979e12, bandwidth=3.35e12, memory=80e9, peer_link=450e9,
            source="NVIDIA H100 SXM data sheet (half of the figures with sparsity); DGX H100 (400 Gb/s a GPU, 2 TB)",
        ),
        GPU(
            name="H200", bf16_flops=989e12, fp8_flops=1979e12, bandwidth=4.8e12, memory=141e9, peer_link=450e9,
            source="NVIDIA H200 SXM data sheet; DGX H200 (400 Gb/s a GPU, 2 TB)",
        ),
        GPU(
            name="H20", bf16_flops=148e12, fp8_flops=296e12, bandwidth=4.0e12, memory=96e9, peer_link=450e9,
            source="no public data sheet; vendors' listings agree on these (NVLink 900 GB/s both directions)",
        ),
        GPU(
            name="H800", bf16_flops=989e12, fp8_flops=1979e12, bandwidth=3.35e12, memory=80e9, peer_link=200e9,
            source="an H100 SXM with NVLink of 400 GB/s (DeepSeek-V3 report, arXiv:2412.19437) and reduced FP64",
        ),
        GPU(
            name="B200", bf16_flops=2250e12, fp8_flops=4500e12, fp4_flops=9000e12, bandwidth=8e12, memory=180e9,
            peer_link=900e9, source="NVIDIA DGX B200 data sheet, an eighth of it (1,440 GB, 64 TB/s; 400 Gb/s a GPU)",
        ),
        GPU(
            name="GB200", bf16_flops=2500e12, fp8_flops=5000e12, fp4_flops=10_000e12, bandwidth=8e12, memory=186e9,
            peer_link=900e9, host_link=225e9, gpus_per_node=72, host_memory=17e12,
            source="NVIDIA GB200 NVL72 data sheet, a 72nd of it; NVLink-C2C of 900 GB/s serves two GPUs",
        ),
        GPU(
            name="MI300X", bf16_flops=1307e12, fp8_flops=2615e12, bandwidth=5.3e12, memory=192e9, peer_link=448e9,
            source="AMD Instinct MI300X data sheet (896 GB/s peer to peer over 7 links; one pair has 64 GB/s)",
        ),
        GPU(
            name="L40S", bf16_flops=362e12, fp8_flops=733e12, bandwidth=864e9, memory=48e9, host_link=32e9,
            network=25e9, host_memory=1e12, source="NVIDIA L40S data sheet; adapters and host memory assumed",
        ),
        GPU(
            name="L4", bf16_flops=121e12, fp8_flops=242e12, bandwidth=300e9, memory=24e9, host_link=32e9,
            network=12.5e9, host_memory=0.5e12, source="NVIDIA L4 data sheet; adapters and host memory assumed",
        ),
        GPU(
            name="A10G", bf16_flops=70e12, bandwidth=600e9, memory=24e9, host_link=32e9, network=12.5e9,
            host_memory=0.768e12, source="NVIDIA A10G data sheet; Amazon EC2 g5.48xlarge (100 Gb/s, 768 GiB)",
        ),
        GPU(
            name="RTX5090", bf16_flops=209.5e12, fp8_flops=419e12, fp4_flops=1676e12, bandwidth=1.792e12, memory=32e9,
            network=1.25e9, host_memory=0.128e12,
            source="NVIDIA RTX Blackwell whitepaper (FP32 accumulation); adapters and host memory assumed",
        ),
        GPU(
            name="RTX4090", bf16_flops=165.2e12, fp8_flops=330.3e12, bandwidth=1.008e12, memory=24e9, host_link=32e9,
            network=1.25e9, host_memory=0.128e12,
            source="NVIDIA Ada whitepaper (FP32 accumulation); adapters and host memory assumed",
        ),
        GPU(
            name="RTX3090", bf16_flops=71e12, bandwidth=936e9, memory=24e9, host_link=32e9, network=1.25e9,
            host_memory=0.128e12,
            source="NVIDIA GA102 whitepaper (FP32 accumulation); adapters and host memory assumed",
        ),
    )
}  # fmt: skip

_ABSURD = {
    "bf16_flops": (1e9, 1e17),
    "fp8_flops": (1e9, 1e17),
    "fp4_flops": (1e9, 1e18),
    "fp32_flops": (1e9, 1e17),
    "bandwidth": (1e9, 1e15),
    "memory": (1e8, 1e14),
    "peer_link": (1e8, 1e14),
    "host_link": (1e8, 1e14),
    "network": (1e6, 1e14),
    "host_memory": (1e8, 1e17),
    "gpus_per_node": (1, 4096),
}
"""Figures outside are a slip of units: FLOP/s and bytes/s are plain numbers, 989e12 and not 989."""
_NONE = ("fp8_flops", "fp4_flops", "fp32_flops", "peer_link")
"""May be 0: the GPU has none."""


def gpu_of(name: str) -> GPU:
    """The GPU of this name ("h100", "H100-SXM"; case, "NVIDIA" and spaces do not count) or file ("my.toml", "my.json").

    Raises `UserError` for a name that is not known, with the nearest that is, and for a file with a figure missing or
    out of any sense.
    """
    if name.lower().endswith((".toml", ".json")):
        return _checked(_table(name), name)
    found = _by_key(_key(name))
    if found is not None:
        return found
    from difflib import get_close_matches

    near = get_close_matches(_key(name), [_key(known) for known in GPUS], n=1, cutoff=0.4)
    hint = f"did you mean {_by_key(near[0]).name}?" if near else f"known are {', '.join(GPUS)}"  # type: ignore[union-attr]
    raise UserError(f"gpu = {name!r}: not a known GPU; {hint}; a TOML file of its figures works too")


def _key(name: str) -> str:
    """What is compared: letters and digits, without makers and form factors."""
    text = "".join(c for c in name.upper() if c.isalnum())
    for word in ("NVIDIA", "AMD", "INSTINCT", "GEFORCE", "SXM5", "SXM4", "SXM", "NVL72", "HBM3E", "HBM3", "HBM2E"):
        text = text.replace(word, "")
    return {"A10080GB": "A100", "H10080GB": "H100", "H200141GB": "H200", "A10040GB": "A10040GB"}.get(text, text)


def _by_key(key: str) -> GPU | None:
    return next((gpu for name, gpu in GPUS.items() if _key(name) == key), None)


def _table(name: str) -> dict[str, Any]:
    """What the file says. A file may hold the figures at its top or in a table [gpu]."""
    import json
    import tomllib
    from pathlib import Path

    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise UserError(f"gpu = {str(path)!r}: {error.strerror or error}; give a readable file or a name") from None
    except ValueError as error:
        raise UserError(f"gpu = {str(path)!r}: not valid {path.suffix[1:].upper()} ({error})") from None
    inner = table.get("gpu", table) if isinstance(table, dict) else table
    if not isinstance(inner, dict):
        raise UserError(f"gpu = {str(path)!r}: holds no table of figures; write name = ..., bf16_flops = ...")
    return inner


def _checked(table: dict[str, Any], where: str) -> GPU:
    """A GPU from figures that a person or a measurement wrote."""
    from difflib import get_close_matches

    known = {field.name: field for field in fields(GPU)}
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise UserError(f"{where}: no figure {key!r}; {hint}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in table]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing; for instance bf16_flops = 989e12, bandwidth = 3.35e12")
    for key, (least, most) in _ABSURD.items():
        value = table.get(key, least)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (least <= value <= most or (value == 0 and key in _NONE)):
            raise UserError(f"{where}: {key} = {value!r}; a plain number from {least:g} to {most:g} is expected")
    if not isinstance(table["name"], str) or not isinstance(table.get("source", ""), str):
        raise UserError(f"{where}: name and source are texts")
    if not isinstance(table.get("gpus_per_node", 8), int):
        raise UserError(f"{where}: gpus_per_node = {table['gpus_per_node']!r}; a whole number is expected")
    return GPU(**table)
