"""Published scheduling results, predicted: one module a paper, ours beside theirs, every chosen input with its reason.

`study` is what a record is and how it counts, `bench` the run behind it, `oracle` and `speculate` what only
reproductions need, `catalogue` all studies and the records that no scheduler can predict.
"""
