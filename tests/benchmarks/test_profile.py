"""Kernels by class, with names as profiles of H100s and H200s show them."""

from types import SimpleNamespace

import pytest

from benchmarks.step.profile import class_of, seconds_by_class

KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>": "products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 32, 4>>": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "statistics_kernel": "head",
    "void at::native::cunn_SoftMaxForward<8, c10::BFloat16, LogSoftMaxForwardEpilogue>": "head",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "elementwise",
    "Memcpy HtoD (Pageable -> Device)": "copies",
    "ncclDevKernel_AllGather_RING_LL": "collectives",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_classes(kernel):
    assert class_of(kernel) == KERNELS[kernel]


def test_kernels_within_an_annotation_count_once():
    def event(key, device, annotation, seconds):
        return SimpleNamespace(
            key=key,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=annotation,
            self_device_time_total=seconds * 1e6,
        )

    events = [
        event("Torch-Compiled Region: 0/0", "CUDA", True, 3.0),
        event("triton_red_fused_mul_0", "CUDA", False, 1.0),
        event("nvjet_sm90_tst_128x256", "CUDA", False, 2.0),
        event("aten::mm", "CPU", False, 0.0),
    ]
    assert seconds_by_class(events) == {"elementwise": 1.0, "products": 2.0}
