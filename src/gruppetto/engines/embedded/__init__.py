"""The embedded engine: continuous batching over a Hugging Face model, in this process, on a thread of its own.

`engine` is the async face, `thread` the crossing between event loop and engine thread, `core` the synchronous engine.
Importing this package imports no torch; importing `engine` does.
"""
