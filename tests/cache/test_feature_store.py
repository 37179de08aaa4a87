"""FeatureStore: what it holds, when it encodes, and what it refuses; on a tower of plain torch."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import mmpack as mp
from mmpack.cache import FeatureStore
from mmpack.cache.tower import Tower
from mmpack.invariant import batch_invariant


class Block(nn.Module):
    """A Linear with an adapter, as PEFT's: a scale, and a switch that is no weight."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.register_buffer("table", torch.randn(6), persistent=False)
        self.scaling, self.disable_adapters = {"default": 0.5}, False
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        y = self.base(x) + self.table
        if not self.disable_adapters:
            y = y + self.scaling["default"] * self.adapter(self.dropout(x))
        return y


def made(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).requires_grad_(False)


class Media:
    """Pixels by key, and how often each was encoded."""

    def __init__(self, module, sizes):
        self.tower = Tower((module,))
        self.pixels = {k: torch.randn(n, 6) for k, n in sizes.items()}
        self.calls = []

    def fetch(self, store, keys, tower=None):
        keys, tower = list(keys), tower or self.tower

        def encode(indices):
            self.calls.append([keys[i] for i in indices])
            made = [tower.modules[0](self.pixels[keys[i]]) for i in indices]
            return [(y, 2 * y) for y in made]

        return store.fetch(tower, keys, [len(self.pixels[k]) for k in keys], encode)


@pytest.fixture
def media():
    return Media(made(), {"a": 2, "b": 3, "c": 4})


def assert_are(found, media, keys, tower=None):
    tower = tower or media.tower
    for levels, key in zip(found, keys, strict=True):
        own = tower.modules[0](media.pixels[key])
        assert len(levels) == 2 and torch.equal(levels[0], own) and torch.equal(levels[1], 2 * own)
        assert not any(level.requires_grad or level.is_inference() for level in levels)


ROW = 2 * 6 * 4  # bytes of a token: two levels of six floats


def test_each_medium_is_encoded_once(media):
    store = FeatureStore(10**6)
    for keys in ("aba", "bca", "c"):
        assert_are(media.fetch(store, keys), media, keys)
    assert media.calls == [["a", "b"], ["c"]]
    stats = store.stats
    assert (stats.hits, stats.misses) == (4, 3)
    assert (stats.patches_encoded, stats.patches_saved) == (9, 2 + 3 + 2 + 4)
    assert (stats.device_bytes, stats.host_bytes) == (9 * ROW, 0)


def test_what_was_used_least_recently_leaves_first(media):
    store = FeatureStore(6 * ROW)
    for keys, calls in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4), ("c", 5)):
        assert_are(media.fetch(store, keys), media, keys)
        assert len(media.calls) == calls, keys
        assert store.stats.device_bytes <= 6 * ROW
    assert store.stats.spilled == 0 and store.stats.dropped == 4


def test_what_leaves_the_device_waits_on_the_host(media):
    store = FeatureStore(4 * ROW, host_bytes=7 * ROW)
    for keys in ("a", "b", "c", "a", "b"):  # two of them fit the host at any time
        assert_are(media.fetch(store, keys), media, keys)
    assert len(media.calls) == 3
    assert (store.stats.spilled, store.stats.restored, store.stats.dropped) == (4, 2, 0)
    assert store.stats.hits == 2 and store.stats.device_bytes + store.stats.host_bytes == 9 * ROW


def by_optimizer(module):
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(module.parameters(), lr=1e-4).step()


def by_data(module):
    next(module.parameters()).data.add_(1e-5)


def by_new_data(module):
    module[1].base.weight.data = module[1].base.weight.data.clone().neg_()


def by_swapping(module):
    weight = module[0].base.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def by_a_buffer(module):
    module[1].table.data[3] += 1e-6


def in_inference_mode(module):
    with torch.inference_mode():
        module[0].base.bias.mul_(1.001)


@pytest.mark.parametrize(
    "change", [by_optimizer, by_data, by_new_data, by_swapping, by_a_buffer, in_inference_mode]
)
def test_changed_weights_are_refused_however_they_changed(media, change):
    store, module = FeatureStore(10**6), media.tower.modules[0]
    media.fetch(store, "ab")
    change(module)
    with pytest.raises(
        mp.ModelError, match=r"weights changed since.*Fix: call store.clear"
    ) as caught:
        media.fetch(store, "a")
    assert "\n" not in str(caught.value)
    assert not store.fits(media.tower)
    store.clear()
    assert store.stats.device_bytes == 0
    assert_are(media.fetch(store, "a"), media, "a")


def test_adapters_that_are_switched_or_scaled_have_features_of_their_own(media):
    store, module = FeatureStore(10**6), media.tower.modules[0]
    settings = [(False, 0.5), (True, 0.5), (False, 0.25)]
    for _ in range(2):
        for off, scale in settings:
            module[1].disable_adapters, module[1].scaling["default"] = off, scale
            assert_are(media.fetch(store, "a"), media, "a")
    assert len(media.calls) == 3


def test_autocast_and_the_invariant_mode_have_features_of_their_own(media):
    store = FeatureStore(10**6)
    full = media.fetch(store, "a")[0][0]
    with torch.autocast("cpu", torch.bfloat16):
        half = media.fetch(store, "a")[0][0]
    assert full.dtype != half.dtype or not torch.equal(full, half)
    assert torch.equal(media.fetch(store, "a")[0][0], full)
    with batch_invariant():
        media.fetch(store, "a")
    media.fetch(store, "a")
    assert len(media.calls) == 3


def test_a_trained_tower_is_refused(media):
    store = FeatureStore(10**6)
    media.tower.modules[0][1].adapter.weight.requires_grad_(True)
    with pytest.raises(mp.ModelError, match=r"the tower is being trained.*Fix: .*encode_once"):
        media.fetch(store, "a")
    with torch.no_grad():
        media.fetch(store, "a")
    assert media.calls == [["a"]]


def test_dropout_is_refused_where_it_drops(media):
    store, module = FeatureStore(10**6), media.tower.modules[0]
    module[1].dropout.p = 0.1
    with pytest.raises(mp.ModelError, match=r"1\.dropout of the tower.*Fix: set dropout to 0"):
        media.fetch(store, "a")
    module.eval()
    media.fetch(store, "a")
    module.train()
    module[1].dropout.p, module[0].attention_dropout = 0.0, 0.2
    with pytest.raises(mp.ModelError, match=r"0 of the tower.*dropout"):
        media.fetch(store, "a")


def test_features_made_in_inference_mode_may_be_trained_on(media):
    store = FeatureStore(10**6)
    with torch.inference_mode():
        media.fetch(store, "a")
    x = media.fetch(store, "a")[0][0]
    weight = torch.ones(6, requires_grad=True)
    (x * weight).sum().backward()
    assert torch.equal(weight.grad, x.sum(0)) and len(media.calls) == 1


def test_an_equal_tower_of_another_model_shares(media):
    store = FeatureStore(10**6)
    media.fetch(store, "ab")
    twin = Tower((copy.deepcopy(media.tower.modules[0]),))
    assert store.fits(twin)
    assert_are(media.fetch(store, "ab", twin), media, "ab")
    assert len(media.calls) == 1
    by_data(twin.modules[0])
    with pytest.raises(mp.ModelError, match="weights changed"):
        media.fetch(store, "a", twin)
    assert_are(media.fetch(store, "a"), media, "a")


def test_equality_is_proved_by_all_values_and_once(media, monkeypatch):
    store = FeatureStore(10**6)
    media.fetch(store, "a")
    twin = Tower((copy.deepcopy(media.tower.modules[0]),))
    compared = []
    equals = Tower.equals
    monkeypatch.setattr(Tower, "equals", lambda a, b: compared.append(1) or equals(a, b))
    for _ in range(3):
        media.fetch(store, "a", twin)
    assert compared == [1]
    # towers that differ, and whose digests are made equal
    monkeypatch.setattr(Tower, "digest", lambda tower: store._digest)
    with pytest.raises(mp.ModelError, match="can't be compared"):
        media.fetch(store, "a", Tower((made(seed=1),)))
    media.tower = Tower((twin.modules[0],))
    del store._first[:]
    with pytest.raises(mp.ModelError, match="can't be compared"):
        media.fetch(store, "a", Tower((made(seed=0),)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_digest_sees_order_and_signs_in_large_weights(dim, dtype):
    weight = torch.randn(192, 256).to(dtype)
    tower = Tower((nn.ParameterList([weight]),))
    before = tower.digest()
    for changed in (
        weight.flip(dim),
        weight.roll(1, dim),
        -weight,
        weight.index_fill(dim, torch.tensor([7]), 0),
    ):
        tower.modules[0][0].data = changed
        assert tower.digest() != before
    odd = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(
        weight
    )  # no word begins here
    for same in (weight.clone(), odd, weight.t().contiguous().t()):
        tower.modules[0][0].data = same
        assert tower.digest() == before


def halved(module, args, output):
    return output / 2


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.register_forward_hook(halved),
        lambda block: block.register_forward_pre_hook(lambda module, args: (args[0] / 2,)),
        lambda block: setattr(block, "forward", lambda x: x / 2),
        lambda block: block.scaling.update(default=-2.0),  # hash(-1.0) is -2, as that of -2.0
    ],
    ids=["hook", "pre-hook", "forward", "scale"],
)
def test_what_changes_features_and_is_no_weight_gives_others(media, change):
    store, block = FeatureStore(10**6), media.tower.modules[0][0]
    block.scaling["default"] = -1.0
    assert_are(media.fetch(store, "a"), media, "a")
    change(block)
    assert_are(media.fetch(store, "a"), media, "a")
    assert len(media.calls) == 2


def test_a_tensor_that_is_no_buffer(media):
    block = media.tower.modules[0][0]
    block.loose = torch.ones(3)
    store = FeatureStore(10**6)
    media.fetch(store, "a")
    block.loose += 1
    with pytest.raises(mp.ModelError, match="weights changed"):
        media.fetch(store, "a")


def test_threads_take_turns(media):
    store = FeatureStore(5 * ROW, 4 * ROW)

    def pass_over(k):
        keys = ("ab", "bc", "ca")[k % 3]
        return keys, media.fetch(store, keys)

    with ThreadPoolExecutor(4) as pool:
        for keys, found in pool.map(pass_over, range(60)):
            assert_are(found, media, keys)
    assert store.stats.device_bytes == sum(x.nbytes for x in store._device.values())
    assert store.stats.host_bytes == sum(x.nbytes for x in store._host.values())
