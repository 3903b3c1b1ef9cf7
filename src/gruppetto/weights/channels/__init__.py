"""How a weights version gets from the trainer's memory into an engine's, bucket by bucket.

`publish` decides what is sent to whom and when it is served; here is what carries it: shared memory on one host
(`shm`), a folder of safetensors (`disk`), a gloo broadcast (`gloo`). `feed` is the trainer's side of all three,
`receiver` the engine's, `port` what the trainer's side sees of an engine, in this process or over HTTP.
"""
