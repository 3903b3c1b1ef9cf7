"""What the scheduler believes: how long rollouts get, what a prompt's past says, and which choice follows.

Pure, and the standard library only: scheduling policies read it.
"""
