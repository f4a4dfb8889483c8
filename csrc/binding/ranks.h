// The ranks of a model that lies on several devices: how an engine gets its communicator, and the engine of all of
// them.
#pragma once
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "binding/encoder_class.h"
#include "core/communicator.h"

namespace ftbert::binding {

class ProcessGroup;  // binding/process_group.h
struct Processes;

// One of the two, or neither. processes: of ranks that are processes.
struct AnyCommunicator {
  std::shared_ptr<Communicator<Cpu>> cpu;
  std::shared_ptr<Communicator<Cuda>> cuda;
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

// A model whose layers lie on several devices, one stage after another. here: the stages of this process, in order;
// all, or with processes its own, whose number is the process's.
struct Stages {
  std::vector<c10::intrusive_ptr<EncoderClass>> here;
  std::string config;                 // of the whole model, as given
  std::vector<int64_t> first_layers;  // by stage
  std::shared_ptr<const Processes> processes;
  TensorDict shared;  // what heads read by `weight`, on the first of `here`'s device
};

// Calls go through them by micro-batches (binding/micro_batches.h); ids and results lie on the first's device.
std::unique_ptr<Engine> make_engine_of_stages(const Stages& stages);
// Every process makes the same calls, and gets what the last stage makes.
std::unique_ptr<Engine> make_engine_of_process_stages(const Stages& stages, const EncoderConfig& whole);
// For people: "layers 0 to 5 on cuda:0".
std::string layers_of(const EncoderClass& stage);

// The ranks of one process, one on each shard's device: a call runs on all of them, and gives what the first makes.
// Calls follow each other, whatever streams they come on. An exception of one rank ends the call on all.
std::unique_ptr<Engine> make_engine_of_ranks(const std::vector<c10::intrusive_ptr<EncoderClass>>& shards);

}  // namespace ftbert::binding
