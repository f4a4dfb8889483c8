// What a sum over ranks takes, for people who decide how to share a model.
#pragma once
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <memory>

#include "binding/tensors.h"
#include "core/communicator.h"
#include "core/graph.h"
#include "layers/rank_sum.h"

namespace ftbert::binding {

// Seconds of a sum over ranks of [rows, cols] with residual and LayerNorm, its launch included, of many in a row: as
// small calls have it, in a recording where the communicator records. All ranks ask at once, and between calls.
template <class Device, class T>
double seconds_of_sum(const at::Device& device, Communicator<Device>& ranks, int64_t rows, int64_t cols) {
  constexpr int kTimes = 64;
  CallContext<Device> on(device);
  const auto options = at::TensorOptions().device(device).dtype(scalar_type_of(kDType<T>));
  const at::Tensor x = at::zeros({rows, cols}, options), gamma = at::zeros({cols}, options);
  const Norm<T> norm{.kind = NormKind::layer, .gamma = data<T>(gamma), .beta = data<T>(gamma), .eps = 1e-12f};
  ranks.reserve(x.nbytes());
  const auto add_up = [&](Context<Device> context) {
    if constexpr (std::is_same_v<Device, Cuda>) context.overlap = false;  // a sum behind a sum: device/peers.cuh
    const auto norm_behind = [&](const auto& sum) {
      norm_of(context, &ranks, sum, static_cast<const T*>(nullptr), data<T>(x), norm, rows, cols,
              Output<T>{.normed = data<T>(x)});
    };
    const auto no_product = [](T* at) -> const T* { return at; };
    for (int turn = 0; turn < kTimes; ++turn)
      with_sum_over_ranks(context, ranks, turn % 2, rows, rows, cols, data<T>(x), no_product, norm_behind);
  };
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  std::unique_ptr<LaunchGraph> graph;
  const auto timed = [&] {
    stream.synchronize();
    ranks.agree(true);
    const auto began = std::chrono::steady_clock::now();
    graph ? graph->launch(native_handle(stream)) : add_up(on.context);
    ranks.agree(true);
    stream.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / kTimes;
  };
  timed();
  if constexpr (std::is_same_v<Device, Cuda>) {
    if (ranks.records()) {
      graph = record_graph([&](void* recorded) {
        Context<Device> context = on.context;
        context.stream = recorded;
        add_up(context);
      });
      timed();
    }
  }
  return timed();
}

}  // namespace ftbert::binding
