"""One of two trainer ranks: shards a model with FSDP2, takes optimizer steps, publishes to an engine on rank 0.

Arguments: model folder, rank, port, channel, engine's type. Prints "same" for each version that the engine holds bit
for bit.
"""

import asyncio
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.weights.channels.sharded import Sharded, follow
from gruppetto.weights.layouts.tensors import named_state
from gruppetto.weights.publish import PublishSettings, TwoPhase


def train(model, optimizer, version: int) -> None:
    ids = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(version))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


async def lead(path, model, optimizer, channel, dtype) -> None:
    engine = EmbeddedEngine("e", path, slots=2, context=64, device="cpu", dtype=dtype)
    await engine.start()
    await engine.pause("keep")
    publish = TwoPhase(PublishSettings(channel=channel, bucket_bytes=1 << 18, deadline_s=30, verify_every=1))
    for version in (1, 2):
        train(model, optimizer, version)
        source = Sharded(named_state(model))
        await publish.publish(version, source, [engine])
        source.close()
        served = (await engine.weights()).tensors
        for name, tensor in named_state(model):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(served[name], whole.to(served[name].dtype)), name
        print("same", version, len(served), flush=True)
    await engine.close()


async def second(model, optimizer) -> None:
    for version in (1, 2):
        train(model, optimizer, version)
        await follow(named_state(model))
        for _, tensor in named_state(model):
            if hasattr(tensor, "full_tensor"):
                tensor.full_tensor()


def main() -> None:
    path, rank, port, channel, dtype = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    asyncio.run(lead(path, model, optimizer, channel, dtype) if rank == "0" else second(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
