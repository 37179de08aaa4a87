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
#define TO_BFLOAT16(value) hip_bfloat16(value)
using Mask = unsigned long long;  // of the lanes of a warp
#define BALLOT(predicate) __ballot(predicate)
#define COUNT_BITS(mask) __popcll(mask)
#define FIRST_BIT(mask) (__ffsll(mask) - 1)
#define SHUFFLE(value, lane) __shfl(value, lane)
#define SYNC_WARP()                                     \
  do {                                                  \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"); \
    __builtin_amdgcn_wave_barrier();                    \
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"); \
  } while (0)
#define LAST_ERROR() static_cast<int>(hipGetLastError())
#define ADDRESS_OF(pointer, symbol) static_cast<int>(hipGetSymbolAddress(pointer, HIP_SYMBOL(symbol)))
#define ALLOW_SHARED(kernel, bytes) \
  static_cast<int>(                 \
      hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), hipFuncAttributeMaxDynamicSharedMemorySize, bytes))
#define IN_DEVICE_MEMORY(pointer) (pointer)
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
#define TO_BFLOAT16(value) __float2bfloat16_rn(value)
using Mask = unsigned;  // of the lanes of a warp
#define BALLOT(predicate) __ballot_sync(0xffffffffu, predicate)
#define COUNT_BITS(mask) __popc(mask)
#define FIRST_BIT(mask) (__ffs(mask) - 1)
#define SHUFFLE(value, lane) __shfl_sync(0xffffffffu, value, lane)
#define SYNC_WARP() __syncwarp()
#define LAST_ERROR() static_cast<int>(cudaGetLastError())
#define ADDRESS_OF(pointer, symbol) static_cast<int>(cudaGetSymbolAddress(pointer, symbol))
#define ALLOW_SHARED(kernel, bytes) \
  static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
// A pointer that came by a shuffle, of which the compiler doesn't see where it points.
#define IN_DEVICE_MEMORY(pointer) in_device_memory(pointer)
template <class Value>
__device__ inline Value* in_device_memory(Value* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}
constexpr int WARP = 32;
#endif

namespace mmpack {

// torch's numbers of data types; data == nullptr: the column was not given.
enum Dtype : int32_t { BYTE = 0, INT32 = 3, INT64 = 4, HALF = 5, FLOAT = 6, DOUBLE = 7, BFLOAT16 = 15 };

struct Column {
  const void* data = nullptr;
  int32_t dtype = FLOAT;
};

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

// A value that nobody reads soon.
template <class Value>
__device__ inline void write_streaming(Value* to, const Value& value) {
#ifndef __HIP__
  if constexpr (sizeof(Value) == 16)
    __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(value));
  else if constexpr (sizeof(Value) == 8)
    __stcs(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(value));
  else if constexpr (sizeof(Value) == 4)
    __stcs(reinterpret_cast<unsigned*>(to), reinterpret_cast<const unsigned&>(value));
  else
#endif
    *to = value;
}

__device__ inline void narrow(float value, float& out) { out = value; }
__device__ inline void narrow(float value, __half& out) { out = __float2half_rn(value); }
__device__ inline void narrow(float value, bfloat16& out) { out = TO_BFLOAT16(value); }

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

// Counts `ticket` up, from blocks - 1 back to 0; what the block wrote before is seen by who counts later.
__device__ inline unsigned arrive(unsigned* ticket, unsigned blocks) {
#ifdef __HIP__
  __threadfence();
  const unsigned before = atomicInc(ticket, blocks - 1);
  __threadfence();
#else  // a fence for order alone, cheaper than __threadfence
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ticket), "r"(blocks - 1)
               : "memory");
#endif
  return before;
}

// True in all threads of the block that comes last; it then sees what every block wrote before.
__device__ inline bool comes_last(unsigned* ticket, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = blocks == 1 || arrive(ticket, blocks) == blocks - 1;
  __syncthreads();
  return last;
}

#endif

}  // namespace mmpack
