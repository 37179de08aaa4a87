// The ops mmpack_native::* over torch's stable ABI: a library built once runs under torch 2.11 and newer.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "ops.h"

// kernel-builder, of Hugging Face's kernels, gives each build a name of its own, and the macros that take it.
#ifdef TORCH_EXTENSION_NAME
#include "registration.h"
#else
#define TORCH_EXTENSION_NAME mmpack_native
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, LIBRARY) STABLE_TORCH_LIBRARY_FRAGMENT(NAME, LIBRARY)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, LIBRARY) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, LIBRARY)
#define REGISTER_EXTENSION(NAME)
#endif

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

namespace {

void must(AOTITorchError code) { STD_TORCH_CHECK(code == AOTI_TORCH_SUCCESS, "mmpack_native: torch refused a call"); }

mmpack::Column column(const Tensor& tensor, int32_t device) {
  int32_t dtype;
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device && tensor.is_contiguous(),
                  "mmpack_native: columns must be contiguous and on one device");
  must(aoti_torch_get_dtype(tensor.get(), &dtype));
  return {tensor.data_ptr(), dtype};
}

mmpack::Column column(const MaybeTensor& tensor, int32_t device) {
  return tensor ? column(*tensor, device) : mmpack::Column{};
}

template <int ND>
Tensor empty(const int64_t (&sizes)[ND], int32_t dtype, int32_t device) {
  int64_t strides[ND];
  int64_t stride = 1;
  for (int i = ND - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  AtenTensorHandle handle;
  must(
      aoti_torch_empty_strided(ND, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

Tensor empty_scalar(int32_t dtype, int32_t device) {
  AtenTensorHandle handle;
  must(
      aoti_torch_empty_strided(0, nullptr, nullptr, dtype, aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

// The device of a tensor made current, its stream, and a ticket for a launch on it.
struct Launch {
  explicit Launch(const Tensor& tensor) : device(tensor.get_device_index()), guard(device) {
    void* raw;
    must(aoti_torch_get_current_cuda_stream(device, &raw));
    stream = static_cast<Stream>(raw);
  }

  unsigned* ticket() {
    cudaStreamCaptureStatus status;
    STD_TORCH_CHECK(cudaStreamIsCapturing(stream, &status) == cudaSuccess, "the stream can't be asked");
    unsigned* taken = mmpack::take_ticket(device, stream, status != cudaStreamCaptureStatusNone);
    if (taken == nullptr) {  // one for this launch, set to 0 before it
      own = empty<1>({1}, mmpack::INT32, device);
      taken = static_cast<unsigned*>(own->data_ptr());
      STD_TORCH_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream) == cudaSuccess, "a counter can't be set");
    }
    return taken;
  }

  int32_t device;
  torch::stable::accelerator::DeviceGuard guard;
  Stream stream;
  MaybeTensor own;
};

void check(int code) {
  STD_TORCH_CHECK(code == 0, "the launch failed: ", cudaGetErrorString(static_cast<cudaError_t>(code)));
}

std::tuple<Tensor, Tensor, Tensor> policy_loss(
    Tensor logprobs, MaybeTensor entropy, Tensor advantages, Tensor cu_loss, MaybeTensor old_logprobs,
    MaybeTensor ref_logprobs, MaybeTensor rollout_logprobs, MaybeTensor total, double scale, bool sample_mean,
    int64_t kind, double ratio_low, double ratio_high, double dual_clip, int64_t kl_kind, double kl_coef,
    double entropy_coef, int64_t correction, int64_t correction_level, double correction_low, double correction_high) {
  Launch launch(logprobs);
  mmpack::PolicyLoss a{};
  a.logprobs = column(logprobs, launch.device);
  a.entropy = column(entropy, launch.device);
  a.advantages = column(advantages, launch.device);
  a.cu_loss = column(cu_loss, launch.device);
  a.old_logprobs = column(old_logprobs, launch.device);
  a.ref_logprobs = column(ref_logprobs, launch.device);
  a.rollout_logprobs = column(rollout_logprobs, launch.device);
  a.total = column(total, launch.device);
  a.count = static_cast<int32_t>(logprobs.numel());
  a.num_samples = static_cast<int32_t>(cu_loss.numel() - 1);
  a.sample_mean = sample_mean;
  a.by_sample = advantages.numel() == a.num_samples;
  a.kind = static_cast<int32_t>(kind);
  a.kl_kind = static_cast<int32_t>(kl_kind);
  a.correction = static_cast<int32_t>(correction);
  a.level = static_cast<int32_t>(correction_level);
  a.scale = scale;
  a.ratio_low = ratio_low;
  a.ratio_high = ratio_high;
  a.dual_clip = dual_clip;
  a.kl_coef = kl_coef;
  a.entropy_coef = entropy_coef;
  a.correction_low = correction_low;
  a.correction_high = correction_high;

  const mmpack::PolicyLossGrid grid = mmpack::policy_loss_grid(a);

  Tensor loss = empty_scalar(mmpack::FLOAT, launch.device);
  Tensor metrics = empty<1>({mmpack::SUMS}, mmpack::FLOAT, launch.device);
  Tensor derivatives = empty<2>(
      {entropy_coef != 0 ? 2 : 1, a.count}, a.logprobs.dtype == mmpack::DOUBLE ? mmpack::DOUBLE : mmpack::FLOAT,
      launch.device);
  Tensor partials = empty<2>({mmpack::SUMS, grid.blocks}, mmpack::DOUBLE, launch.device);
  a.loss = static_cast<float*>(loss.data_ptr());
  a.metrics = static_cast<float*>(metrics.data_ptr());
  a.derivatives = derivatives.data_ptr();
  a.partials = static_cast<double*>(partials.data_ptr());
  check(mmpack::launch_policy_loss(a, grid, launch.ticket(), launch.stream));
  return {loss, metrics, derivatives};
}

Tensor group_advantages(Tensor rewards, Tensor group_index, MaybeTensor tokens, int64_t kind, double eps) {
  Launch launch(rewards);
  const auto count = static_cast<int32_t>(rewards.numel());
  Tensor out = empty<1>({count}, mmpack::FLOAT, launch.device);
  if (count == 0) return out;
  MaybeTensor baselined;
  unsigned* ticket = nullptr;
  if (kind == mmpack::REINFORCE_PP) {
    baselined = empty<1>({count}, mmpack::DOUBLE, launch.device);
    ticket = launch.ticket();
  }
  check(mmpack::launch_group_advantages(
      column(rewards, launch.device), column(group_index, launch.device),
      static_cast<const double*>(column(tokens, launch.device).data), count, static_cast<int32_t>(kind), eps,
      baselined ? static_cast<double*>(baselined->data_ptr()) : nullptr, static_cast<float*>(out.data_ptr()),
      ticket, launch.stream));
  return out;
}

Tensor scatter_rewards(Tensor rewards, Tensor cu_loss, int64_t count, double weight, int64_t at) {
  Launch launch(cu_loss);
  Tensor out = empty<1>({count}, mmpack::FLOAT, launch.device);
  if (count == 0) return out;
  check(mmpack::launch_scatter_rewards(
      column(rewards, launch.device), column(cu_loss, launch.device), static_cast<int32_t>(rewards.numel()),
      static_cast<int32_t>(count), weight, static_cast<int32_t>(at),
      static_cast<float*>(out.data_ptr()), launch.stream));
  return out;
}

// The largest power of two, up to 16, that divides all of them.
int32_t alignment(std::initializer_list<uint64_t> of) {
  uint64_t bits = 16;
  for (const uint64_t value : of) bits |= value;
  return static_cast<int32_t>(bits & -bits);
}

// New rows [count, columns] as those of `like`.
struct NewRows {
  NewRows(const Tensor& like, int64_t count, int32_t device)
      : like(column(like, device)),
        out(empty<2>({count, like.size(1)}, this->like.dtype, device)),
        rows{this->like.data, count,
             like.size(1) * static_cast<int64_t>(aoti_torch_dtype_element_size(this->like.dtype))} {}

  void* data() const { return out.data_ptr(); }
  int32_t aligned() const {
    return alignment({reinterpret_cast<uint64_t>(rows.data), reinterpret_cast<uint64_t>(data()),
                      static_cast<uint64_t>(rows.bytes)});
  }

  mmpack::Column like;
  Tensor out;
  mmpack::Rows rows;
};

Tensor gather_rows(Tensor x, Tensor index) {
  Launch launch(x);
  NewRows made(x, index.numel(), launch.device);
  if (made.out.numel() != 0)
    check(mmpack::launch_gather_rows(
        made.rows, column(index, launch.device), made.data(), made.aligned(), launch.stream));
  return made.out;
}

mmpack::PatchTables patch_tables(const MaybeTensor& shifts, const Tensor& patches, const Tensor& blocks, int64_t patch,
                                 int64_t merge, int64_t temporal, bool last, int32_t device) {
  return {static_cast<const int64_t*>(column(shifts, device).data),
          static_cast<const int64_t*>(column(patches, device).data),
          static_cast<const int32_t*>(column(blocks, device).data),
          blocks.size(0),
          static_cast<int32_t>(patch),
          static_cast<int32_t>(merge),
          static_cast<int32_t>(temporal),
          last};
}

uint8_t* bytes_of(const Tensor& tensor, int32_t device) {
  STD_TORCH_CHECK(column(tensor, device).dtype == mmpack::BYTE, "mmpack_native: frames are bytes");
  return static_cast<uint8_t*>(tensor.data_ptr());
}

// `frames` is the first clip where there are several: shifts say how far the others are. Fills `rows`.
void pack_video(Tensor frames, Tensor rows, MaybeTensor shifts, Tensor patches, Tensor blocks, int64_t patch,
                int64_t merge, int64_t temporal, bool last, int64_t change, double mean_0, double mean_1, double mean_2,
                double std_0, double std_1, double std_2, double scale, int64_t aligned) {
  Launch launch(frames);
  mmpack::Numbers numbers{static_cast<mmpack::Change>(change)};
  const double means[] = {mean_0, mean_1, mean_2}, stds[] = {std_0, std_1, std_2};
  for (int c = 0; c < 3; ++c) {
    numbers.mean[c] = static_cast<float>(means[c]);
    numbers.std[c] = static_cast<float>(stds[c]);
    numbers.inverse[c] = 1.0f / numbers.std[c];
  }
  numbers.scale = static_cast<float>(scale);
  check(mmpack::launch_pack_video(
      patch_tables(shifts, patches, blocks, patch, merge, temporal, last, launch.device),
      bytes_of(frames, launch.device), rows.data_ptr(),
      static_cast<mmpack::Dtype>(column(rows, launch.device).dtype), numbers, static_cast<int32_t>(aligned),
      launch.stream));
}

void unpack_video(Tensor rows, Tensor frames, Tensor patches, Tensor blocks, int64_t patch, int64_t merge,
                  int64_t temporal, bool last, int64_t rows_aligned, int64_t aligned) {
  Launch launch(rows);
  check(mmpack::launch_unpack_video(
      patch_tables(std::nullopt, patches, blocks, patch, merge, temporal, last, launch.device),
      bytes_of(rows, launch.device), bytes_of(frames, launch.device), static_cast<int32_t>(rows_aligned),
      static_cast<int32_t>(aligned), launch.stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, library) {
  library.def(
      "policy_loss(Tensor logprobs, Tensor? entropy, Tensor advantages, Tensor cu_loss, Tensor? old_logprobs, "
      "Tensor? ref_logprobs, Tensor? rollout_logprobs, Tensor? total, float scale, bool sample_mean, int kind, "
      "float ratio_low, float ratio_high, float dual_clip, int kl_kind, float kl_coef, float entropy_coef, "
      "int correction, int correction_level, float correction_low, float correction_high) -> (Tensor, Tensor, Tensor)");
  library.def("group_advantages(Tensor rewards, Tensor group_index, Tensor? tokens, int kind, float eps) -> Tensor");
  library.def("gather_rows(Tensor x, Tensor index) -> Tensor");
  library.def(
      "pack_video(Tensor frames, Tensor(a!) rows, Tensor? shifts, Tensor patches, Tensor blocks, int patch, int merge, "
      "int temporal, bool last, int change, float mean_0, float mean_1, float mean_2, float std_0, float std_1, "
      "float std_2, float scale, int aligned) -> ()");
  library.def(
      "unpack_video(Tensor rows, Tensor(a!) frames, Tensor patches, Tensor blocks, int patch, "
      "int merge, int temporal, bool last, int rows_aligned, int aligned) -> ()");
  library.def("scatter_rewards(Tensor rewards, Tensor cu_loss, int count, float weight, int at) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, library) {
  library.impl("policy_loss", TORCH_BOX(&policy_loss));
  library.impl("group_advantages", TORCH_BOX(&group_advantages));
  library.impl("gather_rows", TORCH_BOX(&gather_rows));
  library.impl("pack_video", TORCH_BOX(&pack_video));
  library.impl("unpack_video", TORCH_BOX(&unpack_video));
  library.impl("scatter_rewards", TORCH_BOX(&scatter_rewards));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
