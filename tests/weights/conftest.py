"""Without the train extra there is no torch, and nothing here to collect."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
