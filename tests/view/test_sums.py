"""The figures of a trace's page: lengths, what samples repeat, what sharing saves; beside what `mp.pack` counts."""

import re

import pytest
from support.browser import BROWSER, MISSING, measured
from support.groups import answered
from support.samples import full_sample

import mmpack as mp
from mmpack.view.trace.sums import repeated

OPENED = """
all("details").forEach(e => e.open = true);
return { overflow: root.scrollWidth - root.clientWidth, figures: all(".sums b").map(e => e.textContent),
  high: all(".sums svg").map(e => e.getBoundingClientRect().height), table: all(".sums td").map(e => e.textContent) };
"""


def answers():
    return [
        answered(f"{g}/{k}", f"g{g}", [100 + g] * 20, [7 + k] * (30 * (k + 1)), (1, 4, 4))
        for g in range(2)
        for k in range(3)
    ]


def test_counts_are_those_of_a_pack():
    samples = answers()
    batch = mp.pack(samples, share_prefix=True)
    found = {name: (alone, shared) for name, alone, shared in repeated(samples)}
    assert found["rows"] == (batch.stats["tokens_unshared"], batch.stats["tokens"])
    assert found["media"] == (len(samples), len(batch.media))
    assert found["patches"] == (sum(s.num_patches for s in samples), batch.stats["patches"])


def test_the_page_leaves_broken_samples_out():
    samples = answers()
    samples[0].loss_spans[0].start = 0
    html = mp.view.html(samples)
    assert "1 that break rules are left out." in html
    (rows,) = re.findall(r"<td>rows</td><td>([\d,]+)</td>", html)
    assert int(rows.replace(",", "")) == sum(len(s) for s in samples[1:])
    assert "no tokens of a sample" in mp.view.html([])


@pytest.mark.skipif(BROWSER is None, reason=MISSING)
@pytest.mark.parametrize(("width", "dark"), [(1100, True), (360, False)])
def test_it_opens_and_fits(tmp_path, width, dark):
    samples = [*answers(), full_sample("other")]
    seen = measured(tmp_path, mp.view.html(samples), OPENED, width, dark)
    assert seen["overflow"] <= 0 and min(seen["high"]) > 10
    assert {"tokens of a sample", "loss tokens of a sample", "media of a sample"} <= {
        *seen["figures"]
    }
    assert seen["table"][0::4] == ["rows", "media", "patches"]
