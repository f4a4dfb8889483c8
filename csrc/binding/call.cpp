#include "binding/call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"

namespace ftbert::binding {

Want parse_want(std::string_view word) {
  static constexpr std::pair<std::string_view, Want> kWords[] = {{"tokens", Want::tokens},
                                                                 {"packed_tokens", Want::packed_tokens},
                                                                 {"packed_index", Want::packed_index},
                                                                 {"cu_seqlens", Want::cu_seqlens},
                                                                 {"first", Want::first},
                                                                 {"pooled", Want::pooled},
                                                                 {"hidden_states", Want::hidden_states}};
  std::string known;
  for (const auto& [name, want] : kWords) {
    if (name == word) return want;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw Error("want: expected some of " + known + ", got '" + std::string(word) + "'");
}

bool reads_first_tokens_only(const std::vector<Want>& wants) {
  return !wants.empty() && std::all_of(wants.begin(), wants.end(), [](Want want) {
    return want == Want::first || want == Want::pooled || want == Want::cu_seqlens || want == Want::packed_index;
  });
}

}  // namespace ftbert::binding
