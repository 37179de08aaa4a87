// mmpack::pack_video and its reverse, of bytes. A block has a tile, some neighbouring tokens: their bytes change their
// order in shared memory, four pixels or two at a time, so that device memory is read and written in long runs on both
// sides.
#include <type_traits>

#include "ops.h"

namespace mmpack {
namespace {

constexpr int THREADS = 256;
constexpr int BLOCKS = 5;             // on an SM, by their registers
constexpr int TILE_BYTES = 6 * 4096;  // at most, but for a single token
constexpr int AT_ONCE = 4;            // units of a thread that are on their way before one is used
constexpr int CHANNELS = 3;

// n / by where n * by < 2^32 and by > 1
struct Divisor {
  uint32_t by, magic;
  explicit Divisor(int by)
      : by(by), magic(static_cast<uint32_t>(((uint64_t{1} << 32) + by - 1) / static_cast<uint64_t>(by))) {}
  __device__ int of(int n) const { return static_cast<int>(__umulhi(static_cast<uint32_t>(n), magic)); }
};

// A token's bytes: in frames [slot, (channel,) y, x (, channel)], in rows [down, across, channel, slot, y, x].
// A line is of all channels.
struct Token {
  Divisor patch, height, quads;  // pixels down a patch, and down the token; four bytes of a channel of a patch
  int merge, side, temporal, bytes, plane;  // plane: bytes of a channel of a patch
  bool last;

  Token(int patch, int merge, int temporal, bool last)
      : patch(patch),
        height(patch * merge),
        quads(temporal * patch * patch / 4),
        merge(merge),
        side(patch * merge),
        temporal(temporal),
        bytes(temporal * CHANNELS * side * side),
        plane(temporal * patch * patch),
        last(last) {}

  __device__ int lines() const { return temporal * side; }

  // Where line y of a slot starts in rows, and pixel x behind that.
  __device__ int in_rows(int slot, int y) const {
    const int size = static_cast<int>(patch.by), down = patch.of(y);
    return down * merge * CHANNELS * plane + (slot * size + y - down * size) * size;
  }
  __device__ int behind(int x) const {
    const int size = static_cast<int>(patch.by), across = patch.of(x);
    return across * CHANNELS * plane + x - across * size;
  }
};

struct Tiles {
  const int64_t *shifts, *patches;
  const int32_t* blocks;
  int64_t tokens;
  int each;  // tokens of a tile
  Token token;

  explicit Tiles(const PatchTables& tables)
      : shifts(tables.shifts),
        patches(tables.patches),
        blocks(tables.blocks),
        tokens(tables.tokens),
        each(1),
        token(tables.patch, tables.merge, tables.temporal, tables.last) {
    while (2 * each * token.bytes <= TILE_BYTES && each * token.side <= THREADS) each *= 2;  // a unit for each thread
  }

  __host__ __device__ int64_t count() const { return (tokens - 1) / each + 1; }
  __device__ int tokens_of(int64_t tile) const {
    return static_cast<int>(min(static_cast<int64_t>(each), tokens - tile * each));
  }
};

__host__ __device__ int padded(int bytes) { return (bytes + 15) / 16 * 16; }

// Of a token's slot: where its first byte is; whether it counts, and not only repeats the slot before.
struct Slot {
  uint8_t* at;
  int64_t plane;  // bytes from plane to plane
  int across;     // and from line to line
  bool counts;
  __device__ uint8_t* line(int y) const { return IN_DEVICE_MEMORY(at) + static_cast<int64_t>(y) * across; }
};

__device__ Slot slot_of(const Tiles& tiles, int64_t token, int f, uint8_t* frames, bool repeat) {
  const int32_t* block = tiles.blocks + 4 * token;
  const int slots = tiles.token.temporal, step = tiles.token.last ? CHANNELS : 1;
  const int64_t* entry = tiles.patches + static_cast<int64_t>(block[0]) * (4 + slots);
  const int64_t start = entry[4 + f], width = entry[2] * tiles.token.patch.by;
  Slot slot;
  slot.at = frames + start + (block[2] * width + block[3]) * step;
  if (tiles.shifts != nullptr) slot.at += tiles.shifts[entry[3]];
  slot.across = static_cast<int>(width * step);
  slot.plane = tiles.token.last ? 0 : entry[1] * tiles.token.patch.by * width;
  slot.counts = repeat || f == 0 || entry[3 + f] != start;
  return slot;
}

// A tile, as its block sees it. Its slots are in shared memory.
struct Tile {
  const Tiles& all;
  Slot* slots;
  int64_t number;
  int tokens;

  __device__ Tile(const Tiles& all, uint8_t* memory)
      : all(all), slots(reinterpret_cast<Slot*>(memory)), number(blockIdx.x), tokens(all.tokens_of(number)) {}

  __device__ int bytes() const { return tokens * all.token.bytes; }
  __device__ int64_t first_byte() const { return number * all.each * all.token.bytes; }

  // Behind a barrier they are there.
  __device__ void look_up(uint8_t* frames, bool repeat) const {
    const int temporal = all.token.temporal;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * temporal; i += THREADS) {
      const int g = i / temporal;
      slots[i] = slot_of(all, number * all.each + g, i - g * temporal, frames, repeat);
    }
  }
};

// A thread's units, `each` of a line of a token. Units of neighbouring tokens lie together: neighbouring threads take
// them; a thread goes on to other lines.
struct Walk {
  int token, unit, line, lines, total;

  __device__ Walk(const Tile& tile, int each) {
    const int row = each * tile.all.each;
    lines = max(1, THREADS / row);
    line = threadIdx.x / row;
    const int i = threadIdx.x - line * row;
    token = i / each;
    unit = i - token * each;
    total = tile.all.token.lines();
    if (line >= lines || token >= tile.tokens) line = total;
  }
};

// Line i of a token.
struct Line {
  int slot, y;
  __device__ Line(const Token& token, int i) : slot(token.height.of(i)), y(i - slot * token.side) {}
};

// Channels of pixels: as bytes of words, and as they lie, channels last.
struct Pixels {
  uint32_t w[CHANNELS];
};
__device__ Pixels by_channel(const Pixels& p) {
  return {{__byte_perm(__byte_perm(p.w[0], p.w[1], 0x0630), p.w[2], 0x5210),
           __byte_perm(__byte_perm(p.w[0], p.w[1], 0x0741), p.w[2], 0x6210),
           __byte_perm(__byte_perm(p.w[0], p.w[1], 0x0052), p.w[2], 0x7410)}};
}
__device__ Pixels by_pixel(const Pixels& p) {
  return {{__byte_perm(__byte_perm(p.w[0], p.w[1], 0x1040), p.w[2], 0x3410),
           __byte_perm(__byte_perm(p.w[0], p.w[1], 0x6205), p.w[2], 0x3250),
           __byte_perm(__byte_perm(p.w[0], p.w[1], 0x0730), p.w[2], 0x7216)}};
}

// A unit is four pixels, and two where words of 4 bytes are not aligned; its bytes of all channels, in frames.
template <class Word>
constexpr int PIXELS = sizeof(Word) == 4 ? 4 : 2;

// COUNT bytes from the `start`th of a unit on.
template <class Word, int COUNT>
__device__ void read(const uint8_t* at, uint32_t (&words)[CHANNELS], int start) {
#pragma unroll
  for (int i = 0; i < COUNT; i += sizeof(Word)) {
    const uint32_t word = *reinterpret_cast<const Word*>(at + i);
    words[(start + i) / 4] |= word << (8 * ((start + i) % 4));
  }
}
template <class Word, int COUNT>
__device__ void write(uint8_t* at, const uint32_t (&words)[CHANNELS], int start) {
#pragma unroll
  for (int i = 0; i < COUNT; i += sizeof(Word))
    *reinterpret_cast<Word*>(at + i) = static_cast<Word>(words[(start + i) / 4] >> (8 * ((start + i) % 4)));
}

// Unit `unit` of a line of frames, or of three, one a channel, as it lies there.
template <class Word, bool LAST>
__device__ Pixels read_unit(const uint8_t* line, int64_t plane, int unit) {
  constexpr int PX = PIXELS<Word>;
  Pixels p{};
  if constexpr (LAST) {
    read<Word, CHANNELS * PX>(line + unit * CHANNELS * PX, p.w, 0);
  } else {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) read<Word, PX>(line + c * plane + unit * PX, p.w, 4 * c);
  }
  return p;
}
template <class Word, bool LAST>
__device__ void write_unit(uint8_t* line, int64_t plane, int unit, const Pixels& p) {
  constexpr int PX = PIXELS<Word>;
  if constexpr (LAST) {
    write<Word, CHANNELS * PX>(line + unit * CHANNELS * PX, p.w, 0);
  } else {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) write<Word, PX>(line + c * plane + unit * PX, p.w, 4 * c);
  }
}

// Where a thread's units go in rows in shared memory: two pixels of a row of a patch lie together, four mostly not.
template <class Word>
struct Place {
  int low, high, plane;
  bool whole;

  __device__ Place(const Token& token, int unit)
      : low(token.behind(unit * PIXELS<Word>)),
        high(token.behind(unit * PIXELS<Word> + 2)),
        plane(token.plane),
        whole(PIXELS<Word> == 4 && token.patch.by % 4 == 0) {}

  __device__ void put(uint8_t* at, const Pixels& p) const {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c, at += plane) {
      if (whole) {
        *reinterpret_cast<uint32_t*>(at + low) = p.w[c];
      } else {
        *reinterpret_cast<uint16_t*>(at + low) = static_cast<uint16_t>(p.w[c]);
        if (PIXELS<Word> == 4) *reinterpret_cast<uint16_t*>(at + high) = static_cast<uint16_t>(p.w[c] >> 16);
      }
    }
  }
  __device__ Pixels get(const uint8_t* at) const {
    Pixels p;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c, at += plane) {
      if (whole) {
        p.w[c] = *reinterpret_cast<const uint32_t*>(at + low);
      } else {
        p.w[c] = *reinterpret_cast<const uint16_t*>(at + low);
        if (PIXELS<Word> == 4) p.w[c] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(at + high)) << 16;
      }
    }
    return p;
  }
};

// first(i, k) of AT_ONCE of the walk's lines and then second(i, k) of those that there are: the first loads, without a
// branch, and nothing waits for it before the second.
template <class First, class Second>
__device__ void in_batches(const Walk& walk, First first, Second second) {
  for (int start = walk.line; start < walk.total; start += AT_ONCE * walk.lines) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) first(min(start + k * walk.lines, walk.total - 1), k);
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
      if (start + k * walk.lines < walk.total) second(start + k * walk.lines, k);
  }
}

// Frames' lines to rows in shared memory; zeros for a slot that does not count.
template <class Word, bool LAST>
__device__ void lines_to_rows(const Tile& tile, uint8_t* rows) {
  const Token& token = tile.all.token;
  const Walk walk(tile, token.side / PIXELS<Word>);
  const Place<Word> place(token, walk.unit);
  const Slot* slots = tile.slots + walk.token * token.temporal;
  uint8_t* to = rows + walk.token * token.bytes;
  Pixels held[AT_ONCE];
  const auto read = [&](int i, int k) {
    const Line line(token, i);
    const Slot& slot = slots[line.slot];
    held[k] = read_unit<Word, LAST>(slot.line(line.y), slot.plane, walk.unit);
  };
  const auto write = [&](int i, int k) {
    const Line line(token, i);
    const Pixels p = slots[line.slot].counts ? held[k] : Pixels{};
    place.put(to + token.in_rows(line.slot, line.y), LAST ? by_channel(p) : p);
  };
  in_batches(walk, read, write);
}

// Rows in shared memory to lines. at(token, i, slot, y): line i of it.
template <class Word, bool LAST, class At>
__device__ void rows_to_lines(const Tile& tile, const uint8_t* rows, At at) {
  const Token& token = tile.all.token;
  const Walk walk(tile, token.side / PIXELS<Word>);
  const Place<Word> place(token, walk.unit);
  const Slot* slots = tile.slots + walk.token * token.temporal;
  const uint8_t* from = rows + walk.token * token.bytes;
  Pixels held[AT_ONCE];
  const auto read = [&](int i, int k) {
    const Line line(token, i);
    held[k] = place.get(from + token.in_rows(line.slot, line.y));
  };
  const auto write = [&](int i, int k) {
    const Line line(token, i);
    const Slot& slot = slots[line.slot];
    const Pixels p = LAST ? by_pixel(held[k]) : held[k];
    if (slot.counts) write_unit<Word, LAST>(at(walk.token, i, slot, line.y), slot.plane, walk.unit, p);
  };
  in_batches(walk, read, write);
}

// Lines in shared memory, channels last, to those of frames.
template <class Word>
__device__ void write_lines(const Tile& tile, const uint8_t* lines) {
  const Token& token = tile.all.token;
  const int words = CHANNELS * token.side / static_cast<int>(sizeof(Word));
  const int most = max(1, THREADS / tile.all.each);  // words of a line that threads write at once
  for (int start = 0; start < words; start += most) {
    const Walk walk(tile, min(words - start, most));
    const Slot* slots = tile.slots + walk.token * token.temporal;
    const Word* from = reinterpret_cast<const Word*>(lines) + walk.token * words + start + walk.unit;
    Word held[AT_ONCE];
    const auto read = [&](int i, int k) { held[k] = from[i * tile.all.each * words]; };
    const auto write = [&](int i, int k) {
      const Line line(token, i);
      const Slot& slot = slots[line.slot];
      if (slot.counts) reinterpret_cast<Word*>(slot.line(line.y))[start + walk.unit] = held[k];
    };
    in_batches(walk, read, write);
  }
}

// use(a word of `aligned` bytes)
template <class Use>
__device__ void as_words(int aligned, Use use) {
  switch (aligned) {
    case 4: return use(uint32_t());
    case 2: return use(uint16_t());
    default: return use(uint8_t());
  }
}

template <class Value, int N>
struct alignas(sizeof(Value) * N) Values {
  Value at[N];
};

// What becomes of bytes of one channel, in float32.
template <Change CHANGE>
struct Changed {
  float mean, std, inverse, scale;
  __device__ float operator()(uint32_t byte) const {
    float x = static_cast<float>(byte);
    if (CHANGE == RESCALE) x *= scale;
    if (CHANGE == NORMALISE) x = (x - mean) / std;
    if (CHANGE == NORMALISE_BYTES) {  // the bits of that division
      x -= mean;
      const float near = x * inverse;
      x = fmaf(fmaf(-near, std, x), inverse, near);
    }
    return x;
  }
};

template <Change CHANGE, class Out>
__device__ void write_changed(const Token& token, const uint8_t* from, int bytes, const Numbers& numbers, Out* to) {
  const int plane = static_cast<int>(token.quads.by), patches = bytes / 4 / (plane * CHANNELS);
#pragma unroll 2
  for (int i = threadIdx.x; i < patches * plane; i += THREADS) {
    const int at = i + token.quads.of(i) * (CHANNELS - 1) * plane;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const Changed<CHANGE> how{numbers.mean[c], numbers.std[c], numbers.inverse[c], numbers.scale};
      const uint32_t word = reinterpret_cast<const uint32_t*>(from)[at + c * plane];
      Values<Out, 4> made;
#pragma unroll
      for (int j = 0; j < 4; ++j) narrow(how(word >> (8 * j) & 255), made.at[j]);
      write_streaming(reinterpret_cast<Values<Out, 4>*>(to) + at + c * plane, made);
    }
  }
}

template <class Out>
__device__ void write_rows(const Token& token, const uint8_t* from, int bytes, const Numbers& numbers, Out* to) {
  switch (numbers.change) {
    case NORMALISE: return write_changed<NORMALISE>(token, from, bytes, numbers, to);
    case NORMALISE_BYTES: return write_changed<NORMALISE_BYTES>(token, from, bytes, numbers, to);
    case RESCALE: return write_changed<RESCALE>(token, from, bytes, numbers, to);
    default: return write_changed<CONVERT>(token, from, bytes, numbers, to);
  }
}

// put(to + i, a word) of `bytes` bytes that lie together; `aligned` divides the addresses and a token's bytes.
template <class Put>
__device__ void copy(const uint8_t* from, int bytes, int aligned, uint8_t* to, Put put) {
  const auto as = [&](auto zero) {
    using Word = decltype(zero);
    const int count = bytes / static_cast<int>(sizeof(Word));
    for (int start = threadIdx.x; start < count; start += AT_ONCE * THREADS) {
      Word held[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        held[k] = reinterpret_cast<const Word*>(from)[min(start + k * THREADS, count - 1)];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k)
        if (start + k * THREADS < count) put(reinterpret_cast<Word*>(to) + start + k * THREADS, held[k]);
    }
  };
  if (aligned == 16)
    as(Values<uint32_t, 4>());
  else
    as_words(min(aligned, 4), as);
}

__device__ void write_rows(const Token& token, const uint8_t* from, int bytes, const Numbers&, uint8_t* to) {
  copy(from, bytes, token.bytes % 16 == 0 ? 16 : 4, to, [](auto* at, auto word) { write_streaming(at, word); });
}

template <class Out>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    pack_kernel(uint8_t* frames, Out* rows, const Tiles tiles, const Numbers numbers, bool repeat, int aligned) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Tile tile(tiles, shared + padded(tiles.each * tiles.token.bytes));
  tile.look_up(frames, repeat);
  __syncthreads();
  as_words(aligned, [&](auto word) {
    using Word = decltype(word);
    if (tiles.token.last)
      lines_to_rows<Word, true>(tile, shared);
    else
      lines_to_rows<Word, false>(tile, shared);
  });
  __syncthreads();
  write_rows(tiles.token, shared, tile.bytes(), numbers, rows + tile.first_byte());
}

__global__ void __launch_bounds__(THREADS, BLOCKS)
    unpack_kernel(const uint8_t* rows, uint8_t* frames, const Tiles tiles, int rows_aligned, int aligned) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int bytes = padded(tiles.each * tiles.token.bytes);
  const bool last = tiles.token.last;
  uint8_t* lines = shared + bytes;
  const Tile tile(tiles, lines + (last ? bytes : 0));
  tile.look_up(frames, false);
  copy(rows + tile.first_byte(), tile.bytes(), rows_aligned, shared, [](auto* at, auto word) { *at = word; });
  __syncthreads();
  as_words(aligned, [&](auto word) {
    using Word = decltype(word);
    if (!last) {
      rows_to_lines<Word, false>(tile, shared, [&](int, int, const Slot& slot, int y) { return slot.line(y); });
    } else {
      rows_to_lines<Word, true>(tile, shared, [&](int g, int i, const Slot&, int) {
        return lines + (i * tiles.each + g) * CHANNELS * tiles.token.side;
      });
      __syncthreads();
      write_lines<Word>(tile, lines);
    }
  });
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), const Tiles& tiles, int copies, Stream stream, Arguments... arguments) {
  const int shared = copies * padded(tiles.each * tiles.token.bytes) +
                     tiles.each * tiles.token.temporal * static_cast<int>(sizeof(Slot));
  if (const int refused = ALLOW_SHARED(kernel, shared)) return refused;
  kernel<<<static_cast<unsigned>(tiles.count()), THREADS, shared, stream>>>(arguments...);
  return LAST_ERROR();
}

}  // namespace

int launch_pack_video(const PatchTables& tables, uint8_t* frames, void* rows, Dtype dtype, const Numbers& numbers,
                      bool repeat, int32_t aligned, Stream stream) {
  const Tiles tiles(tables);
  const auto to = [&](auto* out) {
    using Out = std::remove_pointer_t<decltype(out)>;
    return launch(pack_kernel<Out>, tiles, 1, stream, frames, out, tiles, numbers, repeat, aligned);
  };
  switch (dtype) {
    case BYTE: return to(static_cast<uint8_t*>(rows));
    case HALF: return to(static_cast<__half*>(rows));
    case BFLOAT16: return to(static_cast<bfloat16*>(rows));
    default: return to(static_cast<float*>(rows));
  }
}

int launch_unpack_video(const PatchTables& tables, const uint8_t* rows, uint8_t* frames, int32_t rows_aligned,
                        int32_t aligned, Stream stream) {
  const Tiles tiles(tables);
  return launch(unpack_kernel, tiles, tables.last ? 2 : 1, stream, rows, frames, tiles, rows_aligned, aligned);
}

}  // namespace mmpack
