// Counters by which the blocks of a launch find out which of them finishes last; 0 between launches, as `arrive` wraps
// them. Launches that run at the same time must not share one: those of a stream run one after the other and share its
// own, a launch that is captured into a graph keeps one for good.
#include "ops.h"

#include <map>
#include <mutex>

namespace mmpack {
namespace {

constexpr unsigned STREAMS = 4096;
constexpr unsigned CAPTURED = 61440;

__device__ unsigned counters[STREAMS + CAPTURED];

struct Device {
  unsigned* first = nullptr;
  std::map<Stream, unsigned> of_stream;
  unsigned captured = 0;
};

}  // namespace

unsigned* take_ticket(int32_t device, Stream stream, bool captured) {
  static std::mutex mutex;
  static std::map<int32_t, Device> devices;
  const std::lock_guard<std::mutex> lock(mutex);
  Device& d = devices[device];
  if (d.first == nullptr && ADDRESS_OF(reinterpret_cast<void**>(&d.first), counters) != 0) {
    static_cast<void>(LAST_ERROR());  // forgotten, or the launch would be blamed
    return nullptr;
  }
  if (captured) return d.captured < CAPTURED ? d.first + STREAMS + d.captured++ : nullptr;
  const unsigned place = d.of_stream.emplace(stream, d.of_stream.size()).first->second;
  return place < STREAMS ? d.first + place : nullptr;
}

}  // namespace mmpack
