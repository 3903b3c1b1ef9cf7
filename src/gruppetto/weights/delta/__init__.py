"""Only what changed: a weights version as its difference from the one before.

After one optimizer step about 1 % of the bits of bfloat16 weights differ, since a step smaller than half a unit in the
last place rounds back (PULSE, arXiv:2602.03839). `compare` finds the positions, `coding` writes them down, `packet` is
what travels, `snapshot` is the sender's side and `held` the receiver's.
"""
