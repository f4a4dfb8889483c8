// Makes a device the thread's current one for a scope.
#pragma once
#include "core/cuda_check.h"

namespace ftbert {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FTBERT_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ == device) return;
    FTBERT_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace ftbert
