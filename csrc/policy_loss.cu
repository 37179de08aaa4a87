// mmpack::policy_loss in one launch: the loss, its metrics and its derivatives, in float64, no atomics in values.
//
// A group of threads (a warp where samples are short, else a block) sums what the ratio or the correction needs of its
// whole sample, then does its own tokens. The block that finishes last adds up what all blocks left behind, in the
// order of their numbers. What a token reads is on its way before any of it is waited for.
#include "ops.h"

#include <atomic>

namespace mmpack {
namespace {

constexpr int THREADS = 128;  // small, so that all blocks run at once
constexpr int WIDE = 512;     // where long samples are summed as a whole
constexpr int BLOCKS = 512;
constexpr int LANES = 1024;  // a sample is summed as so many interleaved runs, whoever does it
constexpr double BOUND = 20.0;

__device__ unsigned tickets[RING + KEPT];

// Comparisons, not fmin and fmax: a NaN stays one.
__device__ double clamp(double x, double low, double high) { return x < low ? low : (x > high ? high : x); }

__device__ double bounded_exp(double x) { return exp(clamp(x, -BOUND, BOUND)); }

// exp(d) - 1 - d from exp_d = bounded_exp(d), by its series where the difference would cancel.
__device__ double k3_of_minus(double d, double exp_d) {
  const double series = 1 + d * (1.0 / 3) * (1 + d * (1.0 / 4) * (1 + d * (1.0 / 5) * (1 + d * (1.0 / 6))));
  return fabs(d) < 0.01 ? d * d / 2 * series : exp_d - 1 - d;
}

// Raw is float where all columns are, so that nothing is asked of their types; else double.
template <class Raw>
__device__ Raw fetch(const Column& column, int i) {
  if constexpr (sizeof(Raw) == sizeof(float))
    return static_cast<const float*>(column.data)[i];
  else
    return read(column, i);
}

template <class Raw>
__device__ Raw fetch_if(const Column& column, int i) {
  return column.data ? fetch<Raw>(column, i) : Raw(0);
}

// Sum of left - right over a sample: the same bits from a warp and from any block, in any batch.
template <class Raw>
__device__ double gap_sum(const Column& left, const Column& right, Span span, int warps, double* shared) {
  const int lane = threadIdx.x % WARP;
  double mine = 0;  // of run-of-a-warp number `lane`
  for (int j = warps == 1 ? 0 : threadIdx.x / WARP; j < LANES / WARP; j += warps) {
    if (span.start + j * WARP >= span.stop) break;
    double sum = 0;
#pragma unroll 4
    for (int i = span.start + j * WARP + lane; i < span.stop; i += LANES)
      sum += static_cast<double>(fetch<Raw>(left, i)) - static_cast<double>(fetch<Raw>(right, i));
    sum = warp_sum(sum);
    if (warps == 1) {
      if (lane == j) mine = sum;
    } else if (lane == 0) {
      shared[j] = sum;
    }
  }
  if (warps > 1) {
    __syncthreads();
    mine = lane < LANES / WARP && span.start + lane * WARP < span.stop ? shared[lane] : 0;
    __syncthreads();
  }
  return warp_sum(mine);
}

// What all tokens of a sample share.
struct Sample {
  double ratio, gap;     // exponents, where they are of the sample
  double weight, share;  // of a term in the loss; of a term in the block's sum
};

// One token: its derivatives are written, its term and metrics added to `sums`.
template <class Raw>
__device__ void do_token(const PolicyLoss& a, int i, Raw advantage_raw, const Sample& sample, double (&sums)[SUMS]) {
  const Raw lp_raw = fetch<Raw>(a.logprobs, i), old_raw = fetch_if<Raw>(a.old_logprobs, i);
  const Raw ref_raw = fetch_if<Raw>(a.ref_logprobs, i), rollout_raw = fetch_if<Raw>(a.rollout_logprobs, i);
  const Raw entropy_raw = fetch_if<Raw>(a.entropy, i);

  const double advantage = advantage_raw, lp = lp_raw, old = a.old_logprobs.data ? old_raw : lp_raw;
  const double log_ratio = lp - old;
  const double exponent = a.kind == GSPO ? sample.ratio : log_ratio;
  const double ratio = bounded_exp(exponent);
  const double within = clamp(ratio, a.ratio_low, a.ratio_high);
  const bool below = ratio < a.ratio_low, above = ratio > a.ratio_high;

  bool clipped;
  double term, slope;
  if (a.kind == CISPO) {
    clipped = below || above;
    slope = -within * advantage;
    term = slope * lp;
  } else {
    clipped = (below && advantage < 0) || (above && advantage > 0);
    term = -(clipped ? within : ratio) * advantage;
    slope = !clipped && fabs(exponent) <= BOUND ? term : 0;
  }
  double importance = ratio;
  if (a.correction != NONE) {
    const double bare = bounded_exp(a.level == TOKEN ? old - static_cast<double>(rollout_raw) : sample.gap);
    const bool outside = bare < a.correction_low || bare > a.correction_high;
    importance = a.correction == TIS ? clamp(bare, a.correction_low, a.correction_high) : (outside ? 0 : bare);
    term *= importance;
    slope *= importance;
    sums[CORRECTION] += importance;
    sums[CUT] += outside;
  }
  if (a.ref_logprobs.data) {
    const double d = lp - static_cast<double>(ref_raw);
    const double kl = a.kl_kind == K1 ? d : a.kl_kind == K2 ? d * d / 2 : k3_of_minus(-d, bounded_exp(-d));
    sums[KL_REF] += kl;
    if (a.kl_coef != 0) {
      term += a.kl_coef * kl;
      slope += a.kl_coef * d;
    }
  }
  Raw* derivatives = static_cast<Raw*>(a.derivatives);
  if (a.entropy.data) {
    const double entropy = entropy_raw;
    sums[ENTROPY] += entropy;
    if (a.entropy_coef != 0) {
      term -= a.entropy_coef * entropy;
      const double slope_to_entropy = -a.entropy_coef * sample.weight;
      if (sizeof(Raw) == sizeof(float) || a.logprobs.dtype == DOUBLE)
        derivatives[a.count + i] = static_cast<Raw>(slope_to_entropy);
      else
        static_cast<float*>(a.derivatives)[a.count + i] = static_cast<float>(slope_to_entropy);
    }
  }
  if (sizeof(Raw) == sizeof(float) || a.logprobs.dtype == DOUBLE)
    derivatives[i] = static_cast<Raw>(sample.weight * slope);
  else
    static_cast<float*>(a.derivatives)[i] = static_cast<float>(sample.weight * slope);

  sums[LOSS] += term * sample.share;
  sums[RATIO] += ratio;
  sums[CLIPPED] += clipped;
  sums[KL_OLD] += k3_of_minus(log_ratio, a.kind == GSPO ? bounded_exp(log_ratio) : ratio);
  sums[SQUARES] += importance * importance;
}

// Whether a sum can be other than 0: those of columns that were not given are not even added up.
__device__ bool is_used(const PolicyLoss& a, int sum) {
  if (sum == CORRECTION || sum == CUT) return a.correction != NONE;
  if (sum == KL_REF) return a.ref_logprobs.data;
  return sum != ENTROPY || a.entropy.data;
}

// Sums of a block to partials[sum, block].
__device__ void leave_behind(const PolicyLoss& a, const double (&sums)[SUMS], double (*shared)[SUMS]) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int k = 0; k < SUMS; ++k) {
    if (!is_used(a, k)) continue;
    const double sum = warp_sum(sums[k]);
    if (lane == k) shared[warp][k] = sum;
  }
  __syncthreads();
  const int k = threadIdx.x;
  if (k >= SUMS || !is_used(a, k)) return;
  double sum = 0;
  for (int w = 0; w < blockDim.x / WARP; ++w) sum += shared[w][k];
  a.partials[k * gridDim.x + blockIdx.x] = sum;
}

// The last block's work: a warp for each sum, then a thread for each metric.
__device__ void merge(const PolicyLoss& a, double factor, double* totals) {
  const int lane = threadIdx.x % WARP, blocks = gridDim.x;
  for (int k = threadIdx.x / WARP; k < SUMS; k += blockDim.x / WARP) {
    double sum = 0;
    if (is_used(a, k)) {
#pragma unroll 16
      for (int block = lane; block < blocks; block += WARP) sum += a.partials[k * blocks + block];
      sum = warp_sum(sum);
    }
    if (lane == 0) totals[k] = sum;
  }
  __syncthreads();
  const int k = threadIdx.x;
  if (k >= SUMS) return;
  const double tokens = a.count > 1 ? a.count : 1;
  double value = totals[k] / tokens;
  if (k == LOSS) {
    *a.loss = static_cast<float>(totals[LOSS] * factor);
    value = a.count;
  } else if (k == SQUARES) {
    const double first = totals[a.correction == NONE ? RATIO : CORRECTION], second = totals[SQUARES];
    value = second == 0 ? 0 : first * first / (second * tokens);
  }
  a.metrics[k] = static_cast<float>(value);
}

template <class Raw>
__global__ void policy_loss_kernel(const PolicyLoss a, int parts, int warps, unsigned ticket) {
  __shared__ double shared[LANES / WARP][SUMS];
  const bool by_warp = warps == 1;
  const int width = by_warp ? WARP : blockDim.x;
  const int groups = by_warp ? gridDim.x * (blockDim.x / WARP) : gridDim.x / parts;
  const int group = by_warp ? blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP : blockIdx.x / parts;
  const int first = by_warp ? threadIdx.x % WARP : blockIdx.x % parts * width + threadIdx.x;

  double factor = a.scale;
  if (a.total.data) {
    const double total = read(a.total, 0);
    factor = a.scale / (total < 1 ? 1 : total);
  }
  double sums[SUMS] = {};
  for (int sample = group; sample < a.num_samples; sample += groups) {  // all threads of a group agree
    const Span span = span_of(a.cu_loss, sample);
    const bool one_advantage = a.by_sample;
    const Raw of_sample = one_advantage ? fetch<Raw>(a.advantages, sample) : Raw(0);
    const double length = span.stop - span.start > 1 ? span.stop - span.start : 1;
    const double share = a.sample_mean ? 1 / length : 1;
    Sample shares{0, 0, factor * share, share};
    if (a.kind == GSPO && a.old_logprobs.data)
      shares.ratio = gap_sum<Raw>(a.logprobs, a.old_logprobs, span, warps, &shared[0][0]) / length;
    if (a.correction != NONE && a.level != TOKEN) {
      const Column& old = a.old_logprobs.data ? a.old_logprobs : a.logprobs;
      shares.gap = gap_sum<Raw>(old, a.rollout_logprobs, span, warps, &shared[0][0]);
      if (a.level == GEOMETRIC) shares.gap /= length;
    }
    for (int i = span.start + first; i < span.stop; i += parts * width)
      do_token<Raw>(a, i, one_advantage ? of_sample : fetch<Raw>(a.advantages, i), shares, sums);
  }
  leave_behind(a, sums, shared);
  if (comes_last(&tickets[ticket], gridDim.x)) merge(a, factor, &shared[0][0]);
}

bool all_float(const PolicyLoss& a) {
  for (const Column* column :
       {&a.logprobs, &a.entropy, &a.advantages, &a.old_logprobs, &a.ref_logprobs, &a.rollout_logprobs})
    if (column->data && column->dtype != FLOAT) return false;
  return true;
}

}  // namespace

PolicyLossGrid policy_loss_grid(const PolicyLoss& a) {
  const int samples = a.num_samples > 1 ? a.num_samples : 1;
  const int mean = (a.count - 1) / samples + 1;
  if (mean <= 128) {  // a warp for each sample, or for several in turn
    constexpr int in_a_block = THREADS / WARP;
    const int blocks = (samples + in_a_block - 1) / in_a_block;
    return {blocks < BLOCKS ? blocks : BLOCKS, THREADS, 1, 1};
  }
  const bool whole = a.kind == GSPO || (a.correction != NONE && a.level != TOKEN);
  const int threads = whole && mean > 2 * WIDE ? WIDE : THREADS;
  // Each part of a sample sums all of it again, so these are few where a sum is needed.
  int parts = (mean + threads - 1) / threads;
  if (whole && parts > 8) parts = 8;
  if (parts > BLOCKS / samples) parts = BLOCKS / samples > 1 ? BLOCKS / samples : 1;
  const int most = BLOCKS / parts;  // samples at a time
  return {(samples < most ? samples : most) * parts, threads, parts, threads / WARP};
}

int launch_policy_loss(const PolicyLoss& arguments, const PolicyLossGrid& grid, bool captured, Stream stream) {
  static std::atomic<unsigned> eager{0}, kept{0};
  const unsigned ticket = captured ? RING + kept++ % KEPT : eager++ % RING;
  if (all_float(arguments))
    policy_loss_kernel<float><<<grid.blocks, grid.threads, 0, stream>>>(arguments, grid.parts, grid.warps, ticket);
  else
    policy_loss_kernel<double><<<grid.blocks, grid.threads, 0, stream>>>(arguments, grid.parts, grid.warps, ticket);
  return LAST_ERROR();
}

}  // namespace mmpack
