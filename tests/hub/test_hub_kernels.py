"""The kernels beside the package `kernels` itself, and models of transformers that take their layers from them."""

from pathlib import Path

import pytest
import torch
from support.hub import project, writer
from torch.testing import assert_close

pytestmark = pytest.mark.hub

VARIANTS = ("cpu", "cuda", "rocm")


def test_its_schema_takes_each_build_toml():
    from kernels._rust import Backend, Build

    assert Build.open(project()).general.backends == [Backend.CPU, Backend.CUDA, Backend.ROCm]


@pytest.mark.parametrize("backend", VARIANTS)
def test_metadata_and_sums_are_as_it_reads_them(backend):
    from kernels import Metadata
    from kernels._rust import Backend, Digest

    variant = project() / "build" / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == "mmpack" and metadata.license == "Apache-2.0"
    assert metadata.backend.backend_type == Backend.from_str(backend)
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))


def test_it_loads_the_build_for_this_machine(monkeypatch):
    from kernels import get_kernel, get_loaded_kernels, get_local_kernel

    kernel = get_local_kernel(project())
    assert kernel.__name__ in {loaded.metadata.id for loaded in get_loaded_kernels()}
    x = torch.randn(4, 3)
    assert_close(kernel.gather_rows(x, torch.tensor([3, 3, 0])), x[[3, 3, 0]])
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/mmpack={project()}")
    assert "policy_loss" in get_kernel("someone/mmpack", version=0).__all__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_takes_its_norms_from_the_kernel(dtype):
    from kernels import KernelizeFallback, LocalLayerRepository, Mode, kernelize, use_kernel_mapping
    from support.tiny_models import tiny_qwen2_5_vl

    model = tiny_qwen2_5_vl(dtype=dtype)
    ids = torch.arange(6)[None]
    wanted = model(ids).logits
    wanted.float().square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    norm = LocalLayerRepository(project(), layer_name="RMSNorm")
    with use_kernel_mapping({"RMSNorm": {"cpu": norm}}, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device="cpu", use_fallback=KernelizeFallback.NO_LAYER)
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms and all("_mmpack_cpu_" in m.forward.__func__.__module__ for m in norms)
    found = model(ids).logits
    found.float().square().mean().backward()
    tight = dtype == torch.float32
    assert_close(found, wanted, **({} if tight else {"atol": 2e-2, "rtol": 2e-2}))
    for name, p in model.named_parameters():
        if name in gradients:
            scale = gradients[name].abs().max()
            assert (p.grad - gradients[name]).abs().max() <= (1e-5 if tight else 5e-2) * scale, name


def test_transformers_own_config_names_the_layer(monkeypatch):
    """`from_pretrained(…, kernel_config=…)` does this on a GPU; it takes no CPU, so the device is told."""
    import transformers.utils.kernel_config as module
    from support.tiny_models import tiny_qwen2_5_vl

    monkeypatch.setattr(module, "infer_device", lambda model: "cuda")
    names = {"RMSNorm": f"{project()}:RMSNorm"}
    config = module.KernelConfig(names, use_local_kernel=True)
    model = tiny_qwen2_5_vl().train()
    config.sanitize_kernel_mapping(model)
    config.create_compatible_mapping(model)
    (repository,) = config.kernel_mapping["RMSNorm"]["cuda"].values()
    layer = repository.load()
    assert layer.__name__ == "RMSNorm" and Path(project()) == repository._repo_path


def test_the_page(monkeypatch, tmp_path):
    import transformers
    from support.tiny_models import tiny_qwen2_5_vl
    from test_docs_run import blocks, run

    monkeypatch.chdir(tmp_path)
    writer().write(tmp_path / "build" / "hub")
    one, layers, on_a_gpu = blocks("docs/hub.md")
    model = tiny_qwen2_5_vl()
    names = run("docs/hub.md", {"model": model}, [one, layers])
    wanted = (names["hidden"] @ names["head"].T).log_softmax(-1)
    assert_close(names["logprobs"], wanted[range(5), [3, 1, 4, 1, 5]])
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert all("_mmpack_cpu_" in m.forward.__func__.__module__ for m in norms)
    monkeypatch.setattr(
        transformers.AutoModelForImageTextToText, "from_pretrained", lambda name, **given: given
    )
    given = run("docs/hub.md", names, [on_a_gpu])["model"]
    given["kernel_config"].sanitize_kernel_mapping(tiny_qwen2_5_vl())
    assert given["use_kernels"] and given["kernel_config"].use_local_kernel
