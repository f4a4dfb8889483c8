#include "binding/call_words.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdio>
#include <cstring>

#include "binding/tensors.h"
#include "core/graph.h"

namespace ftbert::binding {
namespace {

bool is_being_recorded(const at::Tensor& t) {
  return t.is_cuda() &&
         is_recording(native_handle(c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device())));
}

std::string line_of(const char* name, const at::Tensor& t, bool contents) {
  std::string line = std::string(name) + ": ";
  if (!t.defined()) return line + "none\n";
  if (t.is_nested()) return line + "nested\n";
  line += std::string(at::toString(t.scalar_type())) + " " + shape_text(t.sizes()) + " on " +
          c10::DeviceTypeName(t.device().type(), /*lower_case=*/true);
  const bool dense = t.layout() == at::kStrided && t.has_storage() && has_data(t);
  if (dense && (t.is_cpu() || (contents && t.is_cuda() && !is_being_recorded(t)))) {
    const at::Tensor here = t.cpu().contiguous();
    char digest[32];
    std::snprintf(digest, sizeof(digest), ", contents %016llx",
                  static_cast<unsigned long long>(digest_of(here.const_data_ptr(), here.nbytes())));
    line += digest;
  }
  return line + "\n";
}

std::string line_of(const char* name, const std::optional<at::Tensor>& t, bool contents) {
  return line_of(name, t.value_or(at::Tensor()), contents);
}

std::string line_of(const char* name, int64_t number) {
  return std::string(name) + ": " + std::to_string(number) + "\n";
}

}  // namespace

std::string lines_of(const Call& call, const std::vector<Want>& wants, bool contents) {
  if (!call.caches.empty())
    return line_of("next tokens", call.input_ids, contents) + line_of("cu_seqlens", call.cu_seqlens, contents) +
           line_of("slots", call.slots, contents) + line_of("longest", call.max_seqlen) +
           line_of("longest with its cache", call.max_held) + line_of("all rows", wants.front() == Want::logits);
  std::string want;
  for (const Want one : wants)
    for (const auto& [name, value] : kWants)
      if (value == one) want += (want.empty() ? "" : ", ") + std::string(name);
  return line_of("input_ids", call.input_ids, contents) + line_of("attention_mask", call.attention_mask, contents) +
         line_of("token_type_ids", call.token_type_ids, contents) + line_of("cu_seqlens", call.cu_seqlens, contents) +
         line_of("max_seqlen", call.max_seqlen) + line_of("rows", call.rows, contents) +
         line_of("shared_prefix", call.shared_prefix) + line_of("keys", call.keys, contents) + "want: " + want + "\n";
}

uint64_t digest_of(const void* data, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  uint64_t digest = 0xcbf29ce484222325u ^ bytes;
  const auto add = [&](uint64_t word) {
    digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 29;
  };
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), from += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, from, sizeof(word));
    add(word);
  }
  uint64_t rest = 0;
  if (bytes > 0) std::memcpy(&rest, from, bytes);
  add(rest);
  return digest;
}

}  // namespace ftbert::binding
