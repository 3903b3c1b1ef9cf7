"""A plan as one HTML page: charts and tables that a person can read, with nothing to load from anywhere else."""

from gruppetto.ledger.page.document import page

__all__ = ["page"]
