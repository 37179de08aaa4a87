// The launchers of csrc/, without torch. Each launches one kernel on `stream` and returns the runtime's error code.
#pragma once

#include "portable.h"

namespace mmpack {

// A counter on `device`, the current one, that is 0 and that no other launch in flight uses; nullptr: none is left.
unsigned* take_ticket(int32_t device, Stream stream, bool captured);

enum Kind : int32_t { CLIP, GSPO, CISPO };
enum KlKind : int32_t { K1, K2, K3 };
enum Correction : int32_t { NONE, TIS, MIS };
enum Level : int32_t { TOKEN, SEQUENCE, GEOMETRIC };

// What a block adds up: METRICS of mmpack/losses/policy/call.py, but LOSS and SQUARES in place of `tokens` and `ess`.
enum Sum : int32_t { LOSS, RATIO, CLIPPED, KL_OLD, SQUARES, CORRECTION, CUT, KL_REF, ENTROPY, DUAL_CUT, SUMS };

// As in mmpack::policy_loss (mmpack/losses/policy/call.py). Less than 2^31 tokens.
struct PolicyLoss {
  Column logprobs, entropy, advantages, cu_loss, old_logprobs, ref_logprobs, rollout_logprobs, total;
  int32_t count, num_samples;
  int32_t kind, kl_kind, correction, level;
  bool sample_mean, by_sample;  // by_sample: advantages are [num_samples], not [count]
  double scale, ratio_low, ratio_high, kl_coef, entropy_coef, correction_low, correction_high;
  double dual_clip;  // infinite: none
  float* loss;
  float* metrics;
  void* derivatives;  // double where logprobs are, else float
  double* partials;   // [SUMS, blocks]
};

struct PolicyLossGrid {
  int32_t blocks, threads, parts, warps;  // blocks, and warps of a block, for each sample
};
PolicyLossGrid policy_loss_grid(const PolicyLoss& arguments);
int launch_policy_loss(const PolicyLoss& arguments, const PolicyLossGrid& grid, unsigned* ticket, Stream stream);

enum AdvantageKind : int32_t { GRPO, RLOO, DR_GRPO, LITE_PPO, REINFORCE_PP };

// Rewards are float or double, groups and offsets int32 or int64. `baselined` [count] is needed by REINFORCE_PP, which
// counts a sample tokens[i] times (nullptr: once) where it centres and scales.
int launch_group_advantages(Column rewards, Column groups, const double* tokens, int32_t count, int32_t kind, double eps,
                            double* baselined, float* out, unsigned* ticket, Stream stream);

enum At : int32_t { LAST, ALL, MEAN };

int launch_scatter_rewards(Column rewards, Column cu_loss, int32_t num_samples, int32_t count, double weight, int32_t at,
                           float* out, Stream stream);

// Rows of `bytes` bytes each; `count` of them are written.
struct Rows {
  const void* data;
  int64_t count, bytes;
};

// `aligned` (a power of two up to 16) divides the addresses and the bytes of a row. Less than 2^31 words a row, and tiles
// of 1,024 words.
int launch_gather_rows(Rows x, Column index, void* out, int32_t aligned, Stream stream);

// Where frames and rows of patches lie: mmpack/ops/patches/tables.py. A patch is an even number of pixels wide, and there is
// a token at least.
// `shifts`: of clips that are not in one buffer, nullptr where they are.
struct PatchTables {
  const int64_t *shifts, *patches;
  const int32_t* blocks;
  int64_t tokens;
  int32_t patch, merge, temporal;
  bool last;  // channels
};

// What becomes of bytes: (x - mean) / std, by three steps where they have the bits of a division, or x * scale.
enum Change : int32_t { CONVERT, NORMALISE, NORMALISE_BYTES, RESCALE };
struct Numbers {
  Change change;
  float mean[3], std[3], inverse[3], scale;
};

// `aligned` (1, 2 or 4) divides the addresses of clips and the bytes of a token's line, `rows_aligned` (up to 16) the
// address of rows and the bytes of a token. Rows of bytes are not changed; others are float16, bfloat16 or float32.
int launch_pack_video(const PatchTables& tables, uint8_t* frames, void* rows, Dtype dtype, const Numbers& numbers,
                      int32_t aligned, Stream stream);
int launch_unpack_video(const PatchTables& tables, const uint8_t* rows, uint8_t* frames, int32_t rows_aligned,
                        int32_t aligned, Stream stream);

}  // namespace mmpack
