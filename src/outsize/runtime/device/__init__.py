"""Devices behind one contract, and the memory that they take."""
