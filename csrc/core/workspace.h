// One buffer, carved into buffers: the caller allocates, the core only points into it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/check.h"

namespace ftbert {

// Run once over a null buffer to measure, once over the real one to carve: the same code, so the sizes agree.
class Workspace {
 public:
  static constexpr size_t kAlignment = 256;

  Workspace() = default;
  Workspace(void* base, size_t bytes) : base_(static_cast<char*>(base)), capacity_(bytes) {}

  template <class T>
  T* take(int64_t count) {
    const size_t start = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (!base_) return nullptr;
    FTBERT_CHECK(used_ <= capacity_, "workspace of ", capacity_, " bytes is too small: ", used_, " needed so far");
    return reinterpret_cast<T*>(base_ + start);
  }

  size_t bytes() const { return used_; }
  // Give back everything taken after `mark`, for buffers that live shorter than the rest.
  size_t mark() const { return used_; }
  void release(size_t mark) { used_ = mark; }

 private:
  char* base_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

// allocate(floats) gives memory of the device, aligned to 16 bytes, that must live as long as the model that asks. It
// is written once, on the stream of the context that comes along.
using AllocateFloats = std::function<float*(int64_t floats)>;

}  // namespace ftbert
