"""What a notebook shows of samples, plans, batches and losses, and the page of a batch: figures counted by hand."""

import html as library
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.groups import answered
from support.html_page import Page
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.schema.spans import MODALITIES
from mmpack.view.batch import LOSS, tokens_of

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
PROMPTS, RESPONSES = 3, 4


def groups():
    """Prompts of 20, 29, 38 ids with a picture of 16, 24, 32 patches; responses of 30 to 120 ids."""
    ids = [([100 + g] * (20 + 9 * g), [7 + k] * (30 * (k + 1))) for g in range(3) for k in range(4)]
    names = [(f"{g}/{k}", f"g{g}", (1, 4, 4 + 2 * g)) for g in range(3) for k in range(4)]
    return [
        answered(name, group, *both, grid)
        for (name, group, grid), both in zip(names, ids, strict=True)
    ]


def texts(html):
    Page(html)  # refuses tags that are not closed
    return [library.unescape(t) for t in re.findall(r">([^<>]+)<", html)]


def row(html, name):
    """The cells beside a name, of the first table that has it."""
    cells = re.search(rf"<tr><td>{name}</td>((?:<td>[^<]*</td>)*)</tr>", html)[1]
    return re.findall(r"<td>([^<]*)</td>", cells)


def titles(html):
    return [library.unescape(t) for t in re.findall(r"<title>(.*?)</title>", html)]


def test_a_batch_says_what_is_repeated_and_what_sharing_saves():
    samples = groups()
    alone = sum(map(len, samples))
    first = [samples[RESPONSES * g] for g in range(PROMPTS)]
    prompts = [len(s) - s.num_loss_tokens for s in first]
    shared = alone - (RESPONSES - 1) * sum(prompts)
    patches = [s.num_patches for s in first]
    said = mp.view.html(mp.pack(samples, share_prefix=True))
    assert texts(said)
    assert row(said, "rows") == [f"{alone:,}", f"{shared:,}", f"{1 - shared / alone:.1%}"]
    assert row(said, "media") == [str(PROMPTS * RESPONSES), str(PROMPTS), "75.0%"]
    assert row(said, "patches") == [str(RESPONSES * sum(patches)), str(sum(patches)), "75.0%"]
    padded = len(samples) * max(map(len, samples))
    for batch, rows in ((mp.pack(samples), alone), (mp.pad(samples), padded)):
        said = batch._repr_html_()
        assert row(said, "rows") == [f"{alone:,}", f"{rows:,}", f"{1 - rows / alone:.1%}"]
        assert row(said, "patches")[:2] == [str(RESPONSES * sum(patches)), str(sum(patches))]


def test_the_forest_has_a_box_for_each_segment():
    batch = mp.pack(groups(), share_prefix=True)
    segments = [t for t in titles(mp.view.html(batch)) if t.startswith("segment ")]
    assert len(segments) == len(batch.segment_parent) == PROMPTS * (1 + RESPONSES)
    ends = [t.partition(", ends ")[2] for t in segments if ", ends " in t]
    assert sorted(ends) == sorted(batch.sample_ids)
    offsets = batch.segment_offsets.tolist()
    assert segments[0].startswith(f"segment 0: rows {offsets[0]} to {offsets[1]}")


def test_rows_in_the_loss_of_one_sample_and_context_of_another_show_as_loss():
    first = make_sample([("text", [1, 2, 3]), ("response", [4, 5, 6, 7])], "first")
    again = [("text", [1, 2, 3, 4, 5, 6, 7, 8]), ("response", [9])]
    second = make_sample(again, "second", first.group_id)
    for html in (
        mp.view.html(mp.pack([first, second], share_prefix=True)),
        mp.view.html([first, second]),
    ):
        forest = re.search(r'<svg[^>]*aria-label="\d segments.*?</svg>', html, re.DOTALL)[0]
        found = re.findall(r'class="([^"]*)"[^>]*x="([\d.]+)"[^>]* width="([\d.]+)"', forest)
        widths = {}
        for style, _, width in found:
            widths[style] = widths.get(style, 0) + float(width)
        answers = widths.get("mm-loss", 0) + widths.get("mm-of response", 0)
        assert answers == pytest.approx(1000 * 5 / 9, abs=3)
        assert widths["mm-read"] == pytest.approx(answers, abs=3)


@pytest.mark.parametrize("trace", ["gui/trace.jsonl", "causes/audio_hop/rollout.jsonl"])
def test_tokens_of_a_batch_are_what_the_samples_spans_say(trace):
    samples = list(mp.read_trace(FIXTURES / trace))
    samples = [s for s in samples if s.family == samples[0].family]
    wanted = []
    for sample in samples:
        kinds = np.zeros(len(sample), int)
        kinds[sample.loss_indices] = LOSS
        for span in sample.modality_spans:
            kinds[span.start : span.stop] = 1 + MODALITIES.index(span.modality)
        wanted += kinds.tolist()
    assert {*wanted} > {0, LOSS}
    for batch in (mp.pack(samples, share_prefix=True), mp.pack(samples), mp.pad(samples)):
        tokens = tokens_of(batch)
        assert tokens.kind.tolist() == wanted
        assert len(wanted) - tokens.before.sum() == len({*tokens.rows.tolist()})


def test_bars_count_every_sample_once():
    samples = groups()
    found = [
        re.match(r"(\d+) of ([\d,]+) to ([\d,]+)$", t)
        for t in titles(mp.pack(samples)._repr_html_())
    ]
    bars = [tuple(int(x.replace(",", "")) for x in m.groups()) for m in found if m]
    media = [s.media[0] for s in samples]
    patches = list({m.media_id: m.num_patches for m in media}.values())
    lengths = [len(s) for s in samples], [s.num_loss_tokens for s in samples]
    for values in (*lengths, [m.num_tokens for m in media], patches):
        count = min(16, max(values) - min(values) + 1)
        mine, bars = bars[:count], bars[count:]
        assert [sum(a <= v <= b for v in values) for _, a, b in mine] == [n for n, _, _ in mine]
        assert sum(n for n, _, _ in mine) == len(values)
    assert bars == []


def test_a_sample_shows_what_each_token_is():
    sample = full_sample("<b>")
    html = sample._repr_html_()
    said = texts(html)
    assert "sample <b>" in said and "<b>" not in html
    assert f"{len(sample):,}" in said and f"{sample.num_loss_tokens:,}" in said
    covered = [0] * len(sample)
    for title in titles(html):
        start, stop = map(int, re.search(r"tokens (\d+) to (\d+)$", title).groups())
        for t in range(start, stop):
            covered[t] += 1
        assert (", loss" in title) == (start in sample.loss_indices)
    assert covered == [1] * len(sample)
    assert "sample empty" in texts(make_sample([], sample_id="empty")._repr_html_())


def test_a_plan_and_a_loss_show_their_figures():
    plan = mp.plan(groups(), max_tokens=400, ranks=2, share_prefix=True)
    said = texts(plan._repr_html_())
    assert f"{plan.stats['fills']['max_tokens']:.1%}" in said and "rank 1" in said
    counts = torch.tensor([s.num_loss_tokens for s in groups()])
    lp, cu = torch.full((int(counts.sum()),), -1.0), torch.tensor([0, *counts.cumsum(0)]).int()
    out = mp.policy_loss(lp, torch.ones(len(counts)), cu, old_logprobs=lp)
    said = texts(out._repr_html_())
    assert f"PolicyLoss: {float(out.loss):.6g}" in said
    assert set(out.metrics) <= set(said)
