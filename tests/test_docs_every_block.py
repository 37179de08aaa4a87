"""Each python block of a page is run by some test: where a page gains one, this fails until a test runs it too."""

import re
from pathlib import Path

import pytest
from test_docs_run import ROOT, blocks

MEDIA, SITE, TRL = "test_docs_media.py", "test_site_examples.py", "test_docs_trl.py"
# Pages that are not run as a whole by test_docs_run.py: how many blocks, and the tests that run them.
ELSEWHERE = {
    "README.md": (2, "test_docs_run.py"),
    "docs/adapters.md": (
        6,
        *("test_docs_run.py", "adapters/test_verl.py", "adapters/test_sglang.py"),
        *("adapters/test_openrlhf.py", "adapters/test_openrlhf_actor.py"),
        "adapters/test_vime.py",
    ),
    "docs/audio.md": (2, MEDIA),
    "docs/data_planes.md": (5, "test_docs_planes.py"),
    "docs/engines.md": (
        6,
        *("adapters/test_vllm.py", "adapters/test_vllm_kept_ids.py"),
        *("adapters/test_vllm_media_cache.py", "adapters/test_vllm_generate.py"),
        "adapters/test_renderers.py",
    ),
    "docs/families.md": (1, "families/test_register.py"),
    "docs/frameworks.md": (8, "test_docs_frameworks.py"),
    "docs/hub.md": (3, "hub/test_hub_kernels.py"),
    "docs/media_by_reference.md": (4, "test_docs_run.py", "adapters/test_ray_blobs.py"),
    "docs/megatron.md": (1, "adapters/test_megatron.py"),
    "docs/migrating.md": (6, SITE),
    "docs/stability.md": (1, MEDIA),
    "docs/ranks.md": (4, "test_docs_run.py", "adapters/test_tensor_parallel.py"),
    "docs/start.md": (6, SITE),
    "docs/trl.md": (4, TRL),
    "docs/video.md": (4, MEDIA),
}
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    if re.search(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE)
)
WHOLE = re.compile(r"""\brun\(\s*(?:page|"(docs/\w+\.md)")[,)]""")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run(page):
    tests = ROOT / "tests"
    if page in ELSEWHERE:
        count, *files = ELSEWHERE[page]
        assert len(blocks(page)) == count, "a test must run the new block; then correct the count"
        name = Path(page).name
        assert all(name in (tests / file).read_text(encoding="utf-8") for file in files)
    else:
        code = (tests / "test_docs_run.py").read_text(encoding="utf-8")
        assert page in WHOLE.findall(code), f"no test runs {page}"
