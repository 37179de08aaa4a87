// mmpack::group_advantages and mmpack::scatter_rewards, one launch each.
#include "ops.h"

namespace mmpack {
namespace {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS = WARPS;        // samples of a block, whose groups it looks for: a warp for each
constexpr int TILE = 4 * THREADS;  // samples that are looked at together
constexpr int HELD = 4;            // values of the batch that a thread keeps
constexpr int KEEP = 4 * WARP;     // members of a group that are kept; of larger groups each pass looks again
constexpr int SLOTS = 4 * ROWS;    // of the table of a block's groups
constexpr int SCATTER = 256;       // threads of a block that scatters

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
  return warp_sum(threadIdx.x % WARP < WARPS ? shared[threadIdx.x % WARP] : 0);
}

// The whole batch's values in a block: the first HELD of each thread are kept, the others read again each time.
// weights [count]: how often each counts; nullptr: once.
template <class Value>
struct Batch {
  Value value;
  int count;
  double held[HELD], mean, variance;  // with n - 1

  __device__ Batch(Value value, int count, const double* weights = nullptr) : value(value), count(count) {
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
      const int i = threadIdx.x + j * THREADS;
      held[j] = i < count ? value(i) : 0;
    }
    const auto weight = [&](int i) { return weights ? weights[i] : 1; };
    const double total = weights ? sum([&](int i, double) { return weight(i); }) : count;
    mean = sum([&](int i, double x) { return weight(i) * x; }) / (total > 1 ? total : 1);
    variance = sum([&](int i, double x) { return weight(i) * (x - mean) * (x - mean); }) / (total > 1 ? total - 1 : 1);
  }

  // use(i, x) of each.
  template <class Use>
  __device__ void each(Use use) const {
#pragma unroll
    for (int j = 0; j < HELD; ++j)
      if (threadIdx.x + j * THREADS < count) use(threadIdx.x + j * THREADS, held[j]);
    for (int i = threadIdx.x + HELD * THREADS; i < count; i += THREADS) use(i, value(i));
  }

  template <class Term>
  __device__ double sum(Term term) const {
    double mine = 0;
    each([&](int i, double x) { mine += term(i, x); });
    return block_sum(mine);
  }
};

// The groups of a block's samples: a table by hash of which sample stands for a group, and who its members are.
template <class Group>
struct Groups {
  Group keys[ROWS];
  int table[SLOTS];                 // the sample that stands for a group; -1: none
  Mask members[ROWS][TILE / WARP];  // of the tile at hand, by the sample that stands for them
  int places[ROWS][KEEP];           // of member m at m % KEEP

  __device__ static int slot_of(Group key) {
    const auto wide = static_cast<unsigned long long>(key);
    return (static_cast<unsigned>(wide ^ wide >> 32) * 2654435761u >> 16) % SLOTS;
  }

  __device__ void put(int row) {
    for (int slot = slot_of(keys[row]);; slot = (slot + 1) % SLOTS) {
      const int there = atomicCAS(&table[slot], -1, row);
      if (there == -1 || keys[there] == keys[row]) return;
    }
  }

  __device__ int find(Group key) const {
    for (int slot = slot_of(key);; slot = (slot + 1) % SLOTS) {
      const int there = table[slot];
      if (there == -1 || keys[there] == key) return there;
    }
  }

  // `members` for the tile that starts at `base`.
  __device__ void mark(const Group* groups, int base, int count) {
    const int lane = threadIdx.x % WARP;
    Group key[TILE / THREADS];
#pragma unroll
    for (int j = 0; j < TILE / THREADS; ++j) {
      const int i = base + j * THREADS + threadIdx.x;
      key[j] = groups[i < count ? i : count - 1];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * (TILE / WARP); i += THREADS) (&members[0][0])[i] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < TILE / THREADS; ++j) {
      const int i = j * THREADS + threadIdx.x, row = base + i < count ? find(key[j]) : -1;
      for (Mask rest = BALLOT(row >= 0); rest;) {  // a word of a group is one warp's alone
        const int one = SHUFFLE(row, FIRST_BIT(rest));
        const Mask same = BALLOT(row == one);
        if (lane == 0) members[one][i / WARP] = same;
        rest &= ~same;
      }
    }
    __syncthreads();
  }

  // take(m, i) for each member of this warp's group in the tile, numbered from `size` on; then after(size) each time.
  template <class Take, class After>
  __device__ void each(int base, int& size, Take take, After after) const {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Mask below = (Mask(1) << lane) - 1;
    for (int first = 0; first < TILE / WARP; first += WARP) {
      const Mask word = first + lane < TILE / WARP ? members[warp][first + lane] : 0;
      for (Mask rest = BALLOT(word != 0); rest; rest &= rest - 1) {
        const int at = first + FIRST_BIT(rest);
        const Mask same = members[warp][at];
        if (same >> lane & 1) take(size + COUNT_BITS(same & below), base + at * WARP + lane);
        size += COUNT_BITS(same);
        after(size);
      }
    }
  }
};

// A warp for each sample. One of a group in a block does the whole group, if the group begins in that block. Members are
// numbered in the order of the batch, and member m is added up by lane m % WARP: a group's sums depend on its members
// and their order alone.
template <class Reward, class Group>
__global__ void __launch_bounds__(THREADS)
    advantages_kernel(const Reward* rewards, const Group* groups, const double* tokens, int count, int kind, double eps,
                      double* baselined, float* out, unsigned* ticket) {
  __shared__ Groups<Group> shared;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * ROWS + warp;
  int* places = shared.places[warp];
  for (int i = threadIdx.x; i < SLOTS; i += THREADS) shared.table[i] = -1;
  const int own = blockIdx.x * ROWS + threadIdx.x;
  if (threadIdx.x < ROWS) shared.keys[threadIdx.x] = groups[own < count ? own : count - 1];
  __syncthreads();
  if (threadIdx.x < ROWS && own < count) shared.put(threadIdx.x);
  __syncthreads();
  const bool stands = row < count && shared.find(shared.keys[warp]) == warp;

  // Sum of term(reward) over this warp's group; all warps of the block come here together.
  int size = 0, begins = 0;
  const auto sum = [&](auto term) {
    double mine = 0;
    int done = 0;
    const auto add = [&](int stop) {  // members [done, stop), at most KEEP
      SYNC_WARP();
      Reward found[KEEP / WARP];
      const int first = done + (lane - done % WARP + WARP) % WARP;
#pragma unroll
      for (int j = 0; j < KEEP / WARP; ++j)
        if (first + j * WARP < stop) found[j] = rewards[places[(first + j * WARP) % KEEP]];
#pragma unroll
      for (int j = 0; j < KEEP / WARP; ++j)
        if (first + j * WARP < stop) mine += term(static_cast<double>(found[j]));
      done = stop;
      SYNC_WARP();
    };
    size = 0;
    for (int base = 0; base < count; base += TILE) {
      shared.mark(groups, base, count);
      if (!stands) continue;
      shared.each(
          base, size, [&](int m, int i) { places[m % KEEP] = i; },
          [&](int so_far) {
            if (done == 0) {
              SYNC_WARP();
              begins = places[0];
            }
            if (so_far - done > KEEP - WARP) add(so_far);
          });
    }
    add(size);
    return warp_sum(mine);
  };
  const double mean = sum([](double reward) { return reward; }) / size;
  const bool ours = stands && begins >= blockIdx.x * ROWS;
  const bool again = __syncthreads_or(ours && size > KEEP);
  const double others = size > 1 ? size - 1 : 1;

  double variance = 0;
  if (kind == LITE_PPO) {
    variance = Batch([&](int i) { return static_cast<double>(rewards[i]); }, count).variance;
  } else if (kind == GRPO) {
    const auto square = [&](double reward) { return (reward - mean) * (reward - mean); };
    double squares = 0;
    if (again) {
      squares = sum(square);
    } else if (ours) {
      for (int m = lane; m < size; m += WARP) squares += square(rewards[places[m]]);
      squares = warp_sum(squares);
    }
    variance = squares / others;
  }
  const auto write = [&](int i) {
    const double reward = rewards[i], centred = reward - mean;
    if (kind == REINFORCE_PP)
      baselined[i] = size > 1 ? centred : reward;
    else
      out[i] = static_cast<float>(kind == GRPO || kind == LITE_PPO ? scaled(centred, variance, eps)
                                  : kind == RLOO                   ? centred * size / others
                                                                   : centred);
  };
  if (again) {
    for (int base = 0; base < count; base += TILE) {
      shared.mark(groups, base, count);
      int seen = 0;
      if (ours) shared.each(base, seen, [&](int, int i) { write(i); }, [](int) {});
    }
  } else if (ours) {
    for (int m = lane; m < size; m += WARP) write(places[m]);
  }
  if (kind == REINFORCE_PP && comes_last(ticket, gridDim.x)) {
    const Batch batch([&](int i) { return baselined[i]; }, count, tokens);
    batch.each(
        [&](int i, double x) { out[i] = static_cast<float>(scaled(x - batch.mean, batch.variance, eps)); });
  }
}

// A warp (parts == 0) for each sample, or so many blocks.
template <class Reward, class Offset>
__global__ void scatter_kernel(const Reward* rewards, const Offset* cu_loss, int num_samples, double weight, int at,
                               int parts, float* out) {
  const int width = parts == 0 ? WARP : SCATTER;
  const int sample = parts == 0 ? blockIdx.x * (SCATTER / WARP) + threadIdx.x / WARP : blockIdx.x / parts;
  if (sample >= num_samples) return;
  const Reward reward = rewards[sample];
  const int start = static_cast<int>(cu_loss[sample]), stop = static_cast<int>(cu_loss[sample + 1]);
  double value = reward * weight;
  if (at == MEAN) value /= stop - start;
  const int first = parts == 0 ? threadIdx.x % WARP : blockIdx.x % parts * SCATTER + threadIdx.x;
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

int launch_group_advantages(Column rewards, Column groups, const double* tokens, int32_t count, int32_t kind, double eps,
                            double* baselined, float* out, unsigned* ticket, Stream stream) {
  return typed(rewards, groups, [&](auto* reward, auto* group) {
    advantages_kernel<<<(count - 1) / ROWS + 1, THREADS, 0, stream>>>(
        reward, group, tokens, count, kind, eps, baselined, out, ticket);
  });
}

int launch_scatter_rewards(Column rewards, Column cu_loss, int32_t num_samples, int32_t count, double weight, int32_t at,
                           float* out, Stream stream) {
  const int mean = count / num_samples;
  int parts = 0, blocks = (num_samples + SCATTER / WARP - 1) / (SCATTER / WARP);
  if (mean > 128) {
    const int most = 1024 / num_samples > 1 ? 1024 / num_samples : 1;
    parts = (mean + SCATTER - 1) / SCATTER;
    if (parts > most) parts = most;
    blocks = num_samples * parts;
  }
  return typed(rewards, cu_loss, [&](auto* reward, auto* offsets) {
    scatter_kernel<<<blocks, SCATTER, 0, stream>>>(reward, offsets, num_samples, weight, at, parts, out);
  });
}

}  // namespace mmpack
