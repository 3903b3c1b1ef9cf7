"""`python -m gruppetto` is `gruppetto`."""

from gruppetto.cli.main import run

run()
