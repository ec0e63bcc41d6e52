"""force_cleanup() says what each of the three released, with and without the library."""

import gc

import strandline
from strandline import _force, _library


class Cycle:
    def __init__(self):
        self.me = self


class Host:
    """A library in host mode, whose numbers fall as the test says."""

    def __init__(self, levels):
        self.levels, self.trimmed = levels, 0

    def mode(self):
        return _library.MODES["host"]

    def trim(self):
        self.trimmed += 1

    def stats(self, device):
        allocated, reserved = self.levels.pop(0)
        return {"allocated_bytes.all.current": allocated, "reserved_bytes.all.current": reserved}


def test_it_says_what_each_released(monkeypatch, capsys):
    host = Host([(900, 4096), (400, 4096), (400, 1024), (300, 512)])
    monkeypatch.setattr(_library, "find", lambda: host)
    gc.collect()
    Cycle()
    done = strandline.force_cleanup()
    assert [(each.allocated, each.reserved) for each in done] == [(500, 0), (0, 3072), (100, 512)]
    assert done[0].objects >= 1 and done[1].objects is None
    err = capsys.readouterr().err
    assert "gc.collect()" in err and "500 B" in err and "3.0 KiB" in err and "left" in err


def test_without_the_library_it_still_collects(monkeypatch, capsys):
    monkeypatch.setattr(_library, "find", lambda: None)
    Cycle()
    done = _force.force_cleanup(quiet=True)
    assert [each.action for each in done] == ["gc.collect()", "empty the cache", "synchronize"]
    assert done[0].objects >= 1 and capsys.readouterr().err == ""
