"""Tensors of a few types and odd shapes, by a seed."""

import torch


def tensors(count=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(300, 17), (1,), (), (64, 64), (0, 4), (999,), (33, 33)] * (count // 7 + 1)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8] * count
    return [(f"t{i}", (torch.randn(shapes[i], generator=generator) * 50).to(dtypes[i])) for i in range(count)]
