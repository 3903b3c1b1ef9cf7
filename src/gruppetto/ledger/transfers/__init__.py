"""What moves between trainer and engines: a weight sync, and the hand-over of memory where they share GPUs.

`sync` a full sync, `delta` changed elements only, `adapters` LoRA, `transition` HybridFlow's formula, `switch` memory;
`pieces` and `mapping` say what is sent and how it is turned from one layout into the other.
"""
