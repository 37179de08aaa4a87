// mmpack::group_advantages and mmpack::scatter_rewards, one launch each.
#include "ops.h"

#include <atomic>

namespace mmpack {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int TILE = 1024;  // samples held at a time
constexpr int KEEP = 64;    // members of a group that are kept; of larger groups the second pass looks again

__device__ unsigned tickets[RING + KEPT];

__device__ double scaled(double centred, double variance, double eps) {
  const double std = sqrt(variance);
  return std == 0 ? 0 : centred / (std + eps);
}

// Sum over the block, the same bits in all threads and blocks.
__device__ double block_sum(double value) {
  __shared__ double shared[WARPS];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = value;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < WARPS; ++w) sum += shared[w];
  return sum;
}

// Mean and variance (with n - 1) of `value(i)` over the whole batch.
template <class Value>
__device__ void batch_moments(int count, Value value, double& mean, double& variance) {
  double sum = 0, squares = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += THREADS) sum += value(i);
  mean = block_sum(sum) / count;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += THREADS) squares += (value(i) - mean) * (value(i) - mean);
  variance = block_sum(squares) / (count > 1 ? count - 1 : 1);
}

template <class Reward, class Group>
struct Tile {
  Group groups[TILE];
  Reward rewards[TILE];
};

template <class Reward, class Group>
__device__ void load_tile(Tile<Reward, Group>& tile, const Reward* rewards, const Group* groups, int first, int count) {
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < TILE; i += THREADS) {
    if (first + i < count) {
      tile.groups[i] = groups[first + i];
      tile.rewards[i] = rewards[first + i];
    }
  }
  __syncthreads();
}

// The members of a warp's group, handed out in the order of the batch: member m goes to lane m % WARP. So a group's
// sums depend on its members and their order alone, and are the same bits for each of them.
template <class Reward, class Group, class Take>
__device__ void deal(const Tile<Reward, Group>& tile, int first, int count, Group group, int& size, Take take) {
  const int lane = threadIdx.x % WARP;
  const int stop = count - first < TILE ? count - first : TILE;
  for (int base = 0; base < stop; base += WARP) {
    const int i = base + lane;
    const Mask same = BALLOT(i < stop && tile.groups[i < stop ? i : 0] == group);
    if (same == 0) continue;  // as for most: all lanes agree
    const int found = COUNT_BITS(same);
    const int mine = (lane - size % WARP + WARP) % WARP;  // which of those found now is this lane's
    if (mine < found) {
      int bit = mine;
      if (found < WARP) {
        Mask rest = same;
        for (int skipped = 0; skipped < mine; ++skipped) rest &= rest - 1;
        bit = FIRST_BIT(rest);
      }
      take(size + mine, static_cast<double>(tile.rewards[base + bit]));
    }
    size += found;
  }
}

// A warp for ROWS samples: it compares their groups with all of the batch, a tile at a time.
template <int ROWS, class Reward, class Group>
__global__ void advantages_kernel(const Reward* rewards, const Group* groups, int count, int kind, double eps,
                                  double* baselined, float* out, unsigned ticket) {
  __shared__ Tile<Reward, Group> tile;
  __shared__ double kept[WARPS * ROWS][KEEP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int first_row = (blockIdx.x * WARPS + warp) * ROWS;
  Group group[ROWS];
  Reward reward[ROWS];
  int size[ROWS] = {};
  double sum[ROWS] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int i = first_row + row < count ? first_row + row : count - 1;
    group[row] = groups[i];
    reward[row] = rewards[i];
  }
  for (int first = 0; first < count; first += TILE) {
    load_tile(tile, rewards, groups, first, count);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      deal(tile, first, count, group[row], size[row], [&](int m, double value) {
        sum[row] += value;
        if (m < KEEP) kept[warp * ROWS + row][m] = value;
      });
  }
  double mean[ROWS], squares[ROWS] = {};
  bool again = false;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    mean[row] = warp_sum(sum[row]) / size[row];
    again |= size[row] > KEEP;
    for (int m = lane; m < size[row] && m < KEEP; m += WARP) {  // a lane's own
      const double distance = kept[warp * ROWS + row][m] - mean[row];
      squares[row] += distance * distance;
    }
  }
  if (kind == GRPO) {
    if (__syncthreads_or(again)) {
      int seen[ROWS] = {};
      for (int first = 0; first < count; first += TILE) {
        load_tile(tile, rewards, groups, first, count);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          deal(tile, first, count, group[row], seen[row], [&](int m, double value) {
            if (m >= KEEP) squares[row] += (value - mean[row]) * (value - mean[row]);
          });
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) squares[row] = warp_sum(squares[row]);
  }
  double batch_mean, batch_variance = 0;
  if (kind == LITE_PPO)
    batch_moments(count, [&](int i) { return static_cast<double>(rewards[i]); }, batch_mean, batch_variance);

#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int i = first_row + row;
    if (lane != 0 || i >= count) continue;
    const double mine = reward[row], centred = mine - mean[row];
    const double others = size[row] > 1 ? size[row] - 1 : 1;
    if (kind == REINFORCE_PP)
      baselined[i] = size[row] > 1 ? centred : mine;
    else
      out[i] = static_cast<float>(kind == GRPO       ? scaled(centred, squares[row] / others, eps)
                                  : kind == RLOO     ? centred * size[row] / others
                                  : kind == LITE_PPO ? scaled(centred, batch_variance, eps)
                                                     : centred);
  }
  if (kind == REINFORCE_PP && comes_last(&tickets[ticket], gridDim.x)) {
    batch_moments(count, [&](int i) { return baselined[i]; }, batch_mean, batch_variance);
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += THREADS)
      out[i] = static_cast<float>(scaled(baselined[i] - batch_mean, batch_variance, eps));
  }
}

// A warp (parts == 0) for each sample, or so many blocks.
template <class Reward, class Offset>
__global__ void scatter_kernel(const Reward* rewards, const Offset* cu_loss, int num_samples, double weight, int at,
                               int parts, float* out) {
  const int width = parts == 0 ? WARP : THREADS;
  const int sample = parts == 0 ? blockIdx.x * WARPS + threadIdx.x / WARP : blockIdx.x / parts;
  if (sample >= num_samples) return;
  const Reward reward = rewards[sample];
  const int start = static_cast<int>(cu_loss[sample]), stop = static_cast<int>(cu_loss[sample + 1]);
  double value = reward * weight;
  if (at == MEAN) value /= stop - start;
  const int first = parts == 0 ? threadIdx.x % WARP : blockIdx.x % parts * THREADS + threadIdx.x;
  for (int i = start + first; i < stop; i += (parts == 0 ? 1 : parts) * width)
    out[i] = at == LAST && i != stop - 1 ? 0.0f : static_cast<float>(value);
}

// Calls launch(rewards, index) with pointers of the columns' types: float or double, int32 or int64.
template <class Launch>
int typed(const Column& rewards, const Column& index, Launch launch) {
  const auto with = [&](auto* reward) {
    if (index.dtype == INT32)
      launch(reward, static_cast<const int32_t*>(index.data));
    else
      launch(reward, static_cast<const int64_t*>(index.data));
  };
  if (rewards.dtype == FLOAT)
    with(static_cast<const float*>(rewards.data));
  else
    with(static_cast<const double*>(rewards.data));
  return LAST_ERROR();
}

}  // namespace

int launch_group_advantages(Column rewards, Column groups, int32_t count, int32_t kind, double eps, double* baselined,
                            float* out, bool captured, Stream stream) {
  static std::atomic<unsigned> eager{0}, kept{0};
  const unsigned ticket = captured ? RING + kept++ % KEPT : eager++ % RING;
  return typed(rewards, groups, [&](auto* reward, auto* group) {
    if (count <= 1024)
      advantages_kernel<1><<<(count + WARPS - 1) / WARPS, THREADS, 0, stream>>>(
          reward, group, count, kind, eps, baselined, out, ticket);
    else
      advantages_kernel<4><<<(count + WARPS * 4 - 1) / (WARPS * 4), THREADS, 0, stream>>>(
          reward, group, count, kind, eps, baselined, out, ticket);
  });
}

int launch_scatter_rewards(Column rewards, Column cu_loss, int32_t num_samples, int32_t count, double weight, int32_t at,
                           float* out, Stream stream) {
  const int mean = count / num_samples;
  int parts = 0, blocks = (num_samples + WARPS - 1) / WARPS;
  if (mean > 128) {
    const int most = 1024 / num_samples > 1 ? 1024 / num_samples : 1;
    parts = (mean + THREADS - 1) / THREADS;
    if (parts > most) parts = most;
    blocks = num_samples * parts;
  }
  return typed(rewards, cu_loss, [&](auto* reward, auto* offsets) {
    scatter_kernel<<<blocks, THREADS, 0, stream>>>(reward, offsets, num_samples, weight, at, parts, out);
  });
}

}  // namespace mmpack
