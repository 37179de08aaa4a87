"""A run with faults, drawn by a seed: it goes on, what can't be used is named, the rest is lost nowhere."""

import json
import random
from collections import Counter

import pytest
from support.batch_tensors import assert_same
from support.models import with_pixels
from support.process import call_mmpack
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.blobs import BlobFolder, take

CODES = {
    "raises": "MM505",
    "rule": "MM202",
    "too long": "MM405",
    "gone": "MM404",
    "damaged": "MM502",
    "letter": "MM504",
}


def one(g: int, k: int, length: int = 3) -> mp.Sample:
    answer = list(range(10 + k, 10 + k + length))
    parts = [("text", [1, 2 + g]), ("image", (1, 4, 4), f"{g}/{k}"), ("response", answer)]
    return with_pixels([make_sample(parts, f"s{g}/{k}", f"g{g}")])[0]


class Items(list):
    """A data set of which some items raise."""

    def __getitem__(self, i):
        item = super().__getitem__(i)
        if isinstance(item, Exception):
            raise item
        return item


def faulty(draw, store, groups=12, each=3):
    """Items with faults, sample ids in order, and the fault of some: number -> kind."""
    names = [f"s{g}/{k}" for g in range(groups) for k in range(each)]
    faults = {i: draw.choice(list(CODES)) for i in draw.sample(range(len(names)), 14)}
    items = []
    for i in range(len(names)):
        g, k = divmod(i, each)
        kind = faults.get(i)
        sample = one(g, k, 60 if kind == "too long" else 3)
        [sample] = take([sample], store)
        path = store.folder / (key := sample.media[0].cache_key)[:2] / key
        if kind == "rule":
            sample.loss_spans = [mp.LossSpan(0, 2)]
        elif kind == "gone":
            path.unlink()
        elif kind == "damaged":
            path.write_bytes((data := path.read_bytes())[:-1] + bytes([data[-1] ^ 1]))
        if kind == "raises":
            items.append(ValueError("no such record"))
        elif kind == "letter":
            items.append(mp.schema.DeadLetter("MM504", "its worker ended", f"samples[{i}]"))
        else:
            items.append(sample)
    return items, names, faults


@pytest.mark.parametrize(("seed", "source"), [(0, "samples"), (1, "samples"), (2, "steps")])
def test_counts_add_up(tmp_path, seed, source):
    draw = random.Random(seed)
    with BlobFolder(tmp_path / "blobs") as store:
        items, names, faults = faulty(draw, store)
        book = mp.schema.DeadLetters(tmp_path / "dead.jsonl")
        options = {"max_tokens": 40, "media": store, "dead_letters": book, "share_prefix": True}
        if source == "samples":
            loader = PackLoader(Items(items), groups_per_step=4, shuffle=True, seed=seed, **options)
        else:
            letters = [
                mp.schema.DeadLetter("MM505", "x", f"samples[{i}]")
                if isinstance(x, Exception)
                else x
                for i, x in enumerate(items)
            ]
            loader = PackLoader(steps=[letters[i : i + 12] for i in range(0, 36, 12)], **options)
        seen: list[str] = []
        for step in loader:
            tokens = 0
            for batch, members in zip(step, step.bins, strict=True):
                alive = [step.samples[i] for i in members]
                whole = [one(*map(int, s.sample_id[1:].split("/"))) for s in alive]
                assert_same(batch, mp.pack(whole, share_prefix=step.share[0]))
                seen += batch.sample_ids
                tokens += batch.num_loss_tokens
            assert tokens == step.total_tokens
            assert step.total_samples == sum(map(len, step.bins))
    assert sorted(seen) == sorted(n for i, n in enumerate(names) if i not in faults)
    assert len(seen) + len(book) == len(names)
    assert book.counts == Counter(CODES[kind] for kind in faults.values())
    named = {x.name: x.code for x in book.read()}
    for i, kind in faults.items():
        known = kind in ("raises", "letter")
        assert named.pop(f"samples[{i}]" if known else names[i]) == CODES[kind]
    assert not named


def test_dead_samples_are_a_trace(tmp_path):
    """And a step of nothing else is left out."""
    sample = one(0, 0)
    sample.loss_spans = [mp.LossSpan(0, 2)]
    [lean] = take([one(0, 1)], store := BlobFolder(tmp_path / "blobs"))
    store.release()
    store.remove(list(store))
    book = mp.schema.DeadLetters(tmp_path / "dead.jsonl")
    [step] = PackLoader([sample, lean, one(0, 2)], max_tokens=40, media=store, dead_letters=book)
    assert [x.name for x in step.dead] == ["s0/1", "s0/0"] and step.total_samples == 1
    done = call_mmpack("validate", str(book.path), "--json")
    assert done.returncode == 1
    assert (json.loads(done.stdout)["samples"], len(book)) == (2, 2)
    store.close()
    dead = mp.schema.DeadLetter("MM504", "its worker ended", "samples[0]")
    loader = PackLoader(steps=[[dead], [one(0, 0)]], max_tokens=40, dead_letters=book)
    assert [step.number for step in loader] == [1] and len(book) == 3


def test_what_is_read_now_is_there_when_it_is_packed(tmp_path):
    """Of one rank: whoever removes files in the middle of a step."""
    with BlobFolder(tmp_path / "blobs") as store:
        lean = take([one(g, 0) for g in range(8)], store)
        store.release()
        book = mp.schema.DeadLetters(tmp_path / "dead.jsonl")
        loader = PackLoader(lean, max_tokens=20, media=store, dead_letters=book, prefetch=0)
        for step in loader:
            assert len(step) > 2
            for k, batch in enumerate(step):
                if not k:
                    assert store.remove(list(store)) == 8
                assert batch.pixel_values is not None
    assert len(book) == 0
