"""One of two trainer ranks: holds its part of a model (FSDP2), takes optimizer steps, publishes to a vLLM server.

Arguments: model folder, rank, port, the server's URL, a folder for weights. Rank 0 prints a line of JSON for each
version: what the server sampled, what the whole model says of it, and what the model before says.
"""

import asyncio
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.http.build import http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.weights.channels.sharded import Sharded, follow
from gruppetto.weights.inprocess import InProcessChannel
from gruppetto.weights.layouts.tensors import local_of, named_state

PROMPT, TOKENS, VERSIONS = (10, 20, 30, 40), 16, (1, 2)
BUCKET_BYTES = 1 << 18


def step(model, optimizer, version):
    ids = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(version))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(path, model):
    """The model in one piece; every rank calls it."""
    state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in named_state(model)}
    one = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    missing, unexpected = one.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return one


def told_by(model, made):
    """Logprobs of the tokens, and which one is likeliest at each place."""
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *made]])).logits[0, len(PROMPT) - 1 : -1]
    table = torch.log_softmax(logits.double(), -1)
    return [float(table[at, token]) for at, token in enumerate(made)], table.argmax(-1).tolist()


async def lead(path, model, optimizer, url, folder):
    before = whole(path, model)
    engine = http_engine("vllm", "e", HttpSettings(slots=2, context=128), Staging(folder, path), url=url)
    await engine.start()
    try:
        for version in VERSIONS:
            step(model, optimizer, version)
            source = Sharded(named_state(model))
            await engine.pause("keep")
            try:
                receipts = await InProcessChannel(BUCKET_BYTES).publish(version, source, [engine])
            finally:
                source.close()
            await engine.resume()
            sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
            result = await engine.generate(GenerateRequest(rid=f"r{version}", token_ids=PROMPT, sampling=sampling))
            ids = [token for segment in result.segments for token in segment.token_ids]
            logprobs = [value for segment in result.segments for value in segment.logprobs]
            now = whole(path, model)
            said, greedy = told_by(now, ids)
            row = {
                "version": version,
                "versions": sorted({segment.version for segment in result.segments}),
                "ids": ids,
                "logprobs": logprobs,
                "said": said,
                "greedy": greedy,
                "said_before": told_by(before, ids)[0],
                "bytes": receipts[0].num_bytes,
                "held": sum(local_of(t).numel() * t.element_size() for _, t in named_state(model)),
            }
            print(json.dumps(row), flush=True)
            before = now
    finally:
        await engine.close()


async def second(path, model, optimizer):
    whole(path, model)
    for version in VERSIONS:
        step(model, optimizer, version)
        await follow(named_state(model))
        whole(path, model)


def main():
    path, rank, port, url, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == "0":
        asyncio.run(lead(Path(path), model, optimizer, url, Path(folder)))
    else:
        asyncio.run(second(path, model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
