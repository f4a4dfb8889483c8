// What becomes of a score before the softmax. A kernel gets the members that it names, and a policy with another member
// set is refused: no member is ignored.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/enum_set.h"
#include "core/types.h"

namespace ftbert {

// The keys that the query at `position` of its sequence sees: those from position - left to position + right.
struct Window {
  static constexpr int kAll = INT32_MAX;
  int left = kAll, right = kAll;  // causal: right 0

  bool operator==(const Window&) const = default;
  bool set() const { return *this != Window(); }
  FTBERT_HOST_DEVICE int begin(int position) const { return position > left ? position - left : 0; }
  FTBERT_HOST_DEVICE int end(int position, int keys) const {
    return right < keys - 1 - position ? position + right + 1 : keys;
  }
};

// What is added to a score before the softmax: table[head][column(key) - column(query) + span-1]. Distances outside
// the table are read as its first and last.
template <class T>
struct RelativeBias {
  const T* table = nullptr;          // [heads, 2*span-1], or nullptr: nothing is added
  const int32_t* columns = nullptr;  // [all tokens, from token 0] columns in the padded input; nullptr: in the sequence
  int64_t span = 0;

  bool set() const { return table != nullptr; }
};

// What is added to a score before its scale: q . keys + k . queries of a head, products with the row that
// column(key) - column(query) reads of a table of positions, which went through the projections of keys and queries. On
// the CPU that is row rows[distance]; a GPU's tables have one for each distance.
template <class T>
struct PositionProducts {
  static constexpr int64_t kStep = 32;    // the CPU's `stride` is a multiple: registers of any CPU hold whole ones
  static constexpr int64_t kBeyond = 63;  // distances past `reach` in a GPU's tables: kernels read many side by side

  // The CPU's [heads, head_size, stride], a GPU's [heads, stride, head_size]; or nullptr: there is no such product.
  const T* keys = nullptr;
  const T* queries = nullptr;
  int64_t stride = 0;             // position_stride
  const int32_t* rows = nullptr;  // of distances -reach to reach, rows[0] that of 0, ascending; farther: as the last
  int64_t reach = 0;
  int64_t exact = 0;                 // up to this distance on both sides rows lie side by side, as distances do
  const int32_t* columns = nullptr;  // as those of RelativeBias

  bool set() const { return rows != nullptr; }
  FTBERT_HOST_DEVICE int row_of(int64_t distance) const {
    return rows[distance < -reach ? -reach : distance > reach ? reach : distance];
  }
};

// PositionProducts::stride for tables of 2 * span rows and distances up to `reach`: on the CPU the rows, and zeros that
// no distance reads; on a GPU the distances from -(reach + kBeyond) to reach + kBeyond.
template <class Device>
constexpr int64_t position_stride(int64_t span, int64_t reach) {
  using Any = PositionProducts<float>;
  if constexpr (std::is_same_v<Device, Cuda>) return 2 * (reach + Any::kBeyond) + 1;
  return (2 * span + Any::kStep - 1) / Any::kStep * Any::kStep;
}

// A scaled score s becomes value * tanh(s / value) before the bias; 0: stays s.
struct SoftCap {
  float value = 0;

  bool set() const { return value > 0; }
};

// The members of a ScorePolicy, in its order.
enum class ScoreMember { window, bias, soft_cap, positions };
inline constexpr std::array kScoreMemberNames{std::string_view("window"), std::string_view("relative bias"),
                                              std::string_view("soft cap"),
                                              std::string_view("products with positions")};

using ScoreMembers = EnumSet<ScoreMember>;

// "window, soft cap"
inline std::string names_of(ScoreMembers members) {
  std::string all;
  for (size_t i = 0; i < kScoreMemberNames.size(); ++i)
    if (members.has(static_cast<ScoreMember>(i))) all.append(all.empty() ? "" : ", ").append(kScoreMemberNames[i]);
  return all;
}

template <class T, ScoreMembers kRead>
class ScoresRead;

template <class T>
class ScorePolicy {
  using Members = std::tuple<Window, RelativeBias<T>, SoftCap, PositionProducts<T>>;
  static constexpr size_t kCount = std::tuple_size_v<Members>;
  static_assert(kCount == kScoreMemberNames.size());

 public:
  ScorePolicy() = default;
  ScorePolicy(const Window& window, const RelativeBias<T>& bias = {}, SoftCap soft_cap = {},
              const PositionProducts<T>& positions = {})
      : members_(window, bias, soft_cap, positions) {}

  // The members that change scores.
  ScoreMembers set() const {
    return [&]<size_t... i>(std::index_sequence<i...>) {
      ScoreMembers all;
      (all.add(static_cast<ScoreMember>(i), std::get<i>(members_).set()), ...);
      return all;
    }(std::make_index_sequence<kCount>());
  }

  // For who chooses a kernel, whatever else is set; kernels get what they name.
  template <ScoreMember kMember>
  const auto& choose_by() const {
    return std::get<static_cast<size_t>(kMember)>(members_);
  }

  // What is left for `softmax` where these products were added to the scores.
  ScorePolicy without_positions() const {
    ScorePolicy rest = *this;
    std::get<PositionProducts<T>>(rest.members_) = {};
    return rest;
  }

  // For a kernel that reads these members. `kernel`: its name, for the error where another is set.
  template <ScoreMembers kRead>
  ScoresRead<T, kRead> read(const char* kernel) const {
    const ScoreMembers unread = set().without(kRead);
    FTBERT_CHECK(unread == ScoreMembers(), kernel,
                 " does not read a member of the score policy that is set: ", names_of(unread));
    return ScoresRead<T, kRead>(*this);
  }

 private:
  template <class, ScoreMembers>
  friend class ScoresRead;
  Members members_;
};

// The members of a policy that a kernel has named; none of the others is set, and none can be read.
template <class T, ScoreMembers kRead>
class ScoresRead {
 public:
  template <ScoreMember kMember>
    requires(kRead.has(kMember))
  const auto& get() const {
    return std::get<static_cast<size_t>(kMember)>(policy_.members_);
  }

 private:
  friend ScorePolicy<T>;
  explicit ScoresRead(const ScorePolicy<T>& policy) : policy_(policy) {}
  const ScorePolicy<T>& policy_;
};

}  // namespace ftbert
