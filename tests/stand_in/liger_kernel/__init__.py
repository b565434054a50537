"""Stands in for the package liger-kernel: its interface, and what its kernels do to memory, in torch on a CPU.

Forwards save what Liger's save. Rotations write over queries and keys, backwards over gradients and what was saved, and
no one is told, as where Triton writes.
"""
