"""Which of a layer's holders speaks for it."""

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.model.place import Place
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.placing.redundancy import with_keepers

LAYOUT = megatron_layout(num_layers=6, pipeline_size=2, num_workers=6, num_microbatches=6)


def speakers(layout, layer, turn):
    cell = Cell.of(0, tensor=1)
    return [
        worker
        for worker in layout.holders[layer]
        if Place(layout=layout, worker=worker, cell=cell).among(layer, turn=turn) == 0
    ]


@pytest.mark.parametrize("layer", range(6))
def test_holders_take_turns(layer):
    found = [speakers(LAYOUT, layer, turn) for turn in range(3)]
    assert sorted(found) == [[worker] for worker in LAYOUT.holders[layer]]
    assert found[0] == [LAYOUT.speaker(layer)] == speakers(LAYOUT, layer, 3)


def test_where_state_is_cut_its_speaker_has_all_turns():
    nodes = dict.fromkeys(range(6), 0)
    cut = with_keepers(LAYOUT, None, nodes, 2)
    assert cut.keepers
    for layer in range(6):
        assert {tuple(speakers(cut, layer, turn)) for turn in range(3)} == {(cut.speaker(layer),)}
