"""What this machine reaches, measured: matrix products and memory (`machine`), the embedded engine and trainer on a
model (`engine`, `trainer`), and the constants of the ledger that follow (`fit`, `measure`)."""
