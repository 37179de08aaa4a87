"""The code of docs/data_planes.md runs: each plane's where its package is."""

import io

import numpy as np
import pytest
from PIL import Image
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.demo.qwen_processor import qwen_vl_processor

PAGE = "docs/data_planes.md"


@pytest.fixture(scope="module")
def given():
    hf, rng = qwen_vl_processor(max_pixels=16 * 28 * 28), np.random.default_rng(0)
    rows = []
    for i in range(6):
        if i % 3 == 0:
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(file, "png")
        content = [{"type": "image"}, {"type": "text", "text": "?"}]
        rows.append(
            {
                "messages": [{"role": "user", "content": content}],
                "images": [file.getvalue()],
                "response_ids": rng.integers(0, 1000, 3 + i).tolist(),
                "sample_id": f"s{i}",
                "group_id": f"g{i // 3}",
            }
        )
    processor = mp.wrap_processor(hf)
    names = ("messages", "response_ids", "sample_id", "group_id")
    samples = [processor(**{n: row[n] for n in names}, media=row["images"]) for row in rows]
    return {"mp": mp, "samples": samples, "rows": rows, "hf_processor": hf}


def run_part(word, given):
    [code] = [block for block in blocks(PAGE) if word in block[1]]
    return run(PAGE, dict(given), [code])


def test_datasets(given, capsys):
    pytest.importorskip("datasets")
    names = run_part("import datasets", given)
    assert capsys.readouterr().out == "1\n" and names["state"]["step"] == 1


@pytest.mark.plane
def test_tensordict(given, capsys):
    pytest.importorskip("tensordict")
    run_part("to_tensordict", given)
    assert capsys.readouterr().out.startswith("torch.Size([")


@pytest.mark.plane
def test_stateful_loader(given):
    pytest.importorskip("torchdata.stateful_dataloader")
    names = run_part("StatefulDataLoader", given)
    assert names["item"].last and len(names["expected"]) == 1


@pytest.mark.plane
@pytest.mark.slow
def test_ray_and_transfer_queue(given, capsys):
    ray = pytest.importorskip("ray")
    tq = pytest.importorskip("transfer_queue")
    ray.init(
        num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False
    )
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        run_part("import ray", given)
        assert "['s0', 's1', 's2', 's3', 's4', 's5']" in capsys.readouterr().out
        tq.init()
        run_part("put_columns", given)
        assert capsys.readouterr().out.endswith("6 0.5 []\n")
    finally:
        tq.close()
        ray.shutdown()
