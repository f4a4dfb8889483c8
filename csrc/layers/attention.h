// A layer's first block up to its last product: attention over the packed tokens.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "layers/residual.h"
#include "model/weights.h"

namespace ftbert {

// columns: as Batch::columns.
template <class T>
ScorePolicy<T> policy_of(const Layer<T>& layer, const int32_t* columns = nullptr) {
  const AttentionConfig& c = layer.config.attention;
  PositionProducts<T> positions = layer.positions;
  positions.columns = columns;
  return {c.window, {layer.relative_bias, columns, layer.relative_span}, {c.soft_cap}, positions};
}

struct AttentionChoice {
  AttentionPath path = AttentionPath::fused;
  std::string reason;  // for people
};

// The path of all layers of a model, decided once: that asked for, else the fused one where it has a kernel for each
// layer's heads and scores. Error where the fused one is asked for and lacks a kernel on this device.
template <class Device, class T>
AttentionChoice choose_attention(const Context<Device>& context, const std::vector<Layer<T>>& layers,
                                 std::optional<AttentionPath> asked);

// Which fused kernel runs texts of which lengths, for people; "" where the device has one.
template <class Device, class T>
std::string describe_kernels(const Context<Device>& context, const std::vector<Layer<T>>& layers, int64_t longest);

// Of each sequence the queries whose result is read. first, last: it lies in the sequence's first row. last: where
// scores do not depend on a query's position, on the fused path.
enum class Queries { all, first, last };

// softmax(scale * q k^T + bias) v of the run's rows of the stream, normed if the layer says so, of these queries at
// least: [run.tokens, width] at b.attended, of T or as `out` says, which is there too. What comes back says which.
template <class Device, class T>
Operand attend(Context<Device>& context, const Layer<T>& layer, const Batch& batch, const Run& run,
               const Stream<Device, T>& stream, Queries queries, AttentionPath path, const LayerBuffers<T>& b,
               const Operand& out);

}  // namespace ftbert
