"""Bytes at rest: the ledger, host memory, the disk file, and the homes built on them."""
