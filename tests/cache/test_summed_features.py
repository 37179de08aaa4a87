"""SummedFeatures: gradients of micro-batches are added in float32 and go through the tower once; on plain torch."""

import pytest
import torch
from torch import nn

import mmpack as mp
from mmpack.cache import SummedFeatures
from mmpack.cache.tower import Tower


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(6, 5).to(dtype)


def summed(module, pixels, packs):
    features = [(module(x), module(x).square()) for x in pixels.values()]
    return SummedFeatures(Tower((module,)), list(pixels), features, packs)


def fetch(features, keys):
    return features.fetch(features.tower, list(keys), [1] * len(keys), lambda _: 1 / 0)


@pytest.fixture
def pixels():
    torch.manual_seed(1)
    return {key: torch.randn(n, 6) for key, n in (("a", 2), ("b", 3), ("c", 1))}


def losses(found, k):
    """Of the k-th pack; the second level of every other medium is not read."""
    return sum(
        (x * (k + 1)).sum() + ((k + i) % 2) * (y.square() * x[:1]).sum()
        for i, (x, y) in enumerate(found)
    )


def test_gradients_are_those_of_encoding_in_each_pack(pixels):
    packs = ["ab", "b", "cab"]
    wanted = made().double()
    for k, keys in enumerate(packs):
        own = [wanted(pixels[key].double()) for key in keys]
        losses([(x, x.square()) for x in own], k).backward()
    module = made()
    ran = []
    module.weight.register_hook(ran.append)
    features = summed(module, pixels, packs)
    for k, keys in enumerate(packs):
        losses(fetch(features, keys), k).backward()
    assert not ran and module.weight.grad is None
    features.backward()
    assert len(ran) == 1
    for own, exact in zip(module.parameters(), wanted.parameters(), strict=True):
        assert (own.grad - exact.grad).norm() <= 1e-6 * exact.grad.norm()


def test_bf16_gradients_are_added_in_float32_and_rounded_once(pixels):
    module = made(torch.bfloat16)
    features = summed(module, {"a": torch.randn(3, 6).bfloat16()}, "a" * 300)
    torch.manual_seed(2)
    slopes = torch.rand(300, 3, 5).bfloat16()
    for slope in slopes:
        ((x, _),) = fetch(features, "a")
        (x * slope).sum().backward()
    exact = slopes.double().sum(0)
    rounding = torch.zeros(3, 5, dtype=torch.bfloat16)
    for slope in slopes:
        rounding += slope
    (sums,) = features._sums.values()
    assert sums[0].dtype == torch.float32 and sums[1] is None
    assert ((sums[0] - exact) / exact).abs().max() <= 1e-6
    assert ((rounding.double() - exact) / exact).abs().max() >= 0.01  # as .grad in bf16
    features.backward()
    wanted = exact.bfloat16().sum(0)
    assert ((module.bias.grad - wanted) / wanted).abs().max() <= 2**-7


def test_zero_reaches_every_weight(pixels):
    module = made()
    module.bias.requires_grad_(False)
    zero = Tower((module,)).zero()
    zero.backward()
    assert zero == 0 and (module.weight.grad == 0).all() and module.bias.grad is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda module: module.weight.data.add_(1e-6), "weights changed"),
        (lambda module: setattr(module, "scale", 2.0), "adapters are not as they were"),
    ],
)
def test_a_tower_that_changes_within_is_refused(pixels, change, why):
    module = made()
    features = summed(module, pixels, "a")
    ((x, _),) = fetch(features, "a")
    x.sum().backward()
    change(module)
    for call in (features.backward, lambda: fetch(features, "a")):
        with pytest.raises(mp.ModelError, match=rf"{why}.*Fix: ") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert module.weight.grad is None


def returned(features, keys):
    """A forward of these media, with its backward."""
    ((x, _), *_) = fetch(features, keys)
    x.sum().backward(retain_graph=True)
    return x


def test_a_second_backward_is_not_another_forwards(pixels):
    module = made()
    features = summed(module, pixels, "ab")
    x = returned(features, "a")
    x.sum().backward(retain_graph=True)
    fetch(features, "b")
    with pytest.raises(mp.ModelError, match=r"1 of 2 forwards had a backward.*Fix: "):
        features.backward()
    returned(features, "b")
    with pytest.raises(mp.ModelError, match=r"2 of 3 forwards"):
        features.backward()


def test_a_backward_after_the_block(pixels):
    features = summed(made(), pixels, "a")
    x = returned(features, "a")
    features.backward()
    for late in (lambda: x.sum().backward(), lambda: fetch(features, "a")):
        with pytest.raises(mp.ModelError, match=r"its block has ended.*Fix: "):
            late()


@pytest.mark.parametrize("frozen", [True, False])
def test_requires_grad_that_changes_within(pixels, frozen):
    module = made().requires_grad_(not frozen)
    features = summed(module, pixels, "a")
    module.bias.requires_grad_(frozen)
    with pytest.raises(mp.ModelError, match=r"requires_grad of the tower changed.*Fix: "):
        fetch(features, "a")


def test_features_that_were_made_without_gradients(pixels):
    with torch.no_grad():
        features = summed(made(), pixels, "a")
        fetch(features, "a")
    with pytest.raises(mp.ModelError, match=r"encoded without gradients.*Fix: "):
        fetch(features, "a")
