// From what a caller passes to what the core takes: checked, on the right device, unpadded.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "binding/padding.h"
#include "core/graph.h"
#include "encoder.h"

namespace ftbert::binding {

// In the host's memory, where kernels write it: a copy would be one more thing to wait for.
class PendingInfo {
 public:
  explicit PendingInfo(void* stream)
      : stream_(stream),
        memory_(at::empty({kInfoWords}, at::TensorOptions().dtype(at::kLong).pinned_memory(true))),
        mark_(make_stream_mark()) {}
  PendingInfo(const PendingInfo&) = delete;
  PendingInfo& operator=(const PendingInfo&) = delete;
  ~PendingInfo() {
    if (done_) return;
    try {  // something failed in between: the memory must outlive the kernels
      launched();
      wait();
    } catch (const Error&) {  // the GPU is lost; the next call says so
    }
  }
  PaddingInfo* info() const { return info_in(memory_); }
  void launched() { mark_->set(stream_); }  // after the last kernel that writes
  PaddingInfo wait() {
    mark_->wait_on_host();
    done_ = true;
    return *info();
  }

 private:
  void* stream_;
  at::Tensor memory_;
  std::unique_ptr<StreamMark> mark_;
  bool done_ = false;
};

// `batch` points into the tensors beside it, all but its positions, which are found where it runs; mask, to_padded and
// to_packed are of padded input alone.
struct CheckedInput {
  at::Tensor input_ids, mask, to_padded, to_packed, cu_seqlens, end_k, rows, hidden;
  std::optional<at::Tensor> token_type_ids;
  Batch batch;
  std::unique_ptr<PendingInfo> counting;  // what the GPU is still counting

  bool padded() const { return to_packed.defined(); }
  // Until this has waited for the GPU's count, the batch's tokens and longest sequence may be as many as the padded
  // input allows, and ids and mask unchecked. Throws Error where they are wrong.
  void wait_for_count(const ModelConfig& config);
};

// When the host waits for the token count of a mask on the GPU: before anything else, or where computing the padding
// costs less than that wait, in CheckedInput::wait_for_count, after the encoder has been launched.
enum class Wait { first, last };

// input_ids [batch, seq] int32/int64, mask and token types of the same shape or absent. At most one device sync:
// when the mask is on the GPU, its token count must be read to size the packed tensors.
template <class Device>
CheckedInput unpad(Context<Device>& context, at::Device device, const ModelConfig& config, const at::Tensor& input_ids,
                   const std::optional<at::Tensor>& attention_mask, const std::optional<at::Tensor>& token_type_ids,
                   Wait wait = Wait::first);

// The indices of packed tokens int32/int64 [n] become the rows of its batch that are read; on the CPU they are looked
// at.
void choose_rows(CheckedInput& input, const std::optional<at::Tensor>& rows);

// keys int32 [batch] of packed input: so many tokens of each sequence are keys, the first. On the CPU they are looked
// at.
void limit_keys(CheckedInput& input, const ModelConfig& config, const at::Tensor& keys);

// Of a later stage: what the stage before has left, [tokens, hidden] of the stream's type. Error for another shape.
void take_hidden(CheckedInput& input, const at::Tensor& hidden, int64_t cols, DType dtype);

// The first sequence, of `prefix` tokens, is the prefix of all others of packed input; on the CPU the offsets are
// looked at. max_seqlen: at least the longest sequence with the prefix.
void share_prefix(CheckedInput& input, int64_t prefix, int64_t max_seqlen);

// input_ids [tokens] int32/int64, cu_seqlens [batch+1] int32, on the device offsets_on. No device sync: on CUDA the
// contents are not looked at.
template <class Device>
CheckedInput check_packed(Context<Device>& context, at::Device device, const ModelConfig& config,
                          const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                          const std::optional<at::Tensor>& token_type_ids, at::Device offsets_on);

}  // namespace ftbert::binding
