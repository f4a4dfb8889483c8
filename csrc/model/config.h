// A model as data, layer by layer. Every number comes from the checkpoint, none from a constant.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/communicator.h"
#include "core/format.h"
#include "core/types.h"
#include "kernels/kernels.h"

namespace ftbert {

struct NormConfig {
  NormKind kind = NormKind::none;
  bool bias = true;  // it has a beta
  double eps = 0;
  double offset = 0;  // added to gamma (Gemma: 1)
  NormRounding rounding = NormRounding::once;
  bool operator==(const NormConfig&) const = default;
};

// The first `dims` numbers of each head of queries and keys are turned in pairs, pair i by position * frequencies[i].
struct Rotary {
  int64_t dims = 0;
  std::vector<double> frequencies;  // [dims / 2], in radians; of base theta: theta^(-2i / dims)
  double amplitude = 1;             // of what was turned (YaRN's attention factor)
  bool interleaved = false;         // pairs (2i, 2i + 1); otherwise (i, i + dims / 2)
  std::optional<Stretch> stretch;   // of long sequences
  bool operator==(const Rotary&) const = default;
};

// Terms of the scores that are products with the model's table of positions, of the row of the distance between a
// query and a key: of the query with what the projection of keys makes of the row, of the key with that of queries.
struct PositionScores {
  bool keys = false, queries = false;          // which of both there are
  bool shared = true;                          // projections of the attention itself; else of their own
  bool keys_bias = true, queries_bias = true;  // of projections of their own
  bool operator==(const PositionScores&) const = default;
};

struct AttentionConfig {
  Heads heads;
  Window window;               // of the keys that a query sees; causal: none behind it
  float soft_cap = 0;          // of scaled scores; 0: none
  bool relative_bias = false;  // a table of biases by distance is added to the scores
  std::optional<PositionScores> position_scores;
  std::optional<Rotary> rotary;
  std::optional<NormConfig> qk_norm;  // over each head of queries and of keys
  bool qkv_bias = true, out_bias = true;
  const Format *qkv_type = nullptr, *out_type = nullptr;  // of the matrices as stored; nullptr: the model's type

  // Whether a term of the scores depends on how far a key stands from its query; a window does not count.
  bool by_distance() const { return relative_bias || position_scores; }
};

// Beside the first layer, whose result y becomes norm(y + activation(convolution of its input x)). Over the columns of
// a sequence's padded row, whose padding is 0.
struct Convolution {
  int64_t kernel = 0;  // columns, the token's in the middle: odd
  Activation activation = Activation::tanh;
  NormConfig norm;
};

struct FeedForwardConfig {
  int64_t inter = 0;
  Activation activation = Activation::gelu_erf;
  bool gated = false;  // activation(gate) * up; the rows of both alternate in the matrix up, gate first
  bool up_bias = true, down_bias = true;
  const Format *up_type = nullptr, *down_type = nullptr;  // as those of attention

  int64_t up_rows() const { return gated ? 2 * inter : inter; }
};

enum class NormPlace { post, pre };  // of a layer's norms: after each residual sum (BERT), or before each block

struct LayerConfig {
  NormPlace norm_place = NormPlace::post;
  AttentionConfig attention;
  NormConfig attention_norm;
  NormConfig attention_result_norm;  // of what the block adds to the stream; with norm_place pre: a sandwich
  FeedForwardConfig ffn;
  NormConfig ffn_norm;
  NormConfig ffn_result_norm;
  int64_t weights_of = 0;  // it uses the tensors layers.{weights_of}.*
};

// The layers of a model that one device computes, of so many stages: those from first_layer on. Their tensors keep the
// names that they have in the whole model. The first stage has the embeddings; a later one starts from the stream that
// the one before leaves.
struct Stage {
  int64_t index = 0, count = 1;
  int64_t first_layer = 0, layers = 0;  // layers: of the whole model, where that has stages
  bool whole() const { return count == 1; }
  bool first() const { return index == 0; }
  bool last() const { return index + 1 == count; }
};

// Of models that were trained with tokens dropped out (ESM): the row of the word table of a token whose id is mask_id
// is 0, and those of other tokens are scaled by kept / (1 - m), where m is the share of such ids in the token's
// sequence.
struct TokenDropout {
  int64_t mask_id = 0;
  float kept = 1;  // share of the tokens that training kept
};

struct ModelConfig {
  int64_t vocab = 0;
  int64_t hidden = 0;         // of the residual stream
  int64_t embedding = 0;      // width of the embedding tables; projected to hidden when it differs
  int64_t max_positions = 0;  // rows of the position table, or of one that there is not: the longest sequence
  int64_t token_types = 0;    // 0: the model has no token type embedding
  int64_t padding_id = 0;
  const Format* word_type = nullptr;  // of the word table as stored; nullptr: the model's type
  double embedding_scale = 1;         // of rows of the word table, rounded to the stream's type (Gemma: sqrt(hidden))
  int64_t relative_span = 0;        // of the table of relative biases: the same from this - 1 on; 0: the model has none
  int64_t relative_heads = 0;       // rows of that table
  bool relative_of_layers = false;  // each set of a layer's weights has such a table of its own
  std::optional<TokenDropout> token_dropout;
  int64_t position_span = 0;  // half the rows of the table of positions for scores; 0: the model has none
  // Of distances from 0 on, whose sign a bucket keeps; larger distances are in the last one. The row of the distance
  // column(query) - column(key) is position_span + bucket, within the table.
  std::vector<int32_t> position_buckets;
  NormConfig position_norm;  // over rows of that table
  std::optional<Convolution> convolution;
  PositionKind positions = PositionKind::absolute;
  NormConfig embedding_norm;              // over the sum of the embeddings
  NormConfig final_norm;                  // of what the last layer leaves
  bool states_before_final_norm = false;  // the hidden states that a caller asks for end with what that norm reads
  bool embedding_projection = false;      // embedding -> hidden, a linear layer after that norm
  bool projection_bias = true;
  NormConfig projection_norm;  // over what it gives
  bool pooler = false;         // dense + tanh over the first token
  std::vector<LayerConfig> layers;
  Shard shard;  // heads, kv_heads, relative_heads and inter above are this rank's
  Stage stage;  // layers above are this stage's

  int64_t depth() const { return static_cast<int64_t>(layers.size()); }
  // Whether padding takes no position: then a token's position is not its column.
  bool counts_tokens() const { return positions == PositionKind::from_padding; }
  // Whether some layer turns its heads by a token's column.
  bool rotary() const;
  // The rotation of layers whose frequencies depend on a sequence's length; nullptr: they depend on nothing.
  const Rotary* stretched() const;
  // Whether some layer's attention is so.
  bool by_distance() const;
  // Longest sequence that the positions are for.
  int64_t max_seq() const;

  // PositionProducts::reach of its table.
  int64_t position_reach() const { return static_cast<int64_t>(position_buckets.size()) - 1; }

  // From `encoder` of a checkpoint's config.json (docs/checkpoint.md), as JSON text. Throws Error that lists what is
  // missing, unknown, impossible or contradicts the rest, by the path of its key. whole, where given: becomes the same
  // description with every default written out and an entry for each layer.
  static ModelConfig parse(std::string_view json, std::string* whole = nullptr);
};

}  // namespace ftbert
