// CUDA and HIP under one set of names, the columns that kernels read, and sums over a warp of either width.
// Nothing of torch is included here: hipcc and nvcc compile the kernels by themselves.
#pragma once

#include <cstdint>

#ifdef __HIP__
#include <hip/hip_bfloat16.h>
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
using bfloat16 = hip_bfloat16;
using Stream = hipStream_t;
#define SHUFFLE_XOR(value, mask) __shfl_xor(value, mask)
#define FROM_BFLOAT16(value) static_cast<float>(value)
using Mask = unsigned long long;  // of the lanes of a warp
#define BALLOT(predicate) __ballot(predicate)
#define COUNT_BITS(mask) __popcll(mask)
#define FIRST_BIT(mask) (__ffsll(mask) - 1)
#define LAST_ERROR() static_cast<int>(hipGetLastError())
#ifndef MMPACK_WAVEFRONT  // host and device must agree: 64 on CDNA, -DMMPACK_WAVEFRONT=32 for RDNA
#define MMPACK_WAVEFRONT 64
#endif
#if defined(__HIP_DEVICE_COMPILE__) && __AMDGCN_WAVEFRONT_SIZE != MMPACK_WAVEFRONT
#error "MMPACK_WAVEFRONT is not the wavefront of this target"
#endif
constexpr int WARP = MMPACK_WAVEFRONT;
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
using bfloat16 = __nv_bfloat16;
using Stream = cudaStream_t;
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define FROM_BFLOAT16(value) __bfloat162float(value)
using Mask = unsigned;  // of the lanes of a warp
#define BALLOT(predicate) __ballot_sync(0xffffffffu, predicate)
#define COUNT_BITS(mask) __popc(mask)
#define FIRST_BIT(mask) (__ffs(mask) - 1)
#define LAST_ERROR() static_cast<int>(cudaGetLastError())
constexpr int WARP = 32;
#endif

namespace mmpack {

// torch's numbers of data types; data == nullptr: the column was not given.
enum Dtype : int32_t { INT32 = 3, INT64 = 4, HALF = 5, FLOAT = 6, DOUBLE = 7, BFLOAT16 = 15 };

struct Column {
  const void* data = nullptr;
  int32_t dtype = FLOAT;
};

// Counters by which the blocks of a launch find out which of them finishes last; 0 between launches, as atomicInc
// wraps them. Launches that run at the same time must not share one: eager ones go round a ring, captured ones keep theirs.
constexpr int RING = 4096;
constexpr int KEPT = 61440;

#if defined(__CUDACC__) || defined(__HIP__)

__device__ inline double read(const Column& column, int64_t i) {
  switch (column.dtype) {
    case FLOAT: return static_cast<const float*>(column.data)[i];
    case DOUBLE: return static_cast<const double*>(column.data)[i];
    case BFLOAT16: return FROM_BFLOAT16(static_cast<const bfloat16*>(column.data)[i]);
    case HALF: return __half2float(static_cast<const __half*>(column.data)[i]);
    case INT32: return static_cast<const int32_t*>(column.data)[i];
    default: return static_cast<double>(static_cast<const int64_t*>(column.data)[i]);
  }
}

// Tokens [start, stop) of a sample. Both are on their way before either is waited for.
struct Span {
  int start, stop;
};
__device__ inline Span span_of(const Column& cu_loss, int sample) {
  if (cu_loss.dtype == INT32) {
    const int32_t* cu = static_cast<const int32_t*>(cu_loss.data) + sample;
    return {cu[0], cu[1]};
  }
  const int64_t* cu = static_cast<const int64_t*>(cu_loss.data) + sample;
  return {static_cast<int>(cu[0]), static_cast<int>(cu[1])};
}

// The same bits in every lane: partners add the same two numbers.
__device__ inline double warp_sum(double value) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) value += SHUFFLE_XOR(value, mask);
  return value;
}

// True in all threads of the block that comes last; it then sees what every block wrote before.
__device__ inline bool comes_last(unsigned* ticket, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // of what the whole block wrote: the barrier comes before it
    last = blocks == 1 || atomicInc(ticket, blocks - 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

#endif

}  // namespace mmpack
