"""Sides of a few lines for the probe's tests: four products with tanh between, on the samples' ids."""

import torch
from support.samples import make_sample

from mmpack.probe import Rows, Side

GEN = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(32, 32, generator=GEN) / 32**0.5 for _ in range(4)]


def samples():
    image = ("image", (1, 4, 6), "x")
    return [
        make_sample([("text", range(5)), image, ("text", range(3)), ("response", range(4))], "a"),
        make_sample([("text", range(7)), ("response", range(5))], "b"),
    ]


def layers(edit=None, shake=True, calls=None):
    """A side of four products with tanh between; `edit(layer, sample, values)` breaks it."""

    def run(given, recorder):
        if calls is not None:
            calls.append(recorder.noisy)
        for number, sample in enumerate(given):
            recorder.begin()
            into, tokens = recorder.places.chosen(number)
            rows = Rows("text", torch.from_numpy(tokens), into)
            ids = 1 + torch.as_tensor(sample.input_ids)[:, None] % 1000
            x = torch.sin(ids * torch.arange(1, 33))
            source = recorder.put("embed", "out", x, rows)
            for k, weight in enumerate(WEIGHTS):
                x = torch.tanh(x @ weight)
                x = x if edit is None else edit(k, number, x)
                x = recorder.shaken(x) if shake else x
                source = recorder.put(f"layers.{k}", "out", x, rows, source, 32)

    return Side("edited" if edit else "plain", run, {"dtype": "float32"})
