"""`probe.run` on sides of a few lines: what parts, what doesn't, and what it refuses."""

import numpy as np
import pytest
import torch
from support.probe_sides import layers, samples

import mmpack as mp
from mmpack.probe import Contract, Rows, Side
from mmpack.probe.places import places_of


def scaled(layer, factor=1.001):
    return lambda k, number, x: x * factor if k == layer else x


def test_equal_sides_are_alike():
    calls = []
    report = mp.probe.run(layers(calls=calls), layers(), samples())
    assert report.ok and report.first is None
    assert [m.module for m in report.modules] == ["embed", *(f"layers.{k}" for k in range(4))]
    assert all(m.all.max_error == 0 for m in report.modules)
    assert calls == [False, True]  # values, then rounding
    assert report.summary().startswith("ALIKE")


@pytest.mark.parametrize("layer", [0, 3])
def test_the_first_module_is_named(layer):
    report = mp.probe.run(layers(), layers(scaled(layer)), samples())
    first = report.first
    assert (first.module, first.sample, first.token) == (f"layers.{layer}", "a", 0)
    assert first.modality == "text before media"
    assert first.error == pytest.approx(1e-3, rel=0.6)  # as far as eight directions tell
    row = report.modules[first.index_of_module]
    assert row.module == first.module and row.all.worst >= first.error / first.bound > 1
    assert not any(m.parts for m in report.modules[: first.index_of_module])


@pytest.mark.parametrize("token", [0, 12, 20])
def test_the_first_token_is_named(token):
    def edit(k, number, x):
        if k == 1 and number == 0 and token < len(x):
            x = x.clone()
            x[token:, 3] += 0.01
        if k == 1 and number == 1 and token >= 20:
            x = x.clone()
            x[token - 18 :, 3] += 0.01
        return x

    first = mp.probe.run(layers(), layers(edit), samples()).first
    wanted = ("a", token) if token < len(samples()[0]) else ("b", token - 18)
    assert (first.module, first.sample, first.token) == ("layers.1", *wanted)


def test_modalities_are_told_apart():
    def edit(k, number, x):
        return x * 1.01 if k == 2 and number == 0 else x

    report = mp.probe.run(layers(), layers(edit), samples())
    row = report.modules[report.first.index_of_module]
    assert {n for n, k in row.kinds.items() if k.parted} == set(row.kinds)
    assert row.kinds["image"].rows == 6
    before = row.kinds["text before media"]
    assert before.parted == 6 and before.rows == 6 + len(
        samples()[1]
    )  # vision_start counts as text


def test_rounding_is_no_fault_and_what_exceeds_it_is():
    def rounded(bits):
        def edit(k, number, x):
            return x if bits is None else (x.double() * (1 + 2.0**-bits)).float()

        return edit

    assert mp.probe.run(layers(), layers(rounded(24)), samples()).ok
    assert not mp.probe.run(layers(), layers(rounded(17)), samples()).ok


def test_all_rows_a_little_longer_are_found_below_the_noise_of_one():
    # float32 twice, as of two kernels, and one of them a little too long at layer 2
    def edit(k, number, x):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(k)) * 1e-7
        return x * (1 + noise) * (1 + 8e-7 * (k == 2))

    report = mp.probe.run(layers(), layers(edit), samples())
    assert report.first is not None and report.first.module == "layers.2" and report.first.pooled
    assert "mean growth" in str(report.first)
    alone = Contract(pooled=False)
    assert mp.probe.run(layers(), layers(edit), samples(), contract=alone).ok


def test_tokens_are_chosen():
    whole = places_of(samples())
    assert len(whole.tokens) == sum(map(len, samples()))
    loss = places_of(samples(), "loss")
    assert [(s, t + 1) for s, t in loss.tokens.tolist()] == [
        (i, t)
        for i, s in enumerate(samples())
        for span in s.loss_spans
        for t in range(span.start, span.stop)
    ]
    assert places_of(samples(), [0, -1]).tokens.tolist() == [
        [0, 0],
        [0, len(samples()[0]) - 1],
        [1, 0],
        [1, len(samples()[1]) - 1],
    ]
    assert places_of(samples(), {"b": [2]}).tokens.tolist() == [[1, 2]]
    report = mp.probe.run(layers(), layers(scaled(1)), samples(), tokens=[-1])
    assert (report.first.token, report.modules[0].all.rows) == (len(samples()[0]) - 1, 2)


@pytest.mark.parametrize("tokens", ["every", 3, [1.5], [99], {"b": [99]}, [None], []])
def test_wrong_tokens_are_refused(tokens):
    with pytest.raises(mp.ArgumentError, match="Fix: "):
        mp.probe.run(layers(), layers(), samples(), tokens=tokens)


def test_wrong_arguments_are_refused():
    one = samples()
    for wrong in (
        lambda: mp.probe.run(layers(), None, one),
        lambda: mp.probe.run(layers(), layers(), []),
        lambda: mp.probe.run(layers(), layers(), [1]),
        lambda: mp.probe.run(layers(), layers(), [one[0], one[0]]),
        lambda: mp.probe.run(layers(), layers(), one, contract=3),
        lambda: mp.probe.run(layers(), layers(), one, memory=-1),
        lambda: mp.probe.run(layers(), layers(), one, seed="a"),
        lambda: mp.probe.run(layers(), layers(), one, seed=1.5),
        lambda: Contract(factor=float("nan")),
        lambda: Contract(passes=1.5),
        lambda: Side("x", None),
    ):
        with pytest.raises(mp.ArgumentError, match="Fix: "):
            wrong()
    a = mp.probe.record(layers(), one)
    with pytest.raises(mp.ArgumentError, match=r"records, which don't run samples\. Fix: "):
        mp.probe.run(a, a, one)
    with pytest.raises(mp.ArgumentError, match="different samples"):
        mp.probe.run(a, mp.probe.record(layers(), one[:1]))
    with pytest.raises(mp.ArgumentError, match="different directions"):
        mp.probe.run(a, mp.probe.record(layers(), one, seed=1))


def test_entries_stand_in_the_order_of_execution():
    def run(given, recorder):
        for number, _ in enumerate(given):
            recorder.begin()
            into, tokens = recorder.places.chosen(number)
            rows = Rows("text", torch.from_numpy(tokens), into)
            x = torch.ones(len(given[number]), 4)
            if number == 1:  # only this one has a tower, which runs first
                recorder.put("tower", "out", x, rows)
            recorder.put("text", "out", x, rows)
            if number == 1:
                recorder.put("tower", "out", x, rows)  # again
                recorder.put("extra", "out", x, rows)
            recorder.put("head", "out", x, rows)

    names = [*mp.probe.record(Side("x", run), samples()).entries]
    assert names == ["tower<out", "text<out", "extra<out", "head<out"]


def test_reports_as_values():
    one = samples()[0]  # a list of one
    assert mp.probe.run(layers(), layers(), one).places.sample_ids == [one.sample_id]
    report = mp.probe.run(layers(), layers(scaled(2)), samples())
    document = report.to_dict()
    assert document["ok"] is False and document["first"]["module"] == "layers.2"
    assert [m["index"] for m in document["modules"]] == list(range(5))
    assert "layers.2" in report.text() and "look at" in report.text()
    assert "PARTED" in repr(report)


def test_what_could_not_be_compared_is_said():
    """NaN on both sides, rows of one side only, rows of unlike spaces: no silence, and no ALIKE of nothing."""
    nan = layers(lambda k, n, x: x * float("nan") if k == 2 else x)
    report = mp.probe.run(nan, nan, samples())
    assert report.first is None and not report.ok
    assert "NOT COMPARED" in report.text() and "no row of layers.2<out" in report.text()
    [note] = report.to_dict()["notes"]
    rows = sum(map(len, samples()))
    assert note.startswith(
        f"{2 * rows} rows of 2 modules are not finite on both sides, first layers.2<out"
    )
    assert report.modules[3].to_dict()["broken"] == rows

    def some(k, n, x):
        return torch.where(torch.arange(len(x))[:, None] == 3, float("nan"), x) if n == 1 else x

    report = mp.probe.run(layers(some), layers(some), samples())
    assert report.ok and "sample 'b', token 3" in report.text()

    half, whole = mp.probe.record(layers(), samples()), mp.probe.record(layers(), samples())
    half.entries["layers.1<out"].values[5:] = np.nan
    report = mp.probe.run(half, whole)
    assert report.ok and "recorded on one side only, first layers.1<out" in report.text()
    for entry in half.entries.values():
        entry.values[:] = np.nan
    report = mp.probe.run(half, whole)
    assert not report.ok and "NOT COMPARED" in report.summary()
    whole.entries["layers.1<out"].space = "1/4"
    assert (
        "layers.1<out has rows of text × 32 in plain and of 1/4 × 32 in plain"
        in mp.probe.run(half, whole).text()
    )


def test_rows_of_other_widths_are_not_compared():
    """As a rotary embedding's, which is of three rows in one version of transformers and of one in another."""
    a, b = (mp.probe.record(layers(), samples()) for _ in range(2))
    b.entries["layers.1<out"].width = 96
    b.entries["layers.1<out"].values[:] *= 3
    report = mp.probe.run(a, b)
    assert report.ok and "layers.1<out" not in {m.name for m in report.modules}
    assert report.notes == [
        "layers.1<out has rows of text × 32 in plain and of text × 96 in plain: not compared"
    ]
