"""Two versions of transformers as two sides: this one, and that of the environment beside it, through a record."""

import copy
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.kits.samples import draw_pixels, probe_samples
from support.process import call_mmpack
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers.probe import probe_side

pytestmark = pytest.mark.adapter
ROOT = Path(__file__).resolve().parents[2]
# environments of other versions lie beside the main one (Makefile)
NEWEST = Path(sys.prefix).parent / ".venv" / "bin" / "python"
VERSION = "import importlib.metadata as m; print(m.version('transformers'))"


@pytest.fixture(scope="module")
def other():
    """The Python of another version."""
    if not NEWEST.exists():
        pytest.skip("no .venv beside this environment")
    done = subprocess.run([NEWEST, "-c", VERSION], capture_output=True, text=True, check=True)
    if done.stdout.strip() == importlib.metadata.version("transformers"):
        pytest.skip("this is the newest version; make test-transformers has the oldest")
    return NEWEST


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_one_checkpoint_under_two_versions(other, family, tmp_path):
    """Alike; and a weight rounded on one side is named, module and token."""
    model, samples = tiny_model(family), probe_samples(family)
    model.save_pretrained(tmp_path / "model")
    mp.write_trace(tmp_path / "t.jsonl", samples)
    given = ["--trace", str(tmp_path / "t.jsonl"), "--draw-pixels"]
    command = [other, "-m", "mmpack", "probe", f"hf:{tmp_path / 'model'}?layout=padded", *given]
    path = tmp_path / "new.probe"
    done = subprocess.run(
        [*command, "--save", path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = call_mmpack("probe", path, f"hf:{tmp_path / 'model'}", *given, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    found = [document[side]["transformers"] for side in ("about_a", "about_b")]
    assert document["ok"] and len(set(found)) == 2
    names = {row["module"] for row in document["modules"]}
    layers = range(model.config.get_text_config().num_hidden_layers)
    products = {f"model.language_model.layers.{k}.mlp.down_proj" for k in layers}
    assert {"model.visual.patch_embed.proj", "lm_head", "logprobs"} | products <= names

    draw_pixels(samples)
    broken = copy.deepcopy(model)
    weight = broken.model.language_model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data.bfloat16().float()
    first = mp.probe.run(mp.probe.read_record(path), probe_side(broken), samples).first
    assert first.module == "model.language_model.layers.1.self_attn.v_proj"
    assert (first.sample, first.token, first.side) == (samples[0].sample_id, 0, "out")
