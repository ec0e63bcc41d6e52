"""The heap's own counters in torch's statistics."""

import json

from strandline import _torch_cuda


class Library:
    def __init__(self, stats):
        self.text = json.dumps(stats).encode()

    def strandline_stats(self, device, room, size):
        room.value = self.text[: size - 1]
        return len(self.text)


def stats_of(library):
    return _torch_cuda._with_work(lambda device: {"num_ooms": device}, library)(5)


def test_the_counters_stand_beside_torchs():
    found = stats_of(Library({"num_ooms": 7, "strandline.maps": 3, "strandline.host_waits": 1}))
    assert found == {"num_ooms": 5, "strandline": {"maps": 3, "host_waits": 1}}
    from torch.cuda import memory

    flat = []
    memory_stats, memory.memory_stats_as_nested_dict = (
        memory.memory_stats_as_nested_dict,
        lambda device: found,
    )
    try:
        flat = memory.memory_stats()
    finally:
        memory.memory_stats_as_nested_dict = memory_stats
    assert flat == {"num_ooms": 5, "strandline.host_waits": 1, "strandline.maps": 3}


def test_without_a_heap_torchs_are_alone():
    assert stats_of(Library({})) == {"num_ooms": 5}
    assert stats_of(Library({"strandline.maps": "x" * (1 << 15)})) == {"num_ooms": 5}
