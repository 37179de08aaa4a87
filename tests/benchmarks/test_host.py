"""The host's speed beside peers, on an eighth of the work: floors that other work on the machine can't reach."""

from functools import partial

import pytest
from support.benchmarks import benchmark

host = partial(benchmark, "host")


@pytest.mark.verl
def test_balance_beside_verl_is_at_least_half_of_what_it_is_held_to():
    """The one part whose peer is in another environment."""
    module = host()
    cases = list(module.parts(1 / 8))
    assert {case.peer for case in cases} == {"verl"} and len(cases) == 2
    for case in cases:
        ours, theirs = module.in_turn(case.ours, case.theirs, 5)
        assert theirs / ours >= case.floor / 2, case.what


def test_a_row_below_its_floor_is_an_error(monkeypatch, capsys, tmp_path):
    module = host()
    rows = [
        {"what": "a", "peer": "b", "ms": 2.0, "peer_ms": 1.0, "x_faster": 0.5, "floor": 1},
        module.lacks("verl", "balance"),
    ]
    monkeypatch.setattr(module, "measured", lambda runs, share: iter(rows))
    monkeypatch.setattr("sys.argv", ["host.py", "--out", str(tmp_path / "host.json")])
    assert module.main() == 1
    assert "a: 0.5 x b, below 1" in capsys.readouterr().out
    rows[0]["x_faster"] = 1.5
    assert module.main() == 0
    assert (tmp_path / "host.json").exists()
