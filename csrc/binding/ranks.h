// With whom a rank of a model adds up: ranks of this process (binding/rank_runner.h) or other processes.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <type_traits>

#include "core/communicator.h"

namespace ftbert::binding {

class ProcessGroup;  // binding/process_group.h
struct Processes;

// One of the two, or neither. processes: of ranks that are processes.
struct AnyCommunicator {
  std::shared_ptr<Communicator<Cpu>> cpu = {};
  std::shared_ptr<Communicator<Cuda>> cuda = {};
  std::shared_ptr<const ProcessGroup> processes = {};

  template <class Device>
  const std::shared_ptr<Communicator<Device>>& of() const {
    if constexpr (std::is_same_v<Device, Cpu>)
      return cpu;
    else
      return cuda;
  }
};

// Sums through a process group of torch.distributed, registered there under its name: gloo's of the CPU, NCCL's of
// GPUs. Its ranks are the processes. Error where the group is not `shard.size` processes, or this one is another rank.
AnyCommunicator join_process_group(const Processes& processes, const Shard& shard, at::Device device);

}  // namespace ftbert::binding
