// THE list of weight names. A checkpoint has these tensors, no more and no fewer; families share the names.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gemm/product.h"
#include "model/config.h"

namespace ftbert {

struct WeightSpec {
  std::string name;
  std::vector<int64_t> shape;
  bool matrix = false;  // the [n, k] operand of a product (may be repacked); everything else is read by kernels
  const Format* type = nullptr;  // as stored, of quantized matrices and of scales; nullptr: the model says
  bool operator==(const WeightSpec&) const = default;
};

// The tensors beside a matrix that has a type of its own. matrix: its scales, of rows [n] or of blocks [n, k / block].
// input: how the rows that it multiplies are stored, by Format::other; one scale [1], or what their columns are
// multiplied by before they become byte rows [k]; "" where they stay as they are.
struct WeightScales {
  std::string matrix, input;
};
WeightScales scales_of(const WeightSpec& matrix);

// Every tensor that a model of this config has, in forward order.
std::vector<WeightSpec> weight_specs(const ModelConfig& config);
// "layers.{weights_of}.", before the names of a layer's tensors.
std::string layer_prefix(const LayerConfig& layer);
// One layer's of them.
std::vector<WeightSpec> layer_weight_specs(const ModelConfig& config, const LayerConfig& layer);

// The norms around a block, each possibly absent: stream = after(stream + result(block(before(stream)))).
template <class T>
struct BlockNorms {
  Norm<T> before, result, after;  // [hidden]
};

template <class T>
struct Layer {
  LayerConfig config;
  int64_t index = 0;                 // among the model's layers
  Linear<T> qkv;                     // [qkv_width, hidden]: query, key, value rows in this order
  Norm<T> q_norm, k_norm;            // [head_size]
  Rotation rotation;                 // its table comes with the device (layers/prepared.h)
  const T* relative_bias = nullptr;  // [heads, 2*relative_span-1], by column(key) - column(query) + relative_span-1
  int64_t relative_span = 0;
  // Own projections of the table of positions, plain matrices [width, hidden]; absent where they are those of qkv.
  Linear<T> position_keys, position_queries;
  PositionProducts<T> positions;  // its tables come with the device (layers/prepared.h)
  Linear<T> out;                  // [hidden, width]
  BlockNorms<T> attention_norms;
  Linear<T> up;    // [up_rows, hidden]
  Linear<T> down;  // [hidden, inter]
  BlockNorms<T> ffn_norms;
};

template <class T>
struct Weights {
  Operand word;
  const T* position = nullptr;
  const T* token_type = nullptr;
  Norm<T> embedding_norm;
  Linear<T> embedding_projection;
  Norm<T> projection_norm;
  Linear<T> convolution;  // [hidden, kernel * hidden]
  Norm<T> convolution_norm;
  std::vector<Layer<T>> layers;  // several may point at the same tensors
  const T* positions = nullptr;  // [2 * position_span, hidden], for scores
  Norm<T> position_norm;
  Norm<T> final_norm;
  Linear<T> pooler;
};

// The storage of a tensor of weight_specs, of anything but a matrix `data` alone; bind_weights fills in n and k. Throws
// for names that it lacks.
using WeightSource = std::function<Matrix(const std::string& name)>;

template <class T>
Weights<T> bind_weights(const ModelConfig& config, const WeightSource& source);

}  // namespace ftbert
