// From what a caller passes to what the core takes: checked, on the right device, unpadded.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "encoder.h"

namespace ftbert::binding {

class PendingInfo;

// `encoder` points into the tensors beside it; mask, token_index and packed_index are of padded input alone.
struct CheckedInput {
  at::Tensor input_ids, mask, token_index, packed_index, cu_seqlens;
  std::optional<at::Tensor> token_type_ids;
  EncoderInput encoder;
  std::unique_ptr<PendingInfo> counting;  // what the GPU is still counting

  CheckedInput();
  CheckedInput(CheckedInput&&) noexcept;
  ~CheckedInput();
  // Until this has waited for the GPU's count, encoder.tokens and max_seqlen may be as large as the padded input
  // allows, and ids and mask unchecked. Throws Error where they are wrong.
  void settle(const EncoderConfig& config);
};

// When the host waits for the token count of a mask on the GPU: before anything else, or where computing the padding
// costs less than that wait, in CheckedInput::settle, after the encoder has been launched.
enum class Wait { first, last };

// input_ids [batch, seq] int32/int64, mask and token types of the same shape or absent. At most one device sync:
// when the mask is on the GPU, its token count must be read to size the packed tensors.
template <class Device>
CheckedInput unpad(Context<Device>& context, at::Device device, const EncoderConfig& config,
                   const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
                   const std::optional<at::Tensor>& token_type_ids, Wait wait = Wait::first);

// input_ids [tokens] int32/int64, cu_seqlens [batch+1] int32. No device sync: on CUDA the contents are not looked at.
template <class Device>
CheckedInput check_packed(Context<Device>& context, at::Device device, const EncoderConfig& config,
                          const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                          const std::optional<at::Tensor>& token_type_ids);

}  // namespace ftbert::binding
