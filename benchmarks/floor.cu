// What the stages of a kernel of the policy loss's shape take, in blocks of 128 threads: two float columns read and one
// written, SUMS sums in float64. Each stage is the one before and one thing more.
#include <cuda_runtime.h>

struct Arguments {
  const float* left;
  const float* right;
  const int* starts;  // the first token of each block's run, one more than there are blocks
  float* out;
  double* partials;  // [SUMS, blocks]
  unsigned* ticket;
  float* sums;
  int count;
};

namespace {

constexpr int SUMS = 9, THREADS = 128, WARP = 32;

enum Stage { EMPTY, COPY, OFFSETS, BLOCK_SUMS, TICKET, READ_BACK };

__device__ double warp_sum(double value) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

template <int STAGE>
__global__ void floor_kernel(const Arguments a) {
  if (STAGE == EMPTY) return;
  const int share = (a.count + gridDim.x - 1) / gridDim.x;
  const int start = STAGE == COPY ? blockIdx.x * share : a.starts[blockIdx.x];
  const int stop = STAGE == COPY ? min(start + share, a.count) : a.starts[blockIdx.x + 1];
  double sum = 0;
  for (int i = start + threadIdx.x; i < stop; i += THREADS) {
    const float value = a.left[i] - a.right[i];
    a.out[i] = value;
    sum += value;
  }
  if (STAGE < BLOCK_SUMS) return;

  __shared__ double shared[SUMS][THREADS];
  for (int k = 0; k < SUMS; ++k) shared[k][threadIdx.x] = sum * k;
  __syncthreads();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (int k = warp; k < SUMS; k += THREADS / WARP) {
    double total = 0;
    for (int i = lane; i < THREADS; i += WARP) total += shared[k][i];
    total = warp_sum(total);
    if (lane == 0) a.partials[k * gridDim.x + blockIdx.x] = total;
  }
  if (STAGE < TICKET) return;

  __shared__ unsigned arrived;
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(arrived)
                 : "l"(a.ticket), "r"(gridDim.x - 1)
                 : "memory");
  __syncthreads();
  if (STAGE < READ_BACK || arrived != gridDim.x - 1) return;
  for (int k = warp; k < SUMS; k += THREADS / WARP) {
    double total = 0;
    for (int i = lane; i < gridDim.x; i += WARP) total += a.partials[k * gridDim.x + i];
    total = warp_sum(total);
    if (lane == 0) a.sums[k] = total;
  }
}

}  // namespace

extern "C" int launch_floor(int stage, int blocks, Arguments a, cudaStream_t stream) {
  void (*const kernels[])(Arguments) = {floor_kernel<EMPTY>,      floor_kernel<COPY>,   floor_kernel<OFFSETS>,
                                        floor_kernel<BLOCK_SUMS>, floor_kernel<TICKET>, floor_kernel<READ_BACK>};
  kernels[stage]<<<blocks, THREADS, 0, stream>>>(a);
  return cudaGetLastError();
}
