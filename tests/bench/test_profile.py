"""Kernels by class, with names as profiles of H100s and H200s show them."""

import pytest

from mmpack.bench.profile import class_of

KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>": "products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 32, 4>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "statistics_kernel": "head",
    "stored_logit_gradient_kernel": "head",
    "void at::native::cunn_SoftMaxForward<8, c10::BFloat16, LogSoftMaxForwardEpilogue>": "head",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "elementwise",
    "Memcpy HtoD (Pageable -> Device)": "copies",
    "void at::native::CatArrayBatchedCopy_contig<OpaqueType<2>>": "copies",
    "ncclDevKernel_AllGather_RING_LL": "collectives",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_classes(kernel):
    assert class_of(kernel) == KERNELS[kernel]
