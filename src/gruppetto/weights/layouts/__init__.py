"""Where each element of a model lies, in every layout that weights travel between.

The exchange format is Hugging Face's names with their full shapes; every other layout is a map from it (`maps`), made
from names, shapes and numbers of ranks alone (`fsdp`, `megatron`, `vllm`, `experts`, `scales`, `lora`). A map is data:
bytes can be counted and a transfer planned (`moves`) before there is any tensor. Only `tensors` knows torch.
"""
