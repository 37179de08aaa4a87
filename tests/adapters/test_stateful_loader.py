"""torchdata's StatefulDataLoader over batches packed in workers: a run that was killed goes on, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.plane
TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}

# prints a line per batch: its digest, and the state behind it
RUN = """
import functools, hashlib, io, json, sys
import numpy as np, torch
from support.samples import make_sample
from torchdata.stateful_dataloader import StatefulDataLoader
import mmpack as mp
from mmpack.adapters.torch import PackBatches, PackLoader

kind, workers, state = sys.argv[1], int(sys.argv[2]), json.loads(sys.stdin.readline())
torch.set_num_threads(1)
rng = np.random.default_rng(0)
samples = []
for g in range(6):
    pixels = rng.random((16, 1176), np.float32)
    for k in range(3):
        parts = [("text", [g, 5, 6]), ("image", (1, 4, 4), f"p{g}"), ("response", list(range(g, g + 3 + k)))]
        samples.append(make_sample(parts, sample_id=f"g{g}-{k}", group_id=f"g{g}"))
        samples[-1].media[0].pixel_values = pixels
options = dict(max_tokens=30, share_prefix=True)
if kind == "steps":
    loader = PackLoader(samples, groups_per_step=2, shuffle=True, seed=3, **options)
    dataset = PackBatches(loader)
    dataset.set_epoch(1)
    batches = StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
else:
    collate = functools.partial(mp.collate, share_prefix=True)
    bins = mp.plan(samples, **options).bins
    batches = StatefulDataLoader(samples, batch_sampler=bins, collate_fn=collate, num_workers=workers)
if state is not None:
    batches.load_state_dict(state)
for item in batches:
    batch, *place = item if kind == "steps" else (item,)
    h = hashlib.sha256(repr((batch.sample_ids, place)).encode())
    for x in (batch.input_ids, batch.position_ids, batch.visible_until, batch.loss_rows, batch.pixel_values):
        h.update(x.numpy().tobytes())
    print(json.dumps([h.hexdigest(), batches.state_dict()]), flush=True)
print("end", flush=True)
"""


def run(kind, workers, state=None, kill_after=None):
    """Digests of the batches that were read, and the state behind the last one."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, kind, str(workers)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its workers are killed with it
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(state) + "\n")
    process.stdin.flush()
    digests = []
    for line in process.stdout:
        if line == "end\n":
            break
        digest, state = json.loads(line)
        digests.append(digest)
        if len(digests) == kill_after:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == (-signal.SIGKILL if kill_after else 0)
    return digests, state


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steps", "bins"])
def test_a_killed_run_goes_on_with_the_same_batches(kind):
    whole, _ = run(kind, 0)
    assert len(whole) == len(set(whole)) > 4
    for workers in (0, 2):
        before, state = run(kind, workers, kill_after=3)
        after, _ = run(kind, workers, state)
        assert before + after == whole
