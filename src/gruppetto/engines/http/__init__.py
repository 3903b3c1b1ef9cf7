"""What engines behind HTTP share: the client, its errors and deadlines, streams, and the contract on top of a wire.

`client` one server's HTTP · `engine` the engine contract over a `wire` · `calls` requests under way · `answers` wire to
results · `account` what the engine did · `watching` whether it lives · `staging` weights as a model folder ·
`build` picks. The wires are `engines.sglang` and `engines.vllm`, processes are `engines.launch`'s.
"""
