// What a model is: data, not subclasses. Every number comes from the checkpoint, none from a constant.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "core/types.h"

namespace ftbert {

enum class NormPlace { post, pre };  // LayerNorm after the residual sum (BERT), or before each block
struct EncoderConfig {
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t head_size = 0;
  int64_t inter = 0;
  int64_t embedding = 0;      // width of the embedding tables; projected to hidden when it differs
  int64_t max_positions = 0;  // rows of the position table
  int64_t token_types = 0;    // 0: the model has no token type embedding
  int64_t padding_id = 0;
  int64_t relative_span = 0;    // attention has an additive bias by distance, the same from this - 1 on; 0: none
  int64_t distinct_layers = 0;  // layer i has the weights of layers.{i * distinct_layers / layers}; 0: its own
  double layer_norm_eps = 0;
  Activation activation = Activation::gelu_erf;
  NormPlace norm_place = NormPlace::post;
  PositionKind positions = PositionKind::absolute;
  bool embedding_norm = true;         // LayerNorm over the sum of the embeddings
  bool embedding_projection = false;  // embedding -> hidden, a linear layer after that LayerNorm
  bool pooler = false;                // dense + tanh over the first token

  // Whether padding takes no position: then a token's position is not its column.
  bool counts_tokens() const { return positions == PositionKind::from_padding; }
  // Longest sequence that the position table can hold; there is no such where positions are `none`.
  int64_t max_seq() const;
  // Which layers.{...} of the weights layer i uses.
  int64_t layer_weights(int64_t i) const { return distinct_layers ? i * distinct_layers / layers : i; }

  // From the checkpoint's config, as text by key; what has a default here may be absent. Throws Error listing every
  // missing, unknown or impossible entry.
  static EncoderConfig parse(const std::map<std::string, std::string>& entries);
};

}  // namespace ftbert
