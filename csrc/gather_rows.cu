// mmpack::gather_rows and mmpack::sum_rows: rows copied by an index, and summed back by its inverse; one launch each.
#include "ops.h"

namespace mmpack {
namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4;  // words of a thread, and entries of a row, that are read before one is used

struct alignas(16) Word16 {
  uint32_t a, b, c, d;
};

// What a block copies or adds up: `rows` rows of `width` units if they are short, else `rows` == 1 and a part of one.
struct Tiles {
  int64_t count;
  int32_t width, rows, parts;

  Tiles(int64_t count, int64_t width, int each)
      : count(count),
        width(static_cast<int32_t>(width)),
        rows(width >= each ? 1 : static_cast<int32_t>(each / width)),
        parts(width >= each ? static_cast<int32_t>((width - 1) / each + 1) : 1) {}

  int64_t blocks() const { return ((count - 1) / rows + 1) * parts; }
};

// use(row, column) for each of a thread's places in its block's tile, at most EACH of them.
template <int EACH, class Use>
__device__ void each_place(const Tiles& tiles, Use use) {
  const int64_t tile = blockIdx.x;
  const int64_t row = tiles.parts == 1 ? tile * tiles.rows : tile / tiles.parts;
  const int first = tiles.parts == 1 ? 0 : static_cast<int>(tile % tiles.parts) * EACH * THREADS;
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = first + k * THREADS + threadIdx.x;
    const int down = tiles.parts == 1 ? i / tiles.width : 0;
    if (tiles.parts == 1 ? down < tiles.rows && row + down < tiles.count : i < tiles.width)
      use(k, row + down, i - down * tiles.width);
  }
}

template <class Word, class Index>
__global__ void __launch_bounds__(THREADS)
    gather_kernel(const Word* x, const Index* index, Word* out, const Tiles tiles) {
  Word held[AT_ONCE];
  each_place<AT_ONCE>(tiles, [&](int k, int64_t row, int column) {
    held[k] = x[static_cast<int64_t>(index[row]) * tiles.width + column];
  });
  each_place<AT_ONCE>(tiles, [&](int k, int64_t row, int column) { out[row * tiles.width + column] = held[k]; });
}

__device__ float wide(float value) { return value; }
__device__ double wide(double value) { return value; }
__device__ float wide(__half value) { return __half2float(value); }
__device__ float wide(bfloat16 value) { return FROM_BFLOAT16(value); }

__device__ void narrow(float value, float& out) { out = value; }
__device__ void narrow(double value, double& out) { out = value; }
__device__ void narrow(float value, __half& out) { out = __float2half_rn(value); }
__device__ void narrow(float value, bfloat16& out) { out = TO_BFLOAT16(value); }

template <class Value, int N>
struct alignas(sizeof(Value) * N) Values {
  Value at[N];
};

// A thread adds up N values of a row, entry after entry.
template <class Value, int N, class Order, class Offset>
__global__ void __launch_bounds__(THREADS)
    sum_kernel(const Values<Value, N>* values, const Order* order, const Offset* offsets, Values<Value, N>* out,
               const Tiles tiles) {
  each_place<1>(tiles, [&](int, int64_t row, int column) {
    decltype(wide(Value())) total[N] = {};
    const int64_t start = offsets[row], stop = offsets[row + 1];
    for (int64_t first = start; first < stop; first += AT_ONCE) {
      Values<Value, N> held[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        if (first + k < stop) held[k] = values[static_cast<int64_t>(order[first + k]) * tiles.width + column];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        if (first + k < stop)
          for (int j = 0; j < N; ++j) total[j] += wide(held[k].at[j]);
    }
    Values<Value, N> made;
    for (int j = 0; j < N; ++j) narrow(total[j], made.at[j]);
    out[row * tiles.width + column] = made;
  });
}

template <class Word>
int gather(Rows x, Column index, void* out, Stream stream) {
  const Tiles tiles(x.count, x.bytes / static_cast<int64_t>(sizeof(Word)), AT_ONCE * THREADS);
  const auto blocks = static_cast<unsigned>(tiles.blocks());
  const auto* words = static_cast<const Word*>(x.data);
  if (index.dtype == INT32)
    gather_kernel<<<blocks, THREADS, 0, stream>>>(words, static_cast<const int32_t*>(index.data),
                                                  static_cast<Word*>(out), tiles);
  else
    gather_kernel<<<blocks, THREADS, 0, stream>>>(words, static_cast<const int64_t*>(index.data),
                                                  static_cast<Word*>(out), tiles);
  return LAST_ERROR();
}

template <class Value, int N>
int sum(Rows values, Column order, Column offsets, void* out, Stream stream) {
  using Unit = Values<Value, N>;
  const Tiles tiles(values.count, values.bytes / static_cast<int64_t>(sizeof(Unit)), THREADS);
  const auto blocks = static_cast<unsigned>(tiles.blocks());
  const auto with = [&](auto* entries, auto* starts) {
    sum_kernel<<<blocks, THREADS, 0, stream>>>(static_cast<const Unit*>(values.data), entries, starts,
                                               static_cast<Unit*>(out), tiles);
  };
  const auto typed = [&](auto* entries) {
    if (offsets.dtype == INT32)
      with(entries, static_cast<const int32_t*>(offsets.data));
    else
      with(entries, static_cast<const int64_t*>(offsets.data));
  };
  if (order.dtype == INT32)
    typed(static_cast<const int32_t*>(order.data));
  else
    typed(static_cast<const int64_t*>(order.data));
  return LAST_ERROR();
}

template <class Value>
int sum_aligned(Rows values, Column order, Column offsets, void* out, int32_t aligned, Stream stream) {
  if (aligned % 16 == 0) return sum<Value, 16 / sizeof(Value)>(values, order, offsets, out, stream);
  return sum<Value, 1>(values, order, offsets, out, stream);
}

}  // namespace

int launch_gather_rows(Rows x, Column index, void* out, int32_t aligned, Stream stream) {
  switch (aligned) {
    case 16: return gather<Word16>(x, index, out, stream);
    case 8: return gather<uint64_t>(x, index, out, stream);
    case 4: return gather<uint32_t>(x, index, out, stream);
    case 2: return gather<uint16_t>(x, index, out, stream);
    default: return gather<uint8_t>(x, index, out, stream);
  }
}

int launch_sum_rows(Rows values, int32_t dtype, Column order, Column offsets, void* out, int32_t aligned,
                    Stream stream) {
  switch (dtype) {
    case FLOAT: return sum_aligned<float>(values, order, offsets, out, aligned, stream);
    case DOUBLE: return sum_aligned<double>(values, order, offsets, out, aligned, stream);
    case HALF: return sum_aligned<__half>(values, order, offsets, out, aligned, stream);
    default: return sum_aligned<bfloat16>(values, order, offsets, out, aligned, stream);
  }
}

}  // namespace mmpack
