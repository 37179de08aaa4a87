"""Without vLLM its adapter imports, and says what is missing when an engine is asked for."""

import importlib.util

import pytest
from support.process import run_python


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_without_the_package_names_the_extra():
    code = (
        "from mmpack.adapters.vllm import VllmEngine\n"
        "try: VllmEngine('x')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = run_python(code).stdout
    assert said.startswith("MissingExtraError") and "mmpack[vllm]" in said
