"""The scheduler: what runs next is its decision, and its alone.

`policies` are pure, `pool` holds the state they see, `loop` turns actions into calls.
"""
