// mmpack::gather_rows: rows copied by an index, in one launch.
#include "ops.h"

namespace mmpack {
namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4;  // words of a thread that are read before one is written

struct alignas(16) Word16 {
  uint32_t a, b, c, d;
};

// What a block copies: `rows` rows of `width` units if they are short, else `rows` == 1 and a part of one.
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

// use(k, row, column) for each of a thread's places in its block's tile, at most AT_ONCE of them.
template <class Use>
__device__ void each_place(const Tiles& tiles, Use use) {
  const int64_t tile = blockIdx.x;
  const int64_t row = tiles.parts == 1 ? tile * tiles.rows : tile / tiles.parts;
  const int first = tiles.parts == 1 ? 0 : static_cast<int>(tile % tiles.parts) * AT_ONCE * THREADS;
#pragma unroll
  for (int k = 0; k < AT_ONCE; ++k) {
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
  each_place(tiles, [&](int k, int64_t row, int column) {
    held[k] = x[static_cast<int64_t>(index[row]) * tiles.width + column];
  });
  each_place(tiles, [&](int k, int64_t row, int column) { out[row * tiles.width + column] = held[k]; });
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

}  // namespace mmpack
