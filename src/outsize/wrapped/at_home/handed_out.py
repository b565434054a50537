"""Tensors over the bytes of a home that a program may hold on to: who holds them, and how they get bytes apart.

What a program holds shows what lies at home. So a step under way is waited for as long as anything is held, and a
gradient that was let go of, and is still held, gets bytes of its own before the next one comes to where it lies.
"""

import logging
import weakref

import torch
from torch import Tensor

from outsize.compat.torch_private import num_holders
from outsize.errors import ConfigError

_log = logging.getLogger(__name__)


class HandedOut:
    """Weights and optimizer state in memory that were handed to a program, each as a storage of its own."""

    def __init__(self) -> None:
        self._storages: dict[str, tuple[torch.UntypedStorage, int]] = {}

    def tensor(self, key: str, view: Tensor, *, num_usual: int = 0) -> Tensor:
        """Return a tensor of the bytes of ``view``, in a storage that holds nothing else.

        Args:
            key: what it is called in messages; the same bytes are one storage.
            view: contiguous.
            num_usual: how many tensors of it there are with no program that holds one.
        """
        storage, _ = self._storages.get(key, (None, 0))
        if storage is not None and storage.data_ptr() == view.data_ptr():
            return torch.empty(0, dtype=view.dtype).set_(storage, 0, view.shape, view.stride())
        made = alone(view)
        self._storages[key] = made.untyped_storage(), num_usual
        return made

    def is_held(self) -> bool:
        """Whether a program holds any."""
        return any(num_holders(storage) > usual for storage, usual in self._storages.values())

    def part(self) -> None:
        """Give whoever holds some bytes apart from those at home, which are about to be given back.

        Raises:
            ConfigError: there is no room for them.
        """
        for key in self._storages:
            self.part_one(key)

    def part_one(self, key: str) -> bool:
        """Give whoever holds the bytes of ``key`` others, see `part`; returns whether anybody does."""
        storage, usual = self._storages[key]
        if num_holders(storage) <= usual:
            return False
        try:
            storage.share_memory_()  # all of a storage moves at once
        except RuntimeError as error:
            raise ConfigError(
                f"{key}: the program holds a tensor of it (parameter.data, state_dict()), and shared memory has no "
                f"room for it ({error}), while its home is given back or assigned: keep tensor.clone(), or let go"
            ) from error
        return True


class HandedGradient:
    """A gradient in memory that was handed to a program.

    Args:
        tensor: what is handed out.
        view: its bytes at home.
    """

    def __init__(self, tensor: Tensor, view: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._storage = tensor.untyped_storage()
        self._view = view

    def part(self, name: str, factor: Tensor | None) -> None:
        """Give whoever still holds it bytes apart from those at home.

        Args:
            name: of the parameter.
            factor: what the gradient is yet to be multiplied by.
        """
        held = self._tensor()
        if held is None and not num_holders(self._storage):
            return
        with torch.no_grad():
            if factor is not None:
                self._view.mul_(factor)
            if held is not None:
                held.data = held.clone()
        if num_holders(self._storage):  # views of it
            try:
                self._storage.share_memory_()
            except RuntimeError as error:
                _log.warning(
                    "a view of the gradient of %s, which was let go of, shows the next one, since shared memory has no "
                    "room for it (%s): keep parameter.grad.clone()",
                    name,
                    error,
                )


def alone(view: Tensor) -> Tensor:
    """Return the same bytes in a storage that holds nothing else, as whoever saves tensors expects of parameters."""
    if not view.numel():
        return torch.empty_like(view)
    return torch.from_numpy(view.reshape(-1).view(torch.uint8).numpy()).view(view.dtype).view(view.shape)
