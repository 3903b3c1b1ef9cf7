"""Published figures that a ledger can predict, each beside ours: `gruppetto reproduce ledger`.

`study` and `counting` are what a reproduction is and how rows count, for the simulator's reproductions too; one module
a theme holds the records; `catalogue` has all of them, and those that no ledger predicts with the reason.
"""
