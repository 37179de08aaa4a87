// mmpack::pack_video and its reverse, of bytes. A block has a tile, some neighbouring tokens: their bytes change their
// order in shared memory, four pixels at a time where addresses allow it, so that device memory is read and written in
// long runs on both sides.
#include <type_traits>

#include "ops.h"

namespace mmpack {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int TILE_BYTES = 6 * 4096;  // at most, but for a single token, where Shape does not say
constexpr int COPY_AT_ONCE = 5;       // words of a thread that are on their way before one is used
constexpr int TOKENS_APART = 32;      // bytes between tokens in shared memory
constexpr int CHANNELS = 3;

// What was measured to suit a kernel: tokens of a tile, blocks on an SM, by their registers, and lines of a lane that
// are on their way before one is used. `size`: of patches that kernels know, or 0; `bytes`: of a value of rows.
struct Shape {
  int tokens, blocks, at_once;
};
__host__ __device__ constexpr Shape packing(int size, int bytes) {
  if (size == 0) return {0, 4, 4};
  if (bytes == 4) return {4, 3, 14};
  return size == 14 ? Shape{8, 3, 14} : Shape{4, 5, 4};
}
__host__ __device__ constexpr Shape unpacking(int size) {
  if (size == 0) return {0, 4, 2};
  return size == 14 ? Shape{8, 4, 2} : Shape{4, 5, 2};
}

__host__ __device__ int over(int n, int by) {  // of numbers that are not negative
  return static_cast<int>(static_cast<uint32_t>(n) / static_cast<uint32_t>(by));
}

// A token's bytes: in frames [slot, (channel,) y, x (, channel)], in rows [patch (down, across), channel, slot, y, x].
// A line is of all channels. In shared memory patches and tokens stand apart, so that the units of a line of whole
// tokens lie in different banks. SIZE: pixels down and across a patch, where a token is of 2 x 2 patches and 2 slots; 0:
// as told. TOKENS: of a tile; 0: as many as TILE_BYTES hold, a power of two.
template <int SIZE, int TOKENS>
struct Token {
  int told_size, told_merge, told_temporal;
  bool last;

  __host__ __device__ int size() const { return SIZE ? SIZE : told_size; }
  __host__ __device__ int merge() const { return SIZE ? 2 : told_merge; }
  __host__ __device__ int temporal() const { return SIZE ? 2 : told_temporal; }
  __host__ __device__ int side() const { return size() * merge(); }
  __host__ __device__ int patches() const { return merge() * merge(); }
  __host__ __device__ int plane() const { return temporal() * size() * size(); }  // bytes of a channel of a patch
  __host__ __device__ int patch() const { return CHANNELS * plane(); }
  __host__ __device__ int bytes() const { return patches() * patch(); }
  __host__ __device__ int patch_stride() const { return (patch() + 15) / 16 * 16 | 16; }
  __host__ __device__ int stride() const { return patches() * patch_stride() + TOKENS_APART; }
  __host__ __device__ int of_tile() const {  // tokens
    if (TOKENS) return TOKENS;
    int tokens = 1;
    while (2 * tokens * bytes() <= TILE_BYTES) tokens *= 2;
    return tokens;
  }

  // Where line y of a slot starts in shared memory, pixel x behind that, and patch n of a tile.
  __device__ int of_line(int slot, int y) const {
    const int down = SIZE ? y >= SIZE : over(y, size());
    return down * (merge() * patch_stride() - size() * size()) + (slot * size() + y) * size();
  }
  __device__ int of_pixel(int x) const {
    const int across = over(x, size());
    return across * patch_stride() + x - across * size();
  }
  __device__ int of_patch(int n) const { return n * patch_stride() + over(n, patches()) * TOKENS_APART; }
};

template <int SIZE, int TOKENS>
struct Tiles {
  const int64_t *shifts, *patches;
  const int32_t* blocks;
  int64_t tokens;
  Token<SIZE, TOKENS> token;

  explicit Tiles(const PatchTables& tables)
      : shifts(tables.shifts),
        patches(tables.patches),
        blocks(tables.blocks),
        tokens(tables.tokens),
        token{tables.patch, tables.merge, tables.temporal, tables.last} {}

  int64_t count() const { return (tokens - 1) / token.of_tile() + 1; }
  int shared() const { return token.of_tile() * token.stride(); }

  __device__ int64_t first_byte() const { return static_cast<int64_t>(blockIdx.x) * token.of_tile() * token.bytes(); }
  __device__ int64_t first_token() const { return static_cast<int64_t>(blockIdx.x) * token.of_tile(); }
  __device__ int tile_tokens() const {
    return static_cast<int>(min(static_cast<int64_t>(token.of_tile()), tokens - first_token()));
  }
  __device__ int tile_patches() const { return tile_tokens() * token.patches(); }
};

// A unit: as many pixels as a word of frames has bytes.
template <class Word>
constexpr int PIXELS = sizeof(Word);

// What a lane has of its block's tile: a unit of a token, in every `step`th line of a slot.
struct Lane {
  int slot, line, step;
  int token, unit;  // of the tile, of the token
  bool there;       // or idle
};

// Neighbouring lanes that have a line: of whole tokens, where a warp is wide enough for one.
template <class Word, int SIZE, int TOKENS>
__device__ int whole_tokens(const Token<SIZE, TOKENS>& token) {
  const int units = token.side() / PIXELS<Word>;
  int lanes = min(units, WARP);
  while (2 * lanes <= min(token.of_tile() * units, WARP)) lanes *= 2;
  return lanes;
}

// use(lane), in which all lanes of all warps take the same branches. `lanes` neighbours have units of one line, side by
// side: a strip.
template <class Word, int SIZE, int TOKENS, class Use>
__device__ void each_lane(const Tiles<SIZE, TOKENS>& tiles, int lanes, Use use) {
  const Token<SIZE, TOKENS>& token = tiles.token;
  const int slots = token.temporal(), units = token.side() / PIXELS<Word>, tokens = tiles.tile_tokens();
  const int parts = slots * ((token.of_tile() * units - 1) / lanes + 1);  // strips of slots
  const int share = max(1, WARPS / parts), lines = WARP / lanes;          // warps of a part, lines of a warp
  const int warp = threadIdx.x / WARP, down = over(threadIdx.x % WARP, lanes);
  Lane lane;
  lane.step = share * lines;
  lane.line = warp % share * lines + down;
#pragma unroll 1
  for (int start = 0; start < parts; start += WARPS / share) {
    const int part = start + over(warp, share), strip = over(part, slots);
    const int n = strip * lanes + threadIdx.x % WARP - down * lanes;
    lane.slot = part - strip * slots;
    lane.there = over(n, units) < tokens && down < lines;
    const int of = lane.there ? n : min(strip * lanes, tokens * units - 1);  // an idle lane reads what another reads
    lane.token = over(of, units);
    lane.unit = of - lane.token * units;
    use(lane);
  }
}

// Where a lane's unit of line 0 lies in frames.
struct Place {
  uint8_t* at;
  int64_t plane;    // bytes from plane to plane, channels first
  uint32_t across;  // and from line to line
  bool repeats;     // the slot before

  template <class Word, int SIZE, int TOKENS>
  __device__ static Place of(const Tiles<SIZE, TOKENS>& tiles, const Lane& lane, uint8_t* frames) {
    const Token<SIZE, TOKENS>& token = tiles.token;
    const int32_t* block = tiles.blocks + 4 * (tiles.first_token() + lane.token);
    const int slots = token.temporal(), step = token.last ? CHANNELS : 1;
    const int64_t* entry = tiles.patches + static_cast<int64_t>(block[0]) * (4 + slots);
    const int64_t start = entry[4 + lane.slot], width = entry[2] * token.size();
    Place place;
    place.at = frames + start + (block[2] * width + block[3] + lane.unit * PIXELS<Word>) * step;
    if (tiles.shifts != nullptr) place.at += tiles.shifts[entry[3]];
    place.across = static_cast<uint32_t>(width * step);
    place.plane = entry[1] * token.size() * width;
    place.repeats = lane.slot > 0 && entry[3 + lane.slot] == start;
    return place;
  }
};

// Three words: of a unit, by channel or as they lie, channels last.
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

// Words that are shorter than 4 bytes, joined, and apart again; what is above a word does not count.
template <class Word>
__device__ Pixels joined(const Pixels& p) {
  switch (sizeof(Word)) {
    case 4: return p;
    case 2: return {{p.w[0] | p.w[1] << 16, p.w[2], 0}};
    default: return {{p.w[0] | p.w[1] << 8 | p.w[2] << 16, 0, 0}};
  }
}
template <class Word>
__device__ Pixels apart(const Pixels& p) {
  switch (sizeof(Word)) {
    case 4: return p;
    case 2: return {{p.w[0], p.w[0] >> 16, p.w[1]}};
    default: return {{p.w[0], p.w[0] >> 8, p.w[0] >> 16}};
  }
}

// The words of a warp's units: lane p has numbers 3p, 3p + 1, 3p + 2 and shall have p, WARP + p, 2 WARP + p, which lie
// side by side with its neighbours'. In each of three rounds a lane gives one word and takes one; 3 doesn't divide WARP.
struct Deal {
  int lane, rest;
  int from[CHANNELS];  // lane that gives, by round

  __device__ Deal() : lane(threadIdx.x % WARP), rest(lane % CHANNELS) {
#pragma unroll
    for (int round = 0; round < CHANNELS; ++round) from[round] = giver((round + 2 * lane) * WARP % CHANNELS);
  }

  // Of number s WARP + lane: the lane that gives it, its place there, and whether that is `round`.
  __device__ int giver(int s) const { return over(s * WARP + lane, CHANNELS); }
  __device__ int place(int s) const { return (s * WARP + lane) % CHANNELS; }
  __device__ bool is(int s, int round) const { return rest == (round + 2 * s * WARP) % CHANNELS; }

  __device__ Pixels operator()(const Pixels& p) const {
    Pixels taken, out;
#pragma unroll
    for (int round = 0; round < CHANNELS; ++round) taken.w[round] = SHUFFLE(p.w[round], from[round]);
#pragma unroll
    for (int s = 0; s < CHANNELS; ++s) out.w[s] = is(s, 0) ? taken.w[0] : is(s, 1) ? taken.w[1] : taken.w[2];
    return out;
  }
};

// Where a lane's unit goes in shared memory: two pixels of a row of a patch lie together, four mostly not.
template <class Word, int SIZE, int TOKENS>
struct Unit {
  int low, high, plane;
  bool whole;

  __device__ Unit(const Token<SIZE, TOKENS>& token, const Lane& lane)
      : low(token.of_pixel(lane.unit * PIXELS<Word>)),
        high(token.of_pixel(lane.unit * PIXELS<Word> + 2)),
        plane(token.plane()),
        whole(PIXELS<Word> < 4 || token.size() % 4 == 0) {
    low += lane.token * token.stride();
    high += lane.token * token.stride();
  }

  __device__ void put(uint8_t* at, const Pixels& p) const {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c, at += plane) {
      if (whole) {
        *reinterpret_cast<Word*>(at + low) = static_cast<Word>(p.w[c]);
      } else {
        *reinterpret_cast<uint16_t*>(at + low) = static_cast<uint16_t>(p.w[c]);
        *reinterpret_cast<uint16_t*>(at + high) = static_cast<uint16_t>(p.w[c] >> 16);
      }
    }
  }
  __device__ Pixels get(const uint8_t* at) const {
    Pixels p;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c, at += plane) {
      if (whole) {
        p.w[c] = *reinterpret_cast<const Word*>(at + low);
      } else {
        p.w[c] = *reinterpret_cast<const uint16_t*>(at + low) |
                 static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(at + high)) << 16;
      }
    }
    return p;
  }
};

// first(y, k) of N of a lane's lines and then second(y, k, whether there is such a line): the first loads, without a
// branch, and nothing waits for it before the second.
template <int N, class First, class Second>
__device__ void in_batches(const Lane& lane, int lines, First first, Second second) {
  for (int start = 0; start < lines; start += N * lane.step) {
#pragma unroll
    for (int k = 0; k < N; ++k) first(min(start + k * lane.step + lane.line, lines - 1), k);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int y = start + k * lane.step + lane.line;
      second(y, k, y < lines);
    }
  }
}

__device__ int64_t behind(int y, uint32_t across) { return static_cast<int64_t>(static_cast<uint64_t>(y) * across); }

// Frames' lines to rows in shared memory.
template <class Word, bool LAST, int N, int SIZE, int TOKENS>
__device__ void lines_to_rows(const Tiles<SIZE, TOKENS>& tiles, uint8_t* frames, uint8_t* rows) {
  each_lane<Word>(tiles, whole_tokens<Word>(tiles.token), [&](const Lane& lane) {
    const Place place = Place::of<Word>(tiles, lane, frames);
    const Unit<Word, SIZE, TOKENS> unit(tiles.token, lane);
    Pixels held[N];
    const auto read = [&](int y, int k) {
      const uint8_t* at = place.at + behind(y, place.across);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c)
        held[k].w[c] = *reinterpret_cast<const Word*>(at + c * (LAST ? PIXELS<Word> : place.plane));
    };
    const auto write = [&](int y, int k, bool there) {
      const Pixels p = LAST ? by_channel(joined<Word>(held[k])) : held[k];
      if (there && lane.there) unit.put(rows + tiles.token.of_line(lane.slot, y), p);
    };
    in_batches<N>(lane, tiles.token.side(), read, write);
  });
}

// Rows in shared memory to frames' lines. Channels last, words go to lanes that write side by side.
template <class Word, bool LAST, int N, int SIZE, int TOKENS>
__device__ void rows_to_lines(const Tiles<SIZE, TOKENS>& tiles, const uint8_t* rows, uint8_t* frames) {
  const Deal deal;
  each_lane<Word>(tiles, WARP, [&](const Lane& lane) {
    const Place place = Place::of<Word>(tiles, lane, frames);
    const Unit<Word, SIZE, TOKENS> unit(tiles.token, lane);
    uint8_t* at[CHANNELS];
    uint32_t across[CHANNELS];
    bool written[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const auto of_word = [&](auto value) { return LAST ? SHUFFLE(value, deal.giver(c)) : value; };
      at[c] = reinterpret_cast<uint8_t*>(of_word(reinterpret_cast<unsigned long long>(place.at))) +
              (LAST ? deal.place(c) * PIXELS<Word> : c * place.plane);
      across[c] = of_word(place.across);
      written[c] = of_word(static_cast<int>(lane.there && !place.repeats));
    }
    Pixels held[N];
    const auto read = [&](int y, int k) { held[k] = unit.get(rows + tiles.token.of_line(lane.slot, y)); };
    const auto write = [&](int y, int k, bool there) {
      const Pixels p = LAST ? deal(apart<Word>(by_pixel(held[k]))) : held[k];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c)
        if (there && written[c])
          *reinterpret_cast<Word*>(IN_DEVICE_MEMORY(at[c]) + behind(y, across[c])) = static_cast<Word>(p.w[c]);
    };
    in_batches<N>(lane, tiles.token.side(), read, write);
  });
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

template <Change CHANGE, int N, int SIZE, int TOKENS, class Out>
__device__ void write_changed(const Token<SIZE, TOKENS>& token, const uint8_t* from, int patches,
                              const Numbers& numbers, Out* to) {
  using Bytes = Values<uint32_t, N / 4>;
  const int words = token.plane() / N;
#pragma unroll 2
  for (int i = threadIdx.x; i < patches * words; i += THREADS) {
    const int patch = over(i, words), word = i - patch * words;
    const uint8_t* at = from + token.of_patch(patch) + word * N;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const Changed<CHANGE> how{numbers.mean[c], numbers.std[c], numbers.inverse[c], numbers.scale};
      const Bytes bytes = *reinterpret_cast<const Bytes*>(at + c * token.plane());
      Values<Out, N> made;
#pragma unroll
      for (int j = 0; j < N; ++j) narrow(how(bytes.at[j / 4] >> (8 * (j % 4)) & 255), made.at[j]);
      write_streaming(reinterpret_cast<Values<Out, N>*>(to) + (patch * CHANNELS + c) * words + word, made);
    }
  }
}

template <int SIZE, int TOKENS, class Out>
__device__ void write_rows(const Token<SIZE, TOKENS>& token, const uint8_t* from, int patches, const Numbers& numbers,
                           Out* to) {
  constexpr int N = SIZE ? 16 / sizeof(Out) : 4;  // values of 16 bytes, where they divide a plane
  switch (numbers.change) {
    case NORMALISE: return write_changed<NORMALISE, N>(token, from, patches, numbers, to);
    case NORMALISE_BYTES: return write_changed<NORMALISE_BYTES, N>(token, from, patches, numbers, to);
    case RESCALE: return write_changed<RESCALE, N>(token, from, patches, numbers, to);
    default: return write_changed<CONVERT, N>(token, from, patches, numbers, to);
  }
}

// get(word, i) of COPY_AT_ONCE of a tile's words and then put(word, i).
template <class Word, class Get, class Put>
__device__ void each_word(int count, Get get, Put put) {
#pragma unroll 1
  for (int start = threadIdx.x; start < count; start += COPY_AT_ONCE * THREADS) {
    Word held[COPY_AT_ONCE];
#pragma unroll
    for (int k = 0; k < COPY_AT_ONCE; ++k)
      if (start + k * THREADS < count) get(held[k], start + k * THREADS);
#pragma unroll
    for (int k = 0; k < COPY_AT_ONCE; ++k)
      if (start + k * THREADS < count) put(held[k], start + k * THREADS);
  }
}

// Part i of a tile's rows, a divisor of a patch, in shared memory.
template <class Part, class Byte, int SIZE, int TOKENS>
__device__ Part& in_shared(const Token<SIZE, TOKENS>& token, Byte* shared, int i) {
  constexpr int BYTES = sizeof(Part);
  const int parts = token.patch() / BYTES, patch = over(i, parts);
  return *reinterpret_cast<Part*>(shared + token.of_patch(patch) + (i - patch * parts) * BYTES);
}

template <int SIZE, int TOKENS>
__device__ void write_rows(const Token<SIZE, TOKENS>& token, const uint8_t* from, int patches, const Numbers&,
                           uint8_t* to) {
  constexpr int PARTS = SIZE ? 2 : 1;  // of 8 bytes, which divide a patch of known size
  using Part = Values<uint32_t, PARTS>;
  using Word = Values<Part, PARTS>;
  each_word<Word>(
      patches * token.patch() / static_cast<int>(sizeof(Word)),
      [&](Word& word, int i) {
#pragma unroll
        for (int j = 0; j < PARTS; ++j) word.at[j] = in_shared<const Part>(token, from, PARTS * i + j);
      },
      [&](const Word& word, int i) { write_streaming(reinterpret_cast<Word*>(to) + i, word); });
}

template <class Part, int PARTS, int SIZE, int TOKENS>
__device__ void read_as(const Token<SIZE, TOKENS>& token, const uint8_t* from, int patches, uint8_t* to) {
  using Word = Values<Part, PARTS>;
  each_word<Word>(
      patches * token.patch() / static_cast<int>(sizeof(Word)),
      [&](Word& word, int i) { word = reinterpret_cast<const Word*>(from)[i]; },
      [&](const Word& word, int i) {
#pragma unroll
        for (int j = 0; j < PARTS; ++j) in_shared<Part>(token, to, PARTS * i + j) = word.at[j];
      });
}

template <int SIZE, int TOKENS>
__device__ void read_rows(const Token<SIZE, TOKENS>& token, const uint8_t* from, int patches, int aligned,
                          uint8_t* to) {
  if (SIZE && aligned == 16)
    read_as<Values<uint32_t, 2>, 2>(token, from, patches, to);
  else
    as_words(min(aligned, 4), [&](auto word) { read_as<decltype(word), 1>(token, from, patches, to); });
}

template <int SIZE, class Out, int TOKENS = packing(SIZE, sizeof(Out)).tokens>
__global__ void __launch_bounds__(THREADS, packing(SIZE, sizeof(Out)).blocks)
    pack_kernel(uint8_t* frames, Out* rows, const Tiles<SIZE, TOKENS> tiles, const Numbers numbers, int aligned) {
  extern __shared__ __align__(16) uint8_t shared[];
  constexpr int N = packing(SIZE, sizeof(Out)).at_once;
  as_words(aligned, [&](auto word) {
    using Word = decltype(word);
    if (tiles.token.last)
      lines_to_rows<Word, true, N>(tiles, frames, shared);
    else
      lines_to_rows<Word, false, N>(tiles, frames, shared);
  });
  __syncthreads();
  write_rows(tiles.token, shared, tiles.tile_patches(), numbers, rows + tiles.first_byte());
}

template <int SIZE, int TOKENS = unpacking(SIZE).tokens>
__global__ void __launch_bounds__(THREADS, unpacking(SIZE).blocks)
    unpack_kernel(const uint8_t* rows, uint8_t* frames, const Tiles<SIZE, TOKENS> tiles, int rows_aligned,
                  int aligned) {
  extern __shared__ __align__(16) uint8_t shared[];
  constexpr int N = unpacking(SIZE).at_once;
  read_rows(tiles.token, rows + tiles.first_byte(), tiles.tile_patches(), rows_aligned, shared);
  __syncthreads();
  as_words(aligned, [&](auto word) {
    using Word = decltype(word);
    if (tiles.token.last)
      rows_to_lines<Word, true, N>(tiles, shared, frames);
    else
      rows_to_lines<Word, false, N>(tiles, shared, frames);
  });
}

template <int SIZE, int TOKENS, class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), const Tiles<SIZE, TOKENS>& tiles, Stream stream, Arguments... arguments) {
  if (ALLOW_SHARED(kernel, tiles.shared()) != 0) return LAST_ERROR();  // and no later launch is told of it
  kernel<<<static_cast<unsigned>(tiles.count()), THREADS, tiles.shared(), stream>>>(arguments...);
  return LAST_ERROR();
}

template <int SIZE, class Out>
int launch_pack(const PatchTables& tables, uint8_t* frames, Out* rows, const Numbers& numbers, int aligned,
                Stream stream) {
  const Tiles<SIZE, packing(SIZE, sizeof(Out)).tokens> tiles(tables);
  return launch(pack_kernel<SIZE, Out>, tiles, stream, frames, rows, tiles, numbers, aligned);
}

template <int SIZE>
int launch_unpack(const PatchTables& tables, const uint8_t* rows, uint8_t* frames, int rows_aligned, int aligned,
                  Stream stream) {
  const Tiles<SIZE, unpacking(SIZE).tokens> tiles(tables);
  return launch(unpack_kernel<SIZE>, tiles, stream, rows, frames, tiles, rows_aligned, aligned);
}

// use(the size of patches, where kernels know it, or 0)
template <class Use>
int as_size(const PatchTables& tables, Use use) {
  const bool known = tables.merge == 2 && tables.temporal == 2;
  if (known && tables.patch == 14) return use(std::integral_constant<int, 14>());
  if (known && tables.patch == 16) return use(std::integral_constant<int, 16>());
  return use(std::integral_constant<int, 0>());
}

}  // namespace

int launch_pack_video(const PatchTables& tables, uint8_t* frames, void* rows, Dtype dtype, const Numbers& numbers,
                      int32_t aligned, Stream stream) {
  return as_size(tables, [&](auto size) {
    const auto to = [&](auto* out) {
      return launch_pack<decltype(size)::value>(tables, frames, out, numbers, aligned, stream);
    };
    switch (dtype) {
      case BYTE: return to(static_cast<uint8_t*>(rows));
      case HALF: return to(static_cast<__half*>(rows));
      case BFLOAT16: return to(static_cast<bfloat16*>(rows));
      default: return to(static_cast<float*>(rows));
    }
  });
}

int launch_unpack_video(const PatchTables& tables, const uint8_t* rows, uint8_t* frames, int32_t rows_aligned,
                        int32_t aligned, Stream stream) {
  return as_size(tables, [&](auto size) {
    return launch_unpack<decltype(size)::value>(tables, rows, frames, rows_aligned, aligned, stream);
  });
}

}  // namespace mmpack
