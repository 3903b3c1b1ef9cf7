"""Where the next turn runs: the rules that the scheduler's placing and the router (`gruppetto route`) share.

Pure, the standard library alone: no sockets, no clock, no tokens. `moving` (how much of an engine is taken, when it
pays to leave one), `concurrency` (how many it is given), `pace` (which one is slow), `prices` (what a turn takes, as
learned), `rules` (the figures). The account of engines and of what runs there is kept by those who ask.
"""
