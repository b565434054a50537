"""Bytes in motion: devices, lanes, the executor, and what each op does. It reads programs and never makes them."""
