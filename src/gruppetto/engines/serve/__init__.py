"""An engine over HTTP: SGLang's native API and OpenAI's, around the embedded engine.

Promises: what SGLang answers is answered in its wire format, what the engine cannot do is refused by name (400), never
ignored; nothing from the network is unpickled or run; every input has a size limit and every wait a deadline.
"""
