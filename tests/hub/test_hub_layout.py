"""Kernels for the Hugging Face hub, of `hub/write.py`: what is in them, what they import, what they compute."""

import ast
import sys
import tomllib

import pytest
import torch
from support.hub import ROOT, imported, project, writer
from torch.testing import assert_close

# "Only modules from the Python standard library, Torch, or the kernel itself can be imported"; Triton comes with torch.
MAY = {*sys.stdlib_module_names, "torch", "triton"}


def test_a_kernel_imports_only_what_it_may():
    folder = project() / "torch-ext" / "mmpack"
    files = {path: path.read_text() for path in folder.rglob("*.py")}
    assert len(files) > 60
    for path, source in files.items():
        tree = ast.parse(source)
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} <= MAY, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert str(node.module).split(".")[0] in MAY, path
            elif isinstance(node, ast.ImportFrom) and id(node) not in for_types:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                found = base.with_suffix(".py").exists() or base.is_dir()
                assert found or node.module == "_ops", (path, ast.unparse(node))


def test_a_folder_that_was_written_before(tmp_path):
    made = writer().write(tmp_path, owner="someone")
    (made / "torch-ext" / "mmpack" / "older.py").write_text("")
    assert writer().write(tmp_path, owner="someone") == made
    assert not (made / "torch-ext" / "mmpack" / "older.py").exists()
    general = tomllib.loads((made / "build.toml").read_text())["general"]
    assert general["hub"] == {"repo-id": "someone/mmpack"}
    assert 'get_kernel("someone/mmpack", version=0' in (made / "CARD.md").read_text()
    built = {path.name for path in (made / "build").iterdir()}
    assert built == {"torch-cpu", "torch-cuda", "torch-rocm"}
    for path in made.rglob("*"):
        assert not path.is_file() or str(ROOT) not in path.read_text(), path  # of this machine


def test_two_builds_in_one_process(tmp_path):
    """Another build of the same kernel has ops of its own; nothing collides, also not with mmpack's."""
    kernel = imported(project() / "build" / "torch-cpu")
    other = imported(project() / "build" / "torch-cuda")
    x, index = torch.randn(5, 3, requires_grad=True), torch.tensor([4, 0, 4])
    for build in (kernel, other):
        (found,) = torch.autograd.grad(build.gather_rows(x, index).square().sum(), x)
        (wanted,) = torch.autograd.grad(x[index].square().sum(), x)
        assert_close(found, wanted)
        assert hasattr(getattr(torch.ops, f"{build.__name__}_python"), "gather_rows")
    with pytest.raises(ValueError, match="gather_rows: index has shape"):
        kernel.gather_rows(x, index[None])


def test_each_function_computes_what_torch_does():
    kernel = imported(project() / "build" / "torch-cpu")
    hidden, head = torch.randn(6, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    ids = torch.tensor([3, 0, 10, 7, 7, 1])
    wanted = (hidden @ head.T).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    for found in (
        kernel.linear_selected_logprobs(hidden, head, ids),
        kernel.selected_logprobs(hidden @ head.T, ids),
    ):
        assert_close(found[0] if isinstance(found, tuple) else found, wanted, check_dtype=False)
    weight = torch.rand(8, dtype=torch.float64)
    assert_close(kernel.rms_norm(hidden, weight, 1e-5), torch.rms_norm(hidden, (8,), weight, 1e-5))
    rewards, group = torch.tensor([1.0, 0.0, 3.0, 1.0]), torch.tensor([0, 0, 1, 1])
    pairs = rewards.view(2, 2)
    scaled = (pairs - pairs.mean(1, keepdim=True)) / (pairs.std(1, keepdim=True) + 1e-6)
    assert_close(kernel.group_advantages(rewards, group), scaled.view(-1), atol=1e-4, rtol=1e-4)
    old = torch.tensor([-1.0, -2.0, -0.5])
    loss = kernel.policy_loss(
        old, torch.tensor([1.0, -0.5]), torch.tensor([0, 2, 3]), old_logprobs=old
    )
    assert_close(loss.loss, -torch.tensor([1.0, 1.0, -0.5]).mean())


@pytest.mark.kernel
def test_its_triton_kernels(monkeypatch):
    """Interpreted where there is no GPU."""
    monkeypatch.setenv("MMPACK_BACKEND", "triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = imported(project() / "build" / f"torch-{device.type}")
    x, index = torch.randn(7, 32, device=device), torch.tensor([6, 0, 6, 2], device=device)
    assert_close(kernel.gather_rows(x, index), x[index])
    weight = torch.rand(32, device=device)
    assert_close(kernel.rms_norm(x, weight, 1e-6), torch.rms_norm(x, (32,), weight, 1e-6))
    assert f"{kernel.__name__}.ops.norms.triton" in sys.modules
