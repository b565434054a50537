import pytest
from torch import nn

import zoo
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, PLANE_ELEMENTS
from outsize.model.split import ALL_LISTS, Split, UnitChoice, split


class Tiny(nn.Module):
    """Blocks in a list, a norm after them, and the names that transformers gives to the ends."""

    def __init__(self, *, tied: bool = False, num_blocks: int = 3):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def table(parts: Split) -> list[tuple[str, str, list[str]]]:
    return [(unit.kind, unit.name, [t.name for t in unit.tensors]) for unit in parts.spec.units]


def test_units_are_embedding_blocks_head_and_the_rest():
    assert table(split(Tiny(num_blocks=2))) == [
        ("embedding", "embed", ["embed.weight"]),
        ("block", "blocks.0", ["blocks.0.weight", "blocks.0.bias"]),
        ("block", "blocks.1", ["blocks.1.weight", "blocks.1.bias"]),
        ("head", "head", ["head.weight"]),
        ("rest", "rest", ["norm.weight", "norm.bias"]),
    ]


def test_tied_weights_live_in_the_rest_and_their_units_are_empty():
    parts = split(Tiny(tied=True, num_blocks=1))
    assert table(parts) == [
        ("embedding", "embed", []),
        ("block", "blocks.0", ["blocks.0.weight", "blocks.0.bias"]),
        ("head", "head", []),
        ("rest", "rest", ["embed.weight", "norm.weight", "norm.bias"]),
    ]
    model = parts.model
    assert parts.owners["embed.weight"] == ((model.embed, "weight"), (model.head, "weight"))
    assert parts.spec.units[0].numel == parts.spec.units[0].weight_bytes("fp32") == 0


def test_a_model_without_loose_parameters_has_no_rest():
    model = Tiny()
    model.norm = nn.Identity()
    assert [unit.kind for unit in split(model).spec.units][-1] == "head"


def test_any_module_with_a_list_of_blocks_will_do():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.last = nn.Linear(2, 2)
    assert table(split(model)) == [
        ("block", "layers.0", ["layers.0.weight", "layers.0.bias"]),
        ("block", "layers.1", ["layers.1.weight", "layers.1.bias"]),
        ("rest", "rest", ["last.weight", "last.bias"]),
    ]


def test_a_parameter_that_two_blocks_share_belongs_to_the_rest():
    model = Tiny()
    model.blocks[2].bias = model.blocks[0].bias
    parts = split(model)
    assert parts.spec.units[-1].tensors[0].name == "blocks.0.bias"
    assert len(parts.owners["blocks.0.bias"]) == 2


def test_a_parameter_that_a_block_shares_with_loose_code_belongs_to_the_rest():
    model = Tiny()
    model.norm.bias = model.blocks[1].bias
    parts = split(model)
    assert "blocks.1.bias" in {tensor.name for tensor in parts.spec.units[-1].tensors}


def test_a_module_that_stands_twice_in_one_block_is_counted_once():
    model = Tiny()
    model.blocks[0].again = nn.Linear(4, 4)
    model.blocks[0].alias = model.blocks[0].again
    unit = split(model).spec.units[1]
    assert [tensor.name for tensor in unit.tensors] == [
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.0.again.weight",
        "blocks.0.again.bias",
    ]


def blocks_of(model: nn.Module, choice: UnitChoice = ALL_LISTS) -> list[str]:
    return [unit.name for unit in split(model, choice=choice).spec.units if unit.kind == "block"]


def test_the_blocks_are_of_all_lists_that_are_not_inside_another():
    model = Tiny(num_blocks=2)
    model.towers = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    for block in model.blocks:
        block.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    assert blocks_of(model) == ["blocks.0", "blocks.1", "towers.0", "towers.2"]


def test_lists_stay_outside_where_little_is_left_or_they_are_small():
    model = Tiny(num_blocks=100)
    model.second = nn.ModuleList([nn.Linear(2, 2)])
    assert len(blocks_of(model)) == 100
    said = split(model).said()
    assert said == "layers of blocks (100): 99% of the parameters are streamed"


class Stage(nn.Module):
    """Of a U-Net."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.attentions = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.resnets = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outward = nn.Linear(width, 1)


def test_the_layers_of_stages_are_those_of_their_lists():
    model = nn.Module()
    model.down = nn.ModuleList([Stage(8, 2), Stage(16, 1)])
    assert blocks_of(model) == [
        *("down.0.attentions.0", "down.0.attentions.1", "down.0.resnets.0", "down.0.resnets.1"),
        *("down.1.attentions.0", "down.1.resnets.0"),
    ]
    model.down[1] = Stage(8, 2)  # two of one form are layers
    assert blocks_of(model) == ["down.0", "down.1"]


def test_a_backbone_inside_a_sequential_is_taken_apart():
    backbone = nn.Module()
    backbone.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert blocks_of(nn.Sequential(backbone, nn.Linear(4, 1))) == ["0.layers.0", "0.layers.1"]


def test_a_model_without_lists_is_cut_into_its_own_modules():
    model = nn.Module()
    model.inner = nn.Bilinear(4, 4, 4)
    assert blocks_of(model) == ["inner"]
    model.inner.first, model.outward = nn.Linear(4, 4), nn.Linear(4, 4)
    assert blocks_of(model) == ["inner", "outward"]


def test_a_model_without_modules_is_refused():
    with pytest.raises(ModelError, match="Linear holds no module with parameters"):
        split(nn.Linear(2, 2))
    empty = nn.Module()
    empty.layers = nn.ModuleList()
    with pytest.raises(ModelError, match="no module with parameters"):
        split(empty)


def test_units_stand_in_the_order_in_which_forwards_call_them():
    model = Tiny(num_blocks=3)
    choice = ALL_LISTS.after(["blocks.1", "embed", "head"]).after(["blocks.2", "blocks.1"])
    names = [unit.name for unit in split(model, choice=choice).spec.units]
    assert names == ["blocks.0", "blocks.2", "blocks.1", "embed", "head", "rest"]


def test_what_forwards_call_again_or_by_turns_is_no_unit():
    model = Tiny(num_blocks=3)
    assert blocks_of(model, ALL_LISTS.after(["blocks.0", "blocks.1", "blocks.0"])) == ["blocks.1", "blocks.2"]
    by_turns = ALL_LISTS.after(["blocks.0", "blocks.1"]).after(["blocks.1", "blocks.0"])
    assert blocks_of(model, by_turns) == ["blocks.2"]
    every = ALL_LISTS.after([*(f"blocks.{at}" for at in range(3))] * 2)
    assert table(split(model, choice=every))[:-1] == [
        ("embedding", "embed", ["embed.weight"]),
        ("block", "norm", ["norm.weight", "norm.bias"]),
        ("head", "head", ["head.weight"]),
    ]
    with pytest.raises(ModelError, match="several times in a forward"):
        split(model, choice=every.after(["norm", "norm"]))


def test_freezing_and_decay_go_by_name():
    parts = split(Tiny(), decays=lambda name: name.endswith("weight"), freeze=("embed.*", "blocks.1.*"))
    trainable = {t.name: t.trainable for unit in parts.spec.units for t in unit.tensors}
    assert {name for name, trained in trainable.items() if not trained} == {
        "embed.weight",
        "blocks.1.weight",
        "blocks.1.bias",
    }
    assert [unit.trainable for unit in parts.spec.units] == [False, True, False, True, True, True]
    assert {t.name for unit in parts.spec.units for t in unit.tensors if not t.decay} == {
        "blocks.0.bias",
        "blocks.1.bias",
        "blocks.2.bias",
        "norm.bias",
    }


def test_parameters_that_need_no_gradient_are_not_trained():
    model = Tiny()
    model.blocks[0].weight.requires_grad_(False)
    (weight, bias) = split(model).spec.units[1].tensors
    assert (weight.trainable, bias.trainable) == (False, True)


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names():
    with pytest.raises(ModelError, match=r"'block\.\*' matches no parameter.*'embed\.weight'"):
        split(Tiny(), freeze=("block.*",))


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_parameter_of_every_architecture_lies_in_exactly_one_place(name: str):
    model = zoo.build(name)
    parts = split(model, "bf16")
    spec = parts.spec
    tensors = [tensor for unit in spec.units for tensor in unit.tensors]
    assert sorted(t.name for t in tensors) == sorted(n for n, _ in model.named_parameters())
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert all(tensor.shape == shapes[tensor.name] for tensor in tensors)
    assert [unit.index for unit in spec.units] == list(range(len(spec.units)))
    assert [unit.kind for unit in spec.units].count("rest") <= 1
    assert len(parts.modules) == spec.num_streamed
    for unit in spec.units:
        assert unit.numel % PLANE_ELEMENTS == 0
        end = 0
        for tensor in unit.tensors:
            assert tensor.offset >= end
            assert tensor.offset % ALIGN_ELEMENTS == 0
            end = tensor.offset + tensor.numel
        assert end <= unit.numel
    for parameter_name, places in parts.owners.items():
        assert places
        assert all(
            module._parameters[attribute] is dict(model.named_parameters())[parameter_name]
            for module, attribute in places
        )
