"""A model from its config: parameters, KV, state and FLOPs, counted by rule and without weights.

`model` is what the rest of the ledger sees; `read` makes one from a Hugging Face `config.json`, `catalog` from a name.
"""
