"""The figures of a trace's page: lengths, what samples repeat, what sharing saves; beside what `mp.pack` counts."""

import re

from support import drawn

import mmpack as mp
from mmpack.view.trace.page import repeated


def test_counts_are_those_of_a_pack():
    samples = drawn.answers(2, 3)
    batch = mp.pack(samples, share_prefix=True)
    found = {name: (alone, shared) for name, alone, shared in repeated(samples)}
    assert found["rows"] == (batch.stats["tokens_unshared"], batch.stats["tokens"])
    assert found["media"] == (len(samples), len(batch.media))
    assert found["patches"] == (sum(s.num_patches for s in samples), batch.stats["patches"])


def test_the_page_leaves_broken_samples_out():
    samples = drawn.answers(2, 3)
    samples[0].loss_spans[0].start = 0
    html = mp.view.html(samples)
    assert "1 that break rules are left out." in html
    (rows,) = re.findall(r"<td>rows</td><td>([\d,]+)</td>", html)
    assert int(rows.replace(",", "")) == sum(len(s) for s in samples[1:])
    assert "no tokens of a sample" in mp.view.html([])
