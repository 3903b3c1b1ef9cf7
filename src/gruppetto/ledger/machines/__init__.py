"""GPUs, the links between them, and what share of their peaks a stage reaches.

`gpus` data sheets, `cluster` links and collectives, `efficiency` the shares with their sources, `engines` the price
list of a serving engine, `training` seconds of an optimizer step, `storage` bytes of tensors by type.
"""
