"""Separate fp32 parameters under an optimizer of torch's, and a unit whose planes lie as at home."""

import torch
from torch import Tensor

from optim.test_step import Resident
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import GRADIENT, StateLayout
from outsize.optim.planes import WholeRule
from outsize.optim.split_masters import join_master, split_master, ties_bytes
from outsize.optim.step import step_whole
from outsize.storage.home_layout import ITEM_DTYPE

# What torch.optim.Adafactor keeps, see test_torch_class.
ADAFACTOR = (
    ("state.row_var", "rows/none"),
    ("state.col_var", "columns/none"),
    ("state.variance", "none/full"),
)


class Reference(Resident):
    """Separate fp32 parameters under another optimizer of torch's, or of the test's."""

    def __init__(self, unit, master, make):
        self.tensors = [t for t in unit.tensors if t.trainable]
        self.parameters = [
            torch.nn.Parameter(master[t.offset : t.offset + t.numel].clone().view(t.shape))
            for t in self.tensors
        ]
        self.optimizer = make(self.tensors, self.parameters)

    def step(self, gradient, lr):
        for t, parameter in zip(self.tensors, self.parameters, strict=True):
            parameter.grad = gradient[t.offset : t.offset + t.numel].clone().view(t.shape)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def flat(self, key, like):
        plane = like.clone()
        for t, parameter in zip(self.tensors, self.parameters, strict=True):
            value = parameter.detach() if key is None else self.optimizer.state[parameter][key]
            plane[t.offset : t.offset + t.numel] = value.flatten()
        return plane


def groups(tensors, parameters, weight_decay):
    pairs = list(zip(tensors, parameters, strict=True))
    return [
        {"params": [p for t, p in pairs if t.decay], "weight_decay": weight_decay},
        {"params": [p for t, p in pairs if not t.decay], "weight_decay": 0.0},
    ]


class Unit:
    """A unit as it lies at home, its planes whole."""

    def __init__(
        self, unit: UnitSpec, master: Tensor, masters: str, gradients: str = "fp32", **state: object
    ) -> None:
        self.unit = unit
        self.layout = StateLayout(
            dtype="fp32" if masters == "own" else "bf16",
            masters="split" if masters == "split" else "separate",
            gradients=gradients,  # type: ignore[arg-type]
            **state,  # type: ignore[arg-type]
        )
        self.planes = {
            name: torch.zeros(plane.items_of(unit), dtype=ITEM_DTYPE[plane.item])
            for name, plane in self.layout.planes.items()
        }
        if masters == "split":
            split_master(master, *self._halves())
        else:
            self.planes["master" if masters == "separate" else "weights"].copy_(master)
            self.planes["weights"].copy_(master)
        model = ModelSpec(units=(unit,), dtype=self.layout.dtype)
        elements, count = self.layout.scratch_elements(model), self.layout.num_scratches
        self.scratches = [torch.full((elements,), float("nan")) for _ in range(count)]

    def _halves(self) -> tuple[Tensor, Tensor, Tensor | None]:
        ties = self.planes.get("master_ties")
        ties = None if ties is None else ties[: ties_bytes(self.unit.numel)]
        return self.planes["weights"], self.planes["master_low"], ties

    def step(self, rule: WholeRule, gradient: Tensor, number: int, lr: float, **options: object) -> None:
        self.planes[GRADIENT].copy_(gradient)
        counts = {tensor.name: number for tensor in self.unit.tensors}
        step_whole(rule, self.unit, self.planes, self.scratches, step=counts, lr=lr, **options)  # type: ignore[arg-type]

    @property
    def master(self) -> Tensor:
        if "master_low" not in self.planes:
            return self.planes.get("master", self.planes["weights"])
        joined = torch.empty(self.unit.numel)
        join_master(*self._halves(), joined)
        return joined
