// A call in words, by which processes that are to make the same ones compare theirs.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/call.h"

namespace ftbert::binding {

// Those that a caller of an encoder may name.
inline constexpr std::pair<std::string_view, Want> kWants[] = {{"tokens", Want::tokens},
                                                               {"packed_tokens", Want::packed_tokens},
                                                               {"packed_index", Want::packed_index},
                                                               {"cu_seqlens", Want::cu_seqlens},
                                                               {"first", Want::first},
                                                               {"last", Want::last},
                                                               {"rows", Want::rows},
                                                               {"pooled", Want::pooled},
                                                               {"hidden_states", Want::hidden_states}};

// A line for each argument: "input_ids: Long [2, 9] on cpu, contents 1f0c2b3a59d8e746". Tensors on the CPU have
// contents. contents: tensors on a GPU too, for which it waits unless its stream is being recorded.
std::string lines_of(const Call& call, const std::vector<Want>& wants, bool contents);

// Of so many bytes, wherever they came from: no protection against anyone.
uint64_t digest_of(const void* data, size_t bytes);

}  // namespace ftbert::binding
