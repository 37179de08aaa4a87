// mmpack::policy_loss in one launch: the loss, its metrics and its derivatives, in float64, no atomics in values.
//
// A group of threads (a warp where samples are short, else a block) sums what the ratio or the correction needs of its
// whole sample, then does its own tokens. The block that finishes last adds up what all blocks left behind, in the
// order of their numbers. What a thread's tokens read is on its way before any of it is waited for.
#include "ops.h"

namespace mmpack {
namespace {

constexpr int THREADS = 256;
constexpr int WIDE = 512;    // where long samples are summed as a whole
constexpr int BLOCKS = 512;  // all run at once
constexpr int AT_ONCE = 2;   // tokens of a thread that are read together
constexpr int LANES = 1024;  // a sample is summed as so many interleaved runs, whoever does it
constexpr double BOUND = 20.0;

// What a kernel is compiled for, besides what every loss has.
enum Part { CORRECTED = 1, REFERENCE = 2, UNCERTAIN = 4, DUAL = 8, EVERY = 15 };

// Sums that can be other than 0: the first so many.
template <int PARTS>
constexpr int SUMS_OF = PARTS & DUAL        ? SUMS
                        : PARTS & UNCERTAIN ? ENTROPY + 1
                        : PARTS & REFERENCE ? KL_REF + 1
                        : PARTS & CORRECTED ? CUT + 1
                                            : SQUARES + 1;

// Comparisons, not fmin and fmax: a NaN stays one.
__device__ double clamp(double x, double low, double high) { return x < low ? low : (x > high ? high : x); }

// Of a logarithm d: exp(d), with d cut to ±BOUND, and exp(d) - 1 - d, which must not cancel.
struct Exp {
  double value, beyond;
};

__device__ Exp exp_of(double d, double) {
  const double value = exp(clamp(d, -BOUND, BOUND));
  const double series = 1 + d * (1.0 / 3) * (1 + d * (1.0 / 4) * (1 + d * (1.0 / 5) * (1 + d * (1.0 / 6))));
  return {value, fabs(d) < 0.01 ? d * d / 2 * series : value - 1 - d};
}

// To 2e-8, for columns that are float themselves: the tail of the series, at most 0.07, is summed in float.
__device__ Exp exp_of(double d, float) {
  const double cut = clamp(d, -BOUND, BOUND);
  const int power = __float2int_rn(static_cast<float>(cut) * 1.44269504f);
  const double rest = fma(static_cast<double>(power), -0.69314718055994531, cut);  // within ±log(2)/2
  const float r = static_cast<float>(rest);
  float tail = 1.0f / 40320;
  tail = fmaf(tail, r, 1.0f / 5040);
  tail = fmaf(tail, r, 1.0f / 720);
  tail = fmaf(tail, r, 1.0f / 120);
  tail = fmaf(tail, r, 1.0f / 24);
  tail = fmaf(tail, r, 1.0f / 6);
  tail = fmaf(tail, r, 0.5f) * r * r;
  const double value = (1 + rest + tail) * __hiloint2double((1023 + power) << 20, 0);
  return {value, power == 0 ? tail : value - 1 - d};
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

// Sums over a sample of logprobs - old_logprobs, and of old_logprobs - rollout_logprobs.
struct Gaps {
  double ratio, rollout;
};

// The same bits from a warp and from any block, in any batch.
template <class Raw, int PARTS>
__device__ Gaps sum_gaps(const PolicyLoss& a, Span span, int warps, double* shared) {
  constexpr int AHEAD = 4, RUNS = LANES / WARP;
  const int lane = threadIdx.x % WARP;
  const bool corrected = PARTS & CORRECTED && a.rollout_logprobs.data;
  Gaps mine{};  // of the warp's run number `lane`
  for (int j = warps == 1 ? 0 : threadIdx.x / WARP; j < RUNS; j += warps) {
    if (span.start + j * WARP >= span.stop) break;
    Gaps sum{};
    for (int i = span.start + j * WARP + lane; i < span.stop; i += AHEAD * LANES) {
      Raw now[AHEAD], old[AHEAD], rollout[AHEAD];
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const int at = i + u * LANES;
        now[u] = at < span.stop ? fetch<Raw>(a.logprobs, at) : Raw(0);
        old[u] = a.old_logprobs.data && at < span.stop ? fetch<Raw>(a.old_logprobs, at) : now[u];
        rollout[u] = corrected && at < span.stop ? fetch<Raw>(a.rollout_logprobs, at) : Raw(0);
      }
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        sum.ratio += static_cast<double>(now[u]) - static_cast<double>(old[u]);
        sum.rollout += static_cast<double>(old[u]) - static_cast<double>(rollout[u]);
      }
    }
    sum = {warp_sum(sum.ratio), corrected ? warp_sum(sum.rollout) : 0};
    if (warps == 1) {
      if (lane == j) mine = sum;
    } else if (lane == 0) {
      shared[j] = sum.ratio;
      shared[RUNS + j] = sum.rollout;
    }
  }
  if (warps > 1) {
    __syncthreads();
    if (lane < RUNS && span.start + lane * WARP < span.stop) mine = {shared[lane], shared[RUNS + lane]};
    __syncthreads();
  }
  return {warp_sum(mine.ratio), corrected ? warp_sum(mine.rollout) : 0};
}

// What all tokens of a sample share.
struct Sample {
  double log_ratio, ratio, importance;  // where they are of the sample
  double weight, share;                 // of a term in the loss; of a term in the block's sum
};

template <class Raw>
struct Token {
  Raw logprob, old, ref, rollout, entropy, advantage;
};

template <class Raw, int PARTS>
__device__ Token<Raw> fetch_token(const PolicyLoss& a, int i, Raw advantage_of_sample) {
  Token<Raw> token;
  token.logprob = fetch<Raw>(a.logprobs, i);
  token.old = a.old_logprobs.data ? fetch<Raw>(a.old_logprobs, i) : token.logprob;
  if (PARTS & REFERENCE) token.ref = fetch_if<Raw>(a.ref_logprobs, i);
  if (PARTS & CORRECTED) token.rollout = fetch_if<Raw>(a.rollout_logprobs, i);
  if (PARTS & UNCERTAIN) token.entropy = fetch_if<Raw>(a.entropy, i);
  token.advantage = a.by_sample ? advantage_of_sample : fetch<Raw>(a.advantages, i);
  return token;
}

// One token: its derivatives are written, its term and metrics added to `sums`.
template <class Raw, int PARTS>
__device__ void do_token(const PolicyLoss& a, int i, const Token<Raw>& token, const Sample& sample,
                         double (&sums)[SUMS]) {
  const double advantage = token.advantage, lp = token.logprob, old = token.old;
  const Exp of_token = exp_of(lp - old, Raw());
  const double exponent = a.kind == GSPO ? sample.log_ratio : lp - old;
  const double ratio = a.kind == GSPO ? sample.ratio : of_token.value;
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
    if (PARTS & DUAL && ratio > a.dual_clip && advantage < 0) {
      term = -a.dual_clip * advantage;
      slope = 0;
      sums[DUAL_CUT] += 1;
    }
  }
  double importance = ratio;
  if (PARTS & CORRECTED && a.correction != NONE) {
    const double bare =
        a.level == TOKEN ? exp_of(old - static_cast<double>(token.rollout), Raw()).value : sample.importance;
    const bool outside = bare < a.correction_low || bare > a.correction_high;
    importance = a.correction == TIS ? clamp(bare, a.correction_low, a.correction_high) : (outside ? 0 : bare);
    term *= importance;
    slope *= importance;
    sums[CORRECTION] += importance;
    sums[CUT] += outside;
  }
  if (PARTS & REFERENCE && a.ref_logprobs.data) {
    const double d = lp - static_cast<double>(token.ref);
    const double kl = a.kl_kind == K1 ? d : a.kl_kind == K2 ? d * d / 2 : exp_of(-d, Raw()).beyond;
    sums[KL_REF] += kl;
    if (a.kl_coef != 0) {
      term += a.kl_coef * kl;
      slope += a.kl_coef * d;
    }
  }
  Raw* derivatives = static_cast<Raw*>(a.derivatives);
  if (PARTS & UNCERTAIN && a.entropy.data) {
    const double entropy = token.entropy;
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
  sums[KL_OLD] += of_token.beyond;
  sums[SQUARES] += importance * importance;
}

// totals[k * stride] = the sum of columns[k], [n], for the first USED, by the block's warps in turn.
template <int USED>
__device__ void sum_columns(const double* columns, int n, double* totals, int stride) {
  constexpr int TURNS = (USED + THREADS / WARP - 1) / (THREADS / WARP);  // of a warp of the smallest block
  constexpr int AHEAD = 4;
  const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, first = threadIdx.x / WARP;
  double sums[TURNS] = {};
  for (int i = lane; i < n; i += AHEAD * WARP) {
    double got[TURNS][AHEAD];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const int k = first + turn * warps;
        got[turn][u] = k < USED && i + u * WARP < n ? columns[k * n + i + u * WARP] : 0;
      }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) sums[turn] += got[turn][u];
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const double sum = warp_sum(sums[turn]);
    if (first + turn * warps < USED && lane == 0) totals[(first + turn * warps) * stride] = sum;
  }
}

// The last block's work on the sums of all.
__device__ void write_metrics(const PolicyLoss& a, double factor, const double* totals, int used) {
  const int k = threadIdx.x;
  if (k >= SUMS) return;
  const double tokens = a.count > 1 ? a.count : 1;
  const double first = totals[a.correction == NONE ? RATIO : CORRECTION], second = totals[SQUARES];
  double above = k < used ? totals[k] : 0, below = tokens;
  if (k == LOSS) {
    *a.loss = static_cast<float>(above * factor);
    above = a.count * tokens;
  } else if (k == SQUARES) {
    above = first * first;
    below = second == 0 ? 1 : second * tokens;
  }
  a.metrics[k] = static_cast<float>(above / below);
}

template <class Raw, int PARTS>
__global__ void __launch_bounds__(WIDE)
    policy_loss_kernel(const PolicyLoss a, bool whole, int parts, int warps, unsigned* ticket) {
  extern __shared__ double shared[];  // [SUMS, threads]; before that 2 · LANES / WARP
  const bool by_warp = warps == 1;
  const int width = by_warp ? WARP : blockDim.x;
  const int groups = by_warp ? gridDim.x * (blockDim.x / WARP) : gridDim.x / parts;
  const int group = by_warp ? blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP : blockIdx.x / parts;
  const int first = by_warp ? threadIdx.x % WARP : blockIdx.x % parts * width + threadIdx.x;
  const int step = parts * width;

  double factor = a.scale;
  if (a.total.data) {
    const double total = read(a.total, 0);
    factor = a.scale / (total < 1 ? 1 : total);
  }
  double sums[SUMS] = {};
  for (int sample = group; sample < a.num_samples; sample += groups) {  // all threads of a group agree
    const Span span = span_of(a.cu_loss, sample);
    const Raw advantage = a.by_sample ? fetch<Raw>(a.advantages, sample) : Raw(0);
    const double length = span.stop - span.start > 1 ? span.stop - span.start : 1;
    const double share = a.sample_mean ? 1 / length : 1;
    Sample shares{0, 1, 1, factor * share, share};
    if (whole) {
      const Gaps gaps = sum_gaps<Raw, PARTS>(a, span, warps, shared);
      shares.log_ratio = gaps.ratio / length;
      shares.ratio = exp_of(shares.log_ratio, Raw()).value;
      shares.importance = exp_of(a.level == GEOMETRIC ? gaps.rollout / length : gaps.rollout, Raw()).value;
    }
    for (int i = span.start + first; i < span.stop; i += AT_ONCE * step) {
      Token<Raw> tokens[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (i + j * step < span.stop) tokens[j] = fetch_token<Raw, PARTS>(a, i + j * step, advantage);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (i + j * step < span.stop) do_token<Raw, PARTS>(a, i + j * step, tokens[j], shares, sums);
    }
  }
  constexpr int USED = SUMS_OF<PARTS>;
#pragma unroll
  for (int k = 0; k < USED; ++k) shared[k * blockDim.x + threadIdx.x] = sums[k];
  __syncthreads();
  sum_columns<USED>(shared, blockDim.x, a.partials + blockIdx.x, gridDim.x);
  if (!comes_last(ticket, gridDim.x)) return;
  sum_columns<USED>(a.partials, gridDim.x, shared, 1);
  __syncthreads();
  write_metrics(a, factor, shared, USED);
}

bool all_float(const PolicyLoss& a) {
  for (const Column* column :
       {&a.logprobs, &a.entropy, &a.advantages, &a.old_logprobs, &a.ref_logprobs, &a.rollout_logprobs})
    if (column->data && column->dtype != FLOAT) return false;
  return true;
}

// Whether the ratio or the correction is of a whole sample.
bool sums_whole_samples(const PolicyLoss& a) {
  return (a.kind == GSPO && a.old_logprobs.data) || (a.correction != NONE && a.level != TOKEN);
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
  const bool whole = sums_whole_samples(a);
  const int threads = whole && mean > 2 * WIDE ? WIDE : THREADS;
  // Each part of a sample sums all of it again, so these are few where a sum is needed.
  int parts = (mean + threads - 1) / threads;
  if (whole && parts > 8) parts = 8;
  if (parts > BLOCKS / samples) parts = BLOCKS / samples > 1 ? BLOCKS / samples : 1;
  const int most = BLOCKS / parts;  // samples at a time
  return {(samples < most ? samples : most) * parts, threads, parts, threads / WARP};
}

int launch_policy_loss(const PolicyLoss& arguments, const PolicyLossGrid& grid, unsigned* ticket, Stream stream) {
  using Kernel = void (*)(PolicyLoss, bool, int, int, unsigned*);
  static constexpr Kernel of_floats[] = {
      policy_loss_kernel<float, 0>, policy_loss_kernel<float, 1>, policy_loss_kernel<float, 2>,
      policy_loss_kernel<float, 3>, policy_loss_kernel<float, 4>, policy_loss_kernel<float, 5>,
      policy_loss_kernel<float, 6>, policy_loss_kernel<float, 7>};
  const int given = (arguments.correction != NONE ? CORRECTED : 0) | (arguments.ref_logprobs.data ? REFERENCE : 0) |
                    (arguments.entropy.data ? UNCERTAIN : 0);
  const bool dual = arguments.dual_clip < INFINITY, floats = all_float(arguments);
  const Kernel with_all = floats ? Kernel(policy_loss_kernel<float, EVERY>) : Kernel(policy_loss_kernel<double, EVERY>);
  const Kernel kernel = dual || !floats ? with_all : of_floats[given];
  const size_t shared = sizeof(double) * (dual || !floats ? SUMS : DUAL_CUT) * grid.threads;
  kernel<<<grid.blocks, grid.threads, shared, stream>>>(
      arguments, sums_whole_samples(arguments), grid.parts, grid.warps, ticket);
  return LAST_ERROR();
}

}  // namespace mmpack
