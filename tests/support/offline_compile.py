"""Triton kernels compiled for every target of the project, on a machine without a GPU."""

import pytest

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
# The most shared memory that a program may take.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
each_target = pytest.mark.parametrize("target", TARGETS)


def compiled(kernel, signature: dict, constexprs: dict, target: str, **options):
    """`kernel` (a @triton.jit function) as Triton compiles it; options: num_warps, num_stages, enable_fp_fusion."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        kernel, signature=signature | dict.fromkeys(constexprs, "constexpr"), constexprs=constexprs
    )
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    assert made.metadata.shared <= SHARED_BYTES[target]
    return made


def compiled_size(kernel, signature: dict, constexprs: dict, target: str, **options) -> int:
    """Bytes of machine code."""
    made = compiled(kernel, signature, constexprs, target, **options)
    return len(made.asm["hsaco" if target.startswith("gfx") else "cubin"])
